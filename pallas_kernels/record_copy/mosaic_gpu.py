"""The record copy for Hopper: a few CTAs with a ring of TMA copies each, which is what it takes to fill a PCIe link.

A CTA takes every ``ctas``-th copy of the plan, counted over all segments, so that ragged segments load the CTAs evenly.
A record goes through shared memory in one stage of the ring: TMA load, barrier, TMA store. One that is packed or
unpacked on its way is stored from a second buffer, and its stage is free as soon as the registers have been there: the
loads of the whole ring are under way meanwhile. All loops end where the counts say.

The counts come to shared memory once. A pair is read from the plan one turn of the loop before it is used: a scalar
load from global memory takes about 0.6 us, for which the ring would otherwise stand still at every record.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparda_jax.pallas_kernels.record_copy.mosaic_packing import HEAD_DIMS, change_between
from sparda_jax.pallas_kernels.record_copy.plan import plan_width

_BOX = 256
"""A TMA copy has at most 256 elements in each dimension."""
_RING_BYTES = 196_608
"""Shared memory for records: six stages of 32 KB leave enough of 227 KB for the counts."""
_STORES = 2
"""Buffers for records that were packed or unpacked: one is filled while the other one is stored."""


def takes(source: jax.Array, destination: jax.Array) -> bool:
    """Whether the kernel copies such records: rows of a multiple of 16 bytes, within one TMA copy and a stage; packed
    ones of so many channels as `mosaic_packing` knows, and rows that fill the words of scales.
    """
    ends = (source, destination)
    fits = all(max(end.shape[1:]) <= _BOX and end.shape[2] * end.dtype.itemsize % 16 == 0 for end in ends)
    if source.dtype == destination.dtype:
        return fits and _bytes(source) <= _RING_BYTES
    rows, head_dim = max(end.shape[1] for end in ends), source.shape[2]
    if head_dim not in HEAD_DIMS or rows % 32 or head_dim % (rows // 4):
        return False
    return fits and _STORES * _bytes(destination) + _bytes(source) <= _RING_BYTES


def _bytes(records: jax.Array) -> int:
    """Of one record."""
    return records.shape[1] * records.shape[2] * records.dtype.itemsize


def copy_records(
    plan: jax.Array,
    source: jax.Array,
    destination: jax.Array,
    queue: jax.Array | None,
    *,
    segments: int,
    direction: tuple[int, int],
    ctas: int = 4,
    stages: int = 6,
    storing: int = 1,
) -> tuple[jax.Array, jax.Array | None]:
    """``destination[pair[direction[1]]] = source[pair[direction[0]]]`` for the counted pairs, in place; and a queue.

    Args:
        plan: see `pack_plan`.
        source: records, typed as device memory (`host_as_device`).
        destination: records, typed as device memory; packed where the source is not, or the other way round, or alike.
        queue: four int32 that are written, so that the next copy to get them waits for this one; None: no such.
        segments: segments of the plan.
        direction: which number of a pair names the source record and which the destination.
        ctas: thread blocks; each takes an SM from whatever runs beside the copy.
        stages: records in shared memory per CTA; fewer where they would not fit.
        storing: how many stores may still be reading their stage when the next load is issued; not where records are
            packed or unpacked, whose stages are free before they are stored.
    """
    change = change_between(source, destination)
    shared = (plgpu.SMEM((_STORES, *destination.shape[1:]), destination.dtype),) if change else ()
    left = _RING_BYTES - (_STORES * _bytes(destination) if change else 0)
    stages = min(stages, left // _bytes(source))
    storing = 0 if change else min(storing, stages - 1)
    # TMA moves multiples of 16 bytes; what follows the counts in the plan comes along.
    counts_size = -(-segments // 4) * 4
    body = functools.partial(
        _copy_body,
        segments=segments,
        width=plan_width(plan.shape[0], segments),
        direction=direction,
        ctas=ctas,
        stages=stages,
        storing=storing,
        counts_size=counts_size,
        change=change,
    )
    plan = jnp.pad(plan, (0, max(0, counts_size - plan.shape[0])))
    shared = (
        plgpu.SMEM((counts_size,), jnp.int32),
        plgpu.SMEM((stages, *source.shape[1:]), source.dtype),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=stages),
        *shared,
    )
    kernel: Callable[..., Any] = pl.kernel(
        lambda plan, source, destination, *queue: pl.run_scoped(
            functools.partial(body, plan, source, destination, queue), *shared
        ),
        out_type=(),
        mesh=plgpu.Mesh(grid=(ctas,), grid_names=("cta",)),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        name="copy_records",
    )
    updated = (destination,) if queue is None else (destination, queue)
    copied, *passed = pl.run_state(lambda refs: kernel(plan, source, *refs))(updated)
    return copied, passed[0] if passed else None


def _copy_body(
    plan,
    source,
    destination,
    queue,
    counts,
    ring,
    counts_arrived,
    arrived,
    *changed,
    segments,
    width,
    direction,
    ctas,
    stages,
    storing,
    counts_size,
    change,
):
    for start in range(0, counts_size, _BOX):
        piece = pl.ds(start, min(_BOX, counts_size - start))
        plgpu.copy_gmem_to_smem(plan.at[piece], counts.at[piece], counts_arrived)
        plgpu.barrier_wait(counts_arrived)
    for passed in queue:
        plgpu.copy_smem_to_gmem(counts.at[pl.ds(0, 4)], passed)

    def settle(segment, index):
        """Carries a position beyond its segment's count over to the segment that has it; ``segments`` is the end."""

        def beyond(at):
            segment, index = at
            return (segment < segments) & (index >= counts[jnp.minimum(segment, segments - 1)])

        def carry(at):
            segment, index = at
            return segment + 1, index - counts[segment]

        return lax.while_loop(beyond, carry, (segment, index))

    def pair(segment, index):
        """The ids of the source and the destination; of no meaning at the end."""
        at = jnp.where(segment < segments, segments + 2 * (segment * width + index), segments)
        return plan[at + direction[0]], plan[at + direction[1]]

    def issue(number, segment, from_id):
        stage = lax.rem(number, jnp.int32(stages))

        @pl.when(segment < segments)
        def _():
            plgpu.copy_gmem_to_smem(source.at[from_id], ring.at[stage], arrived.at[stage])

    def advance(segment, index):
        segment, index = settle(segment, index + ctas)
        return segment, index, *pair(segment, index)

    ahead = stages - storing
    segment, index = settle(jnp.int32(0), lax.axis_index("cta"))
    from_id, to_id = pair(segment, index)
    issued, targets = jnp.int32(0), []
    for number in range(ahead):
        issue(jnp.int32(number), segment, from_id)
        issued += (segment < segments).astype(jnp.int32)
        targets.append(to_id)
        segment, index, from_id, to_id = advance(segment, index)

    def transfer(state):
        number, issued, segment, index, from_id, to_id, targets = state
        stage = lax.rem(number, jnp.int32(stages))
        plgpu.barrier_wait(arrived.at[stage])
        if change is None:
            plgpu.copy_smem_to_gmem(ring.at[stage], destination.at[targets[0]])
            # The store before the last `storing` ones has left its stage: the next load goes there.
            plgpu.wait_smem_to_gmem(storing, wait_read_only=True)
        else:
            buffer = changed[0].at[lax.rem(number, jnp.int32(_STORES))]
            plgpu.wait_smem_to_gmem(_STORES - 1, wait_read_only=True)
            change(ring.at[stage], buffer)
            plgpu.commit_smem()  # all have read the stage and written the buffer
            plgpu.copy_smem_to_gmem(buffer, destination.at[targets[0]])
        issue(number + ahead, segment, from_id)
        issued += (segment < segments).astype(jnp.int32)
        targets = (*targets[1:], to_id)
        return number + 1, issued, *advance(segment, index), targets

    lax.while_loop(
        lambda state: state[0] < state[1],
        transfer,
        (jnp.int32(0), issued, segment, index, from_id, to_id, tuple(targets)),
    )
    plgpu.wait_smem_to_gmem(0)
