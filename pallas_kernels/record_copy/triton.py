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
    *,
    segments: int,
    direction: tuple[int, int],
    programs: int = 32,
    num_warps: int = 8,
) -> jax.Array:
    """``destination[pair[direction[1]]] = source[pair[direction[0]]]`` for the counted pairs, in place.

    Args:
        plan: see `pack_plan`.
        source: records, typed as device memory (`host_as_device`); rows and head_dim are powers of two.
        destination: records, typed as device memory.
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
    return pl.pallas_call(
        body,
        grid=(programs,),
        in_specs=[anywhere] * 3,
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(destination.shape, destination.dtype),
        input_output_aliases={2: 0},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpreting(),
        name="copy_records",
    )(plan, source, destination)


def _copy_body(plan, source, _, destination, *, segments, width, direction, programs):
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
