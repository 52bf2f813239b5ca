"""The residency plan for Hopper: one CTA for each (lane, KV head) that does everything with scalars.

Mosaic has neither prefix sums nor gathers, and few blocks are missing in a step. So the rows that the plan looks things
up in come to shared memory through TMA, and one loop over the wanted blocks and one walk of the hand do the rest.
Results go straight to global memory: a store needs no waiting.

All threads of a CTA run the same scalar program, at their own pace, and store the same values. Barriers stand between
what is read and what changes it in shared memory; in global memory nothing that is read is ever changed: the walk reads
each slot once, before its own changes to it. Slots that get their second chance are listed on the way, and if the whole
circle was not enough, the rest of the victims are the first of that list, which is what a second circle would find.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparda_jax.pallas_kernels.residency.state import Residency

_BOX = 256
"""A TMA copy has at most 256 elements in each dimension."""
_ALIGNED = 4
"""A TMA copy starts and ends at multiples of 16 bytes within a row, or the GPU stops with an illegal instruction."""
_WANTED = 1 << 30
"""Added to the slot id of a wanted block in the CTA's copy of slot_of_block."""
_UNROLL = 4


def takes(state: Residency, width: int) -> bool:
    """Whether the kernel takes these tables: TMA wants rows of a multiple of 16 bytes, and shared memory is limited."""
    blocks, slots = state.slot_of_block.shape[2], state.block_of_slot.shape[1]
    aligned = all(size % _ALIGNED == 0 for size in (blocks, slots, width))
    return aligned and width <= _BOX and blocks <= 16_384


def plan_residency(
    state: Residency,
    wanted: jax.Array,
    block_table: jax.Array,
    query_block: jax.Array,
    written: jax.Array,
    *,
    chunk: int = 128,
) -> tuple[Residency, jax.Array, jax.Array]:
    """See `sparda_jax.pallas_kernels.residency.plan_residency`; for tables that `takes` accepts.

    Args:
        chunk: slots that come to shared memory at a time, at most 256; a multiple of 4.
    """
    batch, kv_heads, width = wanted.shape
    blocks, slots = state.slot_of_block.shape[2], state.block_of_slot.shape[1]
    chunk = min(chunk, slots)
    rows = -(-blocks // _BOX)
    shared = (
        plgpu.SMEM((width,), jnp.int32),
        plgpu.SMEM((blocks + _ALIGNED,), jnp.int32),
        plgpu.SMEM((blocks,), jnp.int32),
        plgpu.SMEM((chunk,), jnp.int32),
        plgpu.SMEM((chunk,), jnp.int32),
        plgpu.SMEM((width,), jnp.int32),
        plgpu.SMEM((width,), jnp.int32),
        plgpu.SMEM((width,), jnp.int32),
        plgpu.Barrier(num_arrivals=1 + 2 * rows),
        plgpu.Barrier(num_arrivals=2),
    )
    plan = jax.ShapeDtypeStruct((batch * kv_heads * (1 + 2 * width),), jnp.int32)
    kernel: Callable[..., Any] = pl.kernel(
        lambda *refs: pl.run_scoped(functools.partial(_plan_body, refs), *shared),
        out_type=(jax.ShapeDtypeStruct(wanted.shape, jnp.int32), plan),
        mesh=plgpu.Mesh(grid=(batch, kv_heads), grid_names=("lane", "head")),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        name="plan_residency",
    )
    refs = [jax.new_ref(x) for x in (state.slot_of_block, state.block_of_slot, state.referenced, state.hand)]
    slot_ids, plan = kernel(*refs, state.base, state.count, wanted, block_table, query_block, written)
    slot_of_block, block_of_slot, referenced, hand = (jax.freeze(ref) for ref in refs)
    state = dataclasses.replace(
        state, slot_of_block=slot_of_block, block_of_slot=block_of_slot, referenced=referenced, hand=hand
    )
    return state, slot_ids, plan


def _plan_body(
    refs,
    wanted,
    slot_of,
    record_of,
    chunk_blocks,
    chunk_bits,
    missing,
    chance_slots,
    chance_blocks,
    rows_here,
    chunk_here,
):
    slot_of_block, block_of_slot, referenced, hand, *numbers, slot_ids, plan = refs
    base, count, wanted_in, block_table, query_block, written = numbers
    batch, kv_heads, width = wanted_in.shape
    blocks, slots, chunk = slot_of_block.shape[2], block_of_slot.shape[1], chunk_blocks.shape[0]
    lane, head = lax.axis_index("lane"), lax.axis_index("head")
    zero, one = jnp.int32(0), jnp.int32(1)

    plgpu.copy_gmem_to_smem(wanted_in.at[lane, head], wanted, rows_here)
    for start in range(0, blocks, _BOX):
        piece = pl.ds(start, min(_BOX, blocks - start))
        plgpu.copy_gmem_to_smem(slot_of_block.at[lane, head, piece], slot_of.at[piece], rows_here)
        plgpu.copy_gmem_to_smem(block_table.at[lane, piece], record_of.at[piece], rows_here)
    base, count, written, query_block = base[lane], count[lane], written[lane], query_block[lane]
    start_of_hand = lax.rem(hand[lane, head], jnp.maximum(count, 1))
    plgpu.barrier_wait(rows_here)

    def look_up(turn, needed):
        first = turn * _UNROLL
        some = [wanted[first + i] for i in range(_UNROLL)]
        # What lies behind the blocks is never marked, and what is read there never used.
        entries = [slot_of[jnp.where(block >= 0, block, blocks)] for block in some]
        plgpu.commit_smem()
        for i, (block, entry) in enumerate(zip(some, entries, strict=True)):
            real = block >= 0
            slot = jnp.where(real & (entry >= 0), entry & (_WANTED - 1), -1)
            slot_ids[lane, head, first + i] = slot

            @pl.when(slot >= 0)
            def _(block=block, slot=slot):
                slot_of[block] = slot | _WANTED
                referenced[head, lax.div(slot, kv_heads)] = one

            is_missing = real & (slot < 0)

            @pl.when(is_missing)
            def _(index=first + i, needed=needed):
                missing[needed] = index

            needed += is_missing.astype(jnp.int32)
        return needed

    needed = lax.fori_loop(zero, jnp.int32(width // _UNROLL), look_up, zero)

    def place(number, slot, old, copies):
        """Gives a victim, in which block ``old`` lay, to a missing block; returns the number of copies after that."""
        index = missing[number]
        block = wanted[index]
        slot_id = slot * kv_heads + head
        slot_ids[lane, head, index] = slot_id
        slot_of_block[lane, head, block] = slot_id
        block_of_slot[head, slot] = block
        referenced[head, slot] = one

        @pl.when(old >= 0)
        def _():
            slot_of_block[lane, head, old] = jnp.int32(-1)

        copied = block != query_block

        @pl.when(copied)
        def _():
            segment = lane * kv_heads + head
            pair = batch * kv_heads + 2 * (segment * width + copies)
            plan[pair] = record_of[block] * kv_heads + head
            plan[pair + 1] = slot_id

        return copies + copied.astype(jnp.int32)

    def walk_chunk(state):
        position, found, chances, last, copies = state
        around = start_of_hand + position
        offset = jnp.where(around >= count, around - count, around)
        start = jnp.minimum((base + offset) & -_ALIGNED, slots - chunk)
        shift = base + offset - start
        length = jnp.minimum(chunk - shift, jnp.minimum(count - position, count - offset))
        # Threads that are behind may still read the chunk before.
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(block_of_slot.at[head, pl.ds(start, chunk)], chunk_blocks, chunk_here)
        plgpu.copy_gmem_to_smem(referenced.at[head, pl.ds(start, chunk)], chunk_bits, chunk_here)
        plgpu.barrier_wait(chunk_here)

        def look(state):
            i, found, chances, last, copies = state
            block, bit = chunk_blocks[shift + i], chunk_bits[shift + i]
            entry = slot_of[jnp.maximum(block, 0)]
            slot = start + shift + i
            free = block < 0
            may_go = free | ((block < written) & (entry < _WANTED))
            ready = may_go & (free | (bit == 0))
            passed = may_go & jnp.logical_not(ready)

            @pl.when(passed)
            def _():
                referenced[head, slot] = zero

            @pl.when(passed & (chances < width))
            def _():
                chance_slots[chances] = slot
                chance_blocks[chances] = block

            copies = lax.cond(ready, lambda: place(found, slot, block, copies), lambda: copies)
            return (
                i + 1,
                found + ready.astype(jnp.int32),
                chances + passed.astype(jnp.int32),
                jnp.where(ready, slot, last),
                copies,
            )

        _, *state = lax.while_loop(
            lambda state: (state[0] < length) & (state[1] < needed), look, (zero, found, chances, last, copies)
        )
        return position + length, *state

    _, found, chances, last, copies = lax.while_loop(
        lambda state: (state[0] < count) & (state[1] < needed), walk_chunk, (zero, zero, zero, jnp.int32(-1), zero)
    )

    def take_chance(i, state):
        _, copies = state
        slot = chance_slots[i]
        return slot, place(found + i, slot, chance_blocks[i], copies)

    plgpu.commit_smem()
    last, copies = lax.fori_loop(zero, jnp.minimum(needed - found, chances), take_chance, (last, copies))
    plan[lane * kv_heads + head] = copies

    @pl.when(last >= 0)
    def _():
        moved = last - base + 1
        hand[lane, head] = jnp.where(moved == count, 0, moved)
