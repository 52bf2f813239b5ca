"""The plan of a copy: per (lane, KV head) a segment of (record, slot) pairs and their count, in one int32 array.

One array, since a decode step hands it from the selection to the copy as one value. Layout, for ``segments`` segments
of at most ``width`` copies each: ``segments`` counts, then ``segments * width`` pairs, of which a segment's first count
are meant.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int


def pack_plan(counts: Int[Array, "segments"], pairs: Int[Array, "segments width 2"]) -> Int[Array, "plan"]:
    """The plan that holds the counts and the (record, slot) pairs."""
    return jnp.concatenate([counts, pairs.reshape(-1)])


def unpack_plan(
    plan: Int[Array, "plan"], segments: int
) -> tuple[Int[Array, "segments"], Int[Array, "segments width 2"]]:
    """The counts and the (record, slot) pairs of a plan; pairs beyond a segment's count may be anything."""
    return plan[:segments], plan[segments:].reshape(segments, plan_width(plan.shape[0], segments), 2)


def plan_width(size: int, segments: int) -> int:
    """How many pairs a segment has room for in a plan of ``size`` integers.

    Raises:
        ValueError: no plan of that many segments has this size.
    """
    if segments < 1 or size < 3 * segments or (size - segments) % (2 * segments):
        raise ValueError(
            f"plan has {size} integers, which is not segments * (1 + 2 * width) for segments={segments}, width >= 1."
        )
    return (size - segments) // (2 * segments)
