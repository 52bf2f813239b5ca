"""The record copy for any NVIDIA GPU: plain loads and stores by a few dozen programs, which fill a PCIe link together.

A program takes every ``programs``-th copy of the plan, counted over all segments. It finds the segment of a copy by
comparing the copy's number with the running totals of the counts, which it keeps in registers.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sparda_jax.pallas_kernels.backend import interpreting
from sparda_jax.pallas_kernels.record_copy.codes import Code, code_of, decode, encode, magnitude, scales
from sparda_jax.pallas_kernels.record_copy.plan import plan_width


def takes(source: jax.Array, destination: jax.Array) -> bool:
    """Whether the kernel copies such records: Triton knows powers of two only, of packed ones those of the others."""
    records = destination if code_of(source.dtype) else source
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
    num_warps: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """``destination[pair[direction[1]]] = source[pair[direction[0]]]`` for the counted pairs, in place; and a queue.

    Args:
        plan: see `pack_plan`.
        source: records, typed as device memory (`host_as_device`); rows and head_dim are powers of two.
        destination: records, typed as device memory; packed where the source is not, or the other way round, or alike.
        queue: passed on as it is; the next copy to get it waits for this one. None: no such.
        segments: segments of the plan.
        direction: which number of a pair names the source record and which the destination.
        programs: thread blocks; each has one record under way.
        num_warps: warps of a thread block; None: 8, and 4 for records that are packed or unpacked, half as many bytes.
    """
    body = functools.partial(
        _copy_body,
        segments=segments,
        width=plan_width(plan.shape[0], segments),
        direction=direction,
        programs=programs,
    )
    if num_warps is None:
        num_warps = 8 if source.dtype == destination.dtype else 4
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
    move = _move_between(source, destination)
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
        move(source, destination, plan[at + direction[0]], plan[at + direction[1]])

    total = jnp.sum(counts)
    turns = lax.div(jnp.maximum(total - first + programs - 1, 0), programs)
    lax.fori_loop(0, turns, copy_one, None)


def _move_between(source, destination) -> Callable[..., None]:
    """How a record goes from one array of records to the other."""
    if source.dtype == destination.dtype:
        return _move
    if code := code_of(source.dtype):
        return functools.partial(_unpack, code=code)
    code = code_of(destination.dtype)
    assert code is not None
    return functools.partial(_pack, code=code)


def _move(source, destination, from_id, to_id) -> None:
    plgpu.store(destination.at[to_id], plgpu.load(source.at[from_id]))


def _scales_at(packed, record, byte: int, rows: int):
    """Where the scales of a quarter of a record's rows are."""
    head_dim = packed.shape[2]
    place = byte * (rows // 4) + jnp.arange(rows // 4)
    return packed.at[record, rows // 4 + place // head_dim, place % head_dim]


def _unpack(source, destination, from_id, to_id, code: Code) -> None:
    rows = destination.shape[1]
    quarter = rows // 4
    words = lax.bitcast_convert_type(plgpu.load(source.at[from_id, pl.ds(0, quarter)]), jnp.int32)
    for byte in range(4):
        scale = lax.bitcast_convert_type(plgpu.load(_scales_at(source, from_id, byte, rows)), jnp.float32) * code.unit
        numbers = decode(words, byte, code) * scale[:, None]
        plgpu.store(destination.at[to_id, pl.ds(byte * quarter, quarter)], numbers.astype(destination.dtype))


def _pack(source, destination, from_id, to_id, code: Code) -> None:
    rows = source.shape[1]
    quarter, words = rows // 4, 0
    for byte in range(4):
        x = plgpu.load(source.at[from_id, pl.ds(byte * quarter, quarter)]).astype(jnp.float32)
        scale, inverse = scales(jnp.max(magnitude(x), axis=1), code)
        plgpu.store(_scales_at(destination, to_id, byte, rows), lax.bitcast_convert_type(scale, destination.dtype))
        words |= encode(x, jnp.broadcast_to(inverse[:, None], x.shape), code) << (8 * byte)
    plgpu.store(destination.at[to_id, pl.ds(0, quarter)], lax.bitcast_convert_type(words, destination.dtype))
