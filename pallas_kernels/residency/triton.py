"""The residency plan as one Triton-lowered kernel, one program for each (lane, KV head).

The wanted list is a vector in registers. A step that misses nothing reads no slot table. Otherwise the hand walks the
range in chunks of slots and stops with the chunk that has the last victim, so the time depends on the misses and hardly
on the range. Within a chunk, prefix sums rank the victims, and one comparison of all victims with all missing blocks
brings the i-th to the i-th: without memory in between.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sparda_jax.pallas_kernels.backend import interpreting
from sparda_jax.pallas_kernels.residency.state import Residency


def plan_residency(
    state: Residency,
    wanted: jax.Array,
    block_table: jax.Array,
    query_block: jax.Array,
    written: jax.Array,
    *,
    chunk: int = 64,
    num_warps: int = 8,
) -> tuple[Residency, jax.Array, jax.Array]:
    """See `sparda_jax.pallas_kernels.residency.plan_residency`.

    Args:
        chunk: slots that the hand looks at in one turn; a power of two.
        num_warps: warps of a program.
    """
    batch, kv_heads, width = wanted.shape
    interpret = interpreting()
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    tables = (state.slot_of_block, state.block_of_slot, state.referenced, state.hand)
    results = (*tables, wanted, jax.ShapeDtypeStruct((batch * kv_heads * (1 + 2 * width),), jnp.int32))
    *tables, slot_ids, plan = pl.pallas_call(
        functools.partial(_plan_body, chunk=chunk, interpret=interpret),
        grid=(batch, kv_heads),
        in_specs=[anywhere] * 10,
        out_specs=[anywhere] * 6,
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.int32) for x in results],
        input_output_aliases={0: 0, 1: 1, 2: 2, 3: 3},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="plan_residency",
    )(*tables, state.base, state.count, wanted, block_table, query_block, written)
    slot_of_block, block_of_slot, referenced, hand = tables
    state = dataclasses.replace(
        state, slot_of_block=slot_of_block, block_of_slot=block_of_slot, referenced=referenced, hand=hand
    )
    return state, slot_ids, plan


def _plan_body(*refs, chunk, interpret):
    base, count, wanted_in, block_table, query_block, written = refs[4:10]
    slot_of_block, block_of_slot, referenced, hand, slot_ids, plan = refs[10:]
    kv_heads, width = wanted_in.shape[1:]
    blocks, slots = slot_of_block.shape[2], block_of_slot.shape[1]
    lane, head = pl.program_id(0), pl.program_id(1)
    base, count, written, query_block = base[lane], count[lane], written[lane], query_block[lane]
    start_of_hand = lax.rem(hand[lane, head], jnp.maximum(count, 1))

    # Where a mask is off, an index points behind the array: the interpreter stores nothing there, and a GPU stores
    # nothing anywhere. An index that another element also has would let the interpreter write an old value over a new
    # one.
    entry = jnp.arange(pl.next_power_of_2(width))
    wanted = plgpu.load(wanted_in.at[lane, head, entry], mask=entry < width, other=-1)
    real = wanted >= 0
    at = jnp.where(real, wanted, blocks)
    held = plgpu.load(slot_of_block.at[lane, head, at], mask=real, other=-1)
    record = plgpu.load(block_table.at[lane, at], mask=real, other=0) * kv_heads + head
    hit = real & (held >= 0)
    plgpu.store(referenced.at[head, jnp.where(hit, lax.div(held, kv_heads), slots)], jnp.ones_like(held), mask=hit)
    missing = real & (held < 0)
    needed = jnp.sum(missing.astype(jnp.int32))
    # The number of a missing block among them, from 1; no victim has the number 0.
    number = jnp.where(missing, jnp.cumsum(missing.astype(jnp.int32)), 0)

    def look(turn):
        sweep, start, found, last, slot = turn
        # The second sweep reads what other threads of the program wrote in the first.
        if not interpret:
            plgpu.debug_barrier()
        position = start + jnp.arange(chunk)
        own = position < count
        around = start_of_hand + position
        place = base + jnp.where(around >= count, around - count, around)
        place = jnp.where(own, place, slots)
        block = plgpu.load(block_of_slot.at[head, place], mask=own, other=-1)
        bit = plgpu.load(referenced.at[head, place], mask=own, other=0)

        is_wanted = jnp.sum((block[:, None] == wanted[None, :]).astype(jnp.int32), axis=1) > 0
        free = own & (block < 0)
        may_go = free | (own & (block >= 0) & (block < written) & ~is_wanted)
        ready = may_go & (free | (bit == 0))
        rank = found + jnp.cumsum(ready.astype(jnp.int32))
        victim = ready & (rank <= needed)
        rank = jnp.where(victim, rank, -1)
        found = jnp.maximum(found, jnp.max(rank))
        in_chunk = jnp.max(jnp.where(victim, position, -1))
        passed = may_go & ~ready & ((found < needed) | (position < in_chunk))

        match = rank[:, None] == number[None, :]
        new_block = jnp.sum(jnp.where(match, wanted[None, :], 0), axis=1)
        new_slot = jnp.max(jnp.where(match, (place * kv_heads + head)[:, None], -1), axis=0)
        evicted = victim & (block >= 0)
        changed = victim | passed
        plgpu.store(block_of_slot.at[head, jnp.where(victim, place, slots)], new_block, mask=victim)
        plgpu.store(referenced.at[head, jnp.where(changed, place, slots)], victim.astype(jnp.int32), mask=changed)
        plgpu.store(
            slot_of_block.at[lane, head, jnp.where(evicted, block, blocks)], jnp.full_like(block, -1), mask=evicted
        )
        wraps = start + chunk >= count
        return (
            sweep + wraps.astype(jnp.int32),
            jnp.where(wraps, 0, start + chunk),
            found,
            jnp.where(in_chunk >= 0, in_chunk, last),
            jnp.maximum(slot, new_slot),
        )

    zero = jnp.int32(0)
    _, _, _, last, slot = lax.while_loop(
        lambda turn: (turn[0] < 2) & (turn[2] < needed), look, (zero, zero, zero, jnp.int32(-1), held)
    )
    moved = start_of_hand + last + 1
    hand[lane, head] = jnp.where(last < 0, start_of_hand, jnp.where(moved >= count, moved - count, moved))

    placed = missing & (slot >= 0)
    plgpu.store(slot_ids.at[lane, head, entry], slot, mask=entry < width)
    plgpu.store(slot_of_block.at[lane, head, jnp.where(placed, wanted, blocks)], slot, mask=placed)

    segment, segments = lane * kv_heads + head, wanted_in.shape[0] * kv_heads
    copied = placed & (wanted != query_block)
    copies = copied.astype(jnp.int32)
    pair = segments + 2 * (segment * width + jnp.cumsum(copies) - 1)
    pair = jnp.where(copied, pair, plan.shape[0])
    plgpu.store(plan.at[pair], record, mask=copied)
    plgpu.store(plan.at[pair + 1], slot, mask=copied)
    plan[segment] = jnp.sum(copies)
