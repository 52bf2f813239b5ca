"""The residency plan as one Triton-lowered kernel, one program for each (lane, KV head).

The wanted list is a vector in registers. The hand walks the range in chunks of slots and stops with the chunk that has
the last victim, so the time depends on the misses and hardly on the range.

The time is that of a chain of dependent steps, and memory keeps it short: comparing all slots with all wanted blocks in
registers takes four times as many instructions and barriers. Slots that must stay, since their block is wanted or they
are taken, carry a mark in place of their CLOCK bit until the end. The i-th victim goes to the i-th place of the
program's segment of the plan, where the i-th missing block finds it; the pairs to copy come there afterwards. So a
chunk costs two loads, one prefix sum and one sum. With one slot and one wanted block for each thread, the compiler has
nothing to rearrange between the steps.
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

_KEPT = 2
"""In place of a CLOCK bit, while the kernel runs: the slot's block is wanted, or the slot is taken."""


def plan_residency(
    state: Residency,
    wanted: jax.Array,
    block_table: jax.Array,
    query_block: jax.Array,
    written: jax.Array,
    *,
    chunk: int = 128,
    num_warps: int = 4,
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
    batch, kv_heads, width = wanted_in.shape
    blocks, slots = slot_of_block.shape[2], block_of_slot.shape[1]
    lane, head = pl.program_id(0), pl.program_id(1)
    base, count, written, query_block = base[lane], count[lane], written[lane], query_block[lane]
    start_of_hand = hand[lane, head]
    segment = lane * kv_heads + head
    pairs = batch * kv_heads + 2 * segment * width

    def synchronize():
        """Between what one thread of the program writes and another one reads, or the other way round."""
        if not interpret:
            plgpu.debug_barrier()

    # Where a mask is off, an index points behind the array: the interpreter stores nothing there, and a GPU stores
    # nothing anywhere. An index that another element also has would let the interpreter write an old value over a new
    # one.
    entry = jnp.arange(pl.next_power_of_2(width))
    wanted = plgpu.load(wanted_in.at[lane, head, entry], mask=entry < width, other=-1)
    real = wanted >= 0
    at = jnp.where(real, wanted, blocks)
    held = plgpu.load(slot_of_block.at[lane, head, at], mask=real, other=-1)
    record = plgpu.load(block_table.at[lane, at], mask=real, other=0) * kv_heads + head
    start_of_hand = lax.rem(start_of_hand, jnp.maximum(count, 1))
    hit = real & (held >= 0)
    held_slot = lax.div(held, kv_heads)
    plgpu.store(referenced.at[head, jnp.where(hit, held_slot, slots)], jnp.full_like(held, _KEPT), mask=hit)
    synchronize()

    def places(start):
        """The slots that the hand passes from its offset ``start`` on; a mask of those in the range."""
        position = start + jnp.arange(chunk)
        own = position < count
        around = start_of_hand + position
        place = base + jnp.where(around >= count, around - count, around)
        return jnp.where(own, place, slots), own

    def read(start, more):
        place, own = places(start)
        own &= more
        return (
            plgpu.load(block_of_slot.at[head, place], mask=own, other=-1),
            plgpu.load(referenced.at[head, place], mask=own, other=_KEPT),
        )

    # Before it is known whether anything is missing: the sums run while memory answers.
    first_chunk = read(0, True)
    missing = real & (held < 0)
    copied = missing & (wanted != query_block)
    needed = jnp.sum(missing.astype(jnp.int32))
    # Two prefix sums in one: the number of a missing block among them, and among those to copy, both from 1.
    numbers = jnp.cumsum(missing.astype(jnp.int32) + (copied.astype(jnp.int32) << 16))
    number, copy_number = numbers & 0xFFFF, numbers >> 16

    def look(turn):
        sweep, start, found, block, bit = turn
        # Several threads may have read the same slot, and one of them changes it.
        synchronize()
        place, own = places(start)
        free = block < 0
        may_go = own & (bit != _KEPT) & (free | (block < written))
        ready = may_go & (free | (bit == 0))
        rank = found + jnp.cumsum(ready.astype(jnp.int32))
        victim = ready & (rank <= needed)
        passed = may_go & ~ready & (rank < needed)
        changed = victim | passed
        plgpu.store(referenced.at[head, jnp.where(changed, place, slots)], jnp.where(victim, _KEPT, 0), mask=changed)
        pair = jnp.where(victim, pairs + 2 * (rank - 1), plan.shape[0])
        plgpu.store(plan.at[pair], place, mask=victim)
        plgpu.store(plan.at[pair + 1], block, mask=victim)
        synchronize()
        wraps = start + chunk >= count
        sweep, start = sweep + wraps.astype(jnp.int32), jnp.where(wraps, 0, start + chunk)
        found += jnp.sum(ready.astype(jnp.int32))
        # What comes after the last turn would have to wait for loads that nobody needs.
        return sweep, start, found, *read(start, found < needed)

    zero = jnp.int32(0)
    _, _, found, _, _ = lax.while_loop(
        lambda turn: (turn[0] < 2) & (turn[2] < needed), look, (zero, zero, zero, *first_chunk)
    )
    found = jnp.minimum(found, needed)
    placed = missing & (number <= found)
    pair = jnp.where(placed, pairs + 2 * (number - 1), plan.shape[0])
    victim = plgpu.load(plan.at[pair], mask=placed, other=-1)
    evicted = plgpu.load(plan.at[pair + 1], mask=placed, other=-1)
    synchronize()

    slot = jnp.where(placed, victim * kv_heads + head, held)
    plgpu.store(slot_ids.at[lane, head, entry], slot, mask=entry < width)
    plgpu.store(slot_of_block.at[lane, head, jnp.where(placed, wanted, blocks)], slot, mask=placed)
    leaves = placed & (evicted >= 0)
    plgpu.store(slot_of_block.at[lane, head, jnp.where(leaves, evicted, blocks)], jnp.full_like(slot, -1), mask=leaves)
    plgpu.store(block_of_slot.at[head, jnp.where(placed, victim, slots)], wanted, mask=placed)
    kept = hit | placed
    kept_slot = jnp.where(kept, jnp.where(hit, held_slot, victim), slots)
    plgpu.store(referenced.at[head, kept_slot], jnp.ones_like(slot), mask=kept)

    copied = copied & placed
    pair = jnp.where(copied, pairs + 2 * (copy_number - 1), plan.shape[0])
    plgpu.store(plan.at[pair], record, mask=copied)
    plgpu.store(plan.at[pair + 1], slot, mask=copied)
    # The last block that got a slot knows how many are copied and where the hand stopped: no further sums.
    last = placed & (number == found)
    moved = victim - base + 1
    moved = jnp.where(moved == count, 0, moved)
    plgpu.store(hand.at[lane, jnp.where(last, head, kv_heads)], moved, mask=last)
    says = jnp.where(found > 0, last, entry == 0)
    plgpu.store(plan.at[jnp.where(says, segment, plan.shape[0])], jnp.where(last, copy_number, 0), mask=says)
