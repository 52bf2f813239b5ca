"""The tables that say which block of which lane lies in which HBM slot."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


# JAX also makes trees of this class whose leaves are no arrays (shardings, avals): the annotations can't be enforced.
@typing.no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residency:
    """One layer's residency tables, all int32 and on the device.

    Every KV head has ``slots`` slots; a lane owns the same range of them, base .. base + count - 1, in each head, and
    the ranges of different lanes don't overlap. Slot n of head h has the global id ``n * kv_heads + h``: its record in
    the slot pool. A slot is dirty, and kept, while its block is not written back: while block >= written[lane].

    Attributes:
        slot_of_block: the global id of the slot that holds a lane's logical block, or -1. The inverse of
            `block_of_slot`.
        block_of_slot: the logical block, of the lane that owns the slot, or -1 for an empty slot.
        referenced: the CLOCK bit: 1 if the block was wanted since the hand last passed.
        hand: where the next search for a victim starts, as an offset in the lane's range.
        base: the first slot of a lane's range.
        count: the length of a lane's range. At least the width of a wanted list plus the lane's dirty blocks.
    """

    slot_of_block: Int[Array, "batch kv_heads blocks"]
    block_of_slot: Int[Array, "kv_heads slots"]
    referenced: Int[Array, "kv_heads slots"]
    hand: Int[Array, "batch kv_heads"]
    base: Int[Array, "batch"]
    count: Int[Array, "batch"]


def empty_residency(
    *, base: Int[Array, "batch"], count: Int[Array, "batch"], kv_heads: int, max_blocks: int, num_slots: int
) -> Residency:
    """Tables with every slot empty, for lanes that own the ranges (base, count) of ``num_slots`` slots per head."""
    batch = base.shape[0]
    return Residency(
        slot_of_block=jnp.full((batch, kv_heads, max_blocks), -1, jnp.int32),
        block_of_slot=jnp.full((kv_heads, num_slots), -1, jnp.int32),
        referenced=jnp.zeros((kv_heads, num_slots), jnp.int32),
        hand=jnp.zeros((batch, kv_heads), jnp.int32),
        base=base.astype(jnp.int32),
        count=count.astype(jnp.int32),
    )
