"""The definition of the residency plan in plain jnp, for all lanes and heads at once.

CLOCK (Corbató, 1968), exactly: the hand walks the lane's range in a circle. A slot that may go and has bit 0 is taken;
one that may go and has bit 1 loses the bit and is passed; wanted and dirty slots are passed untouched. After one full
circle every slot that may go has bit 0, so a second circle finds whatever the first did not. Both circles are prefix
sums along the range seen from the hand.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from sparda_jax.pallas_kernels.record_copy import pack_plan
from sparda_jax.pallas_kernels.residency.state import Residency


def plan_residency(
    state: Residency,
    wanted: Int[Array, "batch kv_heads width"],
    block_table: Int[Array, "batch blocks"],
    query_block: Int[Array, "batch"],
    written: Int[Array, "batch"],
) -> tuple[Residency, Int[Array, "batch kv_heads width"], Int[Array, "plan"]]:
    """See `sparda_jax.pallas_kernels.residency.plan_residency`."""
    batch, kv_heads, width = wanted.shape
    blocks, slots = state.slot_of_block.shape[2], state.block_of_slot.shape[1]
    lane, head = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[:, None]

    real = wanted >= 0
    held = jnp.where(real, jnp.take_along_axis(state.slot_of_block, jnp.maximum(wanted, 0), axis=2), -1)
    missing = real & (held < 0)
    missing_rank = jnp.cumsum(missing, axis=-1)
    needed = missing_rank[..., -1:]
    referenced = state.referenced.at[head, jnp.where(held >= 0, held // kv_heads, slots)].set(1, mode="drop")

    # The lane's slots in the order in which the hand passes them; positions beyond the range point behind the table.
    position = jnp.arange(slots)
    count = state.count[:, None, None]
    own = position < count
    slot = state.base[:, None, None] + (state.hand[..., None] + position) % jnp.maximum(count, 1)
    slot = jnp.where(own, slot, slots)
    block = state.block_of_slot.at[head, slot].get(mode="fill", fill_value=-1)
    is_wanted = jnp.zeros((batch, kv_heads, blocks + 1), bool).at[lane, head, jnp.where(real, wanted, blocks)].set(True)
    is_wanted = jnp.take_along_axis(is_wanted[..., :blocks], jnp.maximum(block, 0), axis=2) & (block >= 0)
    free = own & (block < 0)
    may_go = free | (own & (block >= 0) & ~is_wanted & (block < written[:, None, None]))
    bit = (referenced.at[head, slot].get(mode="fill", fill_value=0) == 1) & ~free

    first, second = may_go & ~bit, may_go & bit
    first_total = jnp.sum(first, axis=-1, keepdims=True)
    rank = jnp.where(first, jnp.cumsum(first, axis=-1), first_total + jnp.cumsum(second, axis=-1))
    victim = may_go & (rank <= needed)
    found = jnp.minimum(needed, first_total + jnp.sum(second, axis=-1, keepdims=True))
    last = jnp.max(jnp.where(victim & (rank == found), position, -1), axis=-1, keepdims=True)
    passed = second & ~victim & ((first_total < needed) | (position < last))
    hand = jnp.where(last[..., 0] < 0, state.hand, (state.hand + last[..., 0] + 1) % jnp.maximum(count[..., 0], 1))

    # The i-th missing block takes the i-th victim.
    by_rank = (
        jnp.full((batch, kv_heads, width + 1), slots)
        .at[lane, head, jnp.where(victim, rank, width + 1)]
        .set(slot, mode="drop")
    )
    placed = missing & (missing_rank <= found)
    new_slot = jnp.where(placed, jnp.take_along_axis(by_rank, missing_rank, axis=-1), slots)
    slot_ids = jnp.where(placed, new_slot * kv_heads + head, held)

    evicted = jnp.where(victim & (block >= 0), block, blocks)
    slot_of_block = state.slot_of_block.at[lane, head, evicted].set(-1, mode="drop")
    slot_of_block = slot_of_block.at[lane, head, jnp.where(placed, wanted, blocks)].set(slot_ids, mode="drop")
    block_of_slot = state.block_of_slot.at[head, new_slot].set(wanted, mode="drop")
    referenced = referenced.at[head, jnp.where(passed, slot, slots)].set(0, mode="drop")
    referenced = referenced.at[head, new_slot].set(1, mode="drop")

    copied = placed & (wanted != query_block[:, None, None])
    copy_rank = jnp.cumsum(copied, axis=-1)
    record = jnp.take_along_axis(block_table[:, None], jnp.maximum(wanted, 0), axis=2) * kv_heads + head
    pairs = (
        jnp.zeros((batch, kv_heads, width, 2), jnp.int32)
        .at[lane, head, jnp.where(copied, copy_rank - 1, width)]
        .set(jnp.stack([record, slot_ids], axis=-1), mode="drop")
    )
    plan = pack_plan(copy_rank[..., -1].reshape(-1), pairs.reshape(batch * kv_heads, width, 2))
    state = dataclasses.replace(
        state, slot_of_block=slot_of_block, block_of_slot=block_of_slot, referenced=referenced, hand=hand
    )
    return state, slot_ids, plan
