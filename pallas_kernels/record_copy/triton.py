"""The record copy for any NVIDIA GPU: plain loads and stores by a few dozen programs, which fill a PCIe link together.

A program takes every ``programs``-th copy of the plan, counted over all segments. It finds the segment of a copy by
comparing the copy's number with the running totals of the counts, which it keeps in registers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sparda_jax.pallas_kernels.backend import interpreting
from sparda_jax.pallas_kernels.record_copy.plan import plan_width


def takes(records: jax.Array) -> bool:
    """Whether the kernel takes such records: Triton knows powers of two only."""
    return all(size == pl.next_power_of_2(size) for size in records.shape[1:])


def copy_records(
    plan: jax.Array,
    source: jax.Array,
    destination: jax.Array,
    queue: jax.Array | None,
    *,
    segments: int,
    direction: tuple[int, int],
    programs: int = 32,
    num_warps: int = 8,
) -> tuple[jax.Array, jax.Array | None]:
    """``destination[pair[direction[1]]] = source[pair[direction[0]]]`` for the counted pairs, in place; and a queue.

    Args:
        plan: see `pack_plan`.
        source: records, typed as device memory (`host_as_device`); rows and head_dim are powers of two.
        destination: records, typed as device memory.
        queue: passed on as it is; the next copy to get it waits for this one. None: no such.
        segments: segments of the plan.
        direction: which number of a pair names the source record and which the destination.
        programs: thread blocks; each has one record under way.
        num_warps: warps of a thread block.
    """
    body = functools.partial(
        _copy_body,
        segments=segments,
        width=plan_width(plan.shape[0], segments),
        direction=direction,
        programs=programs,
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    updated = [destination] if queue is None else [destination, queue]
    copied, *passed = pl.pallas_call(
        body,
        grid=(programs,),
        in_specs=[anywhere] * (2 + len(updated)),
        out_specs=[anywhere] * len(updated),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        input_output_aliases={2 + i: i for i in range(len(updated))},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpreting(),
        name="copy_records",
    )(plan, source, *updated)
    return copied, passed[0] if passed else None


def _copy_body(plan, source, *updated, segments, width, direction, programs):
    destination = updated[len(updated) // 2]  # the first result; the queue is there for the order alone
    lane = jnp.arange(pl.next_power_of_2(segments))
    counts = plgpu.load(plan.at[lane], mask=lane < segments, other=0)
    ends = jnp.cumsum(counts)
    first = pl.program_id(0)

    def copy_one(turn, _):
        number = first + turn * programs
        before = ends <= number
        segment = jnp.sum(before.astype(jnp.int32))
        index = number - jnp.sum(jnp.where(before, counts, 0))
        at = segments + 2 * (segment * width + index)
        record = plgpu.load(source.at[plan[at + direction[0]]])
        plgpu.store(destination.at[plan[at + direction[1]]], record)

    total = jnp.sum(counts)
    turns = lax.div(jnp.maximum(total - first + programs - 1, 0), programs)
    lax.fori_loop(0, turns, copy_one, None)
