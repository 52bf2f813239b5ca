"""A sequence without a lane: all its blocks lie in the host pool and its pages stay, so nothing is computed again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from sparda_jax.cache.admission import PartialBasis, give_lane, give_slots
from sparda_jax.cache.pool import Pools
from sparda_jax.cache.state import DecodeState
from sparda_jax.pallas_kernels.record_copy import fetch_records, pack_plan
from sparda_jax.sampling import SamplingState
from sparda_jax.streaming import NEWEST


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parked:
    """A sequence that waits for a lane; the arrays lie on the device, and nobody has waited for them.

    Attributes:
        length: tokens stored.
        blocks: the physical blocks, in order; the last one may be partial.
        token: the input of the sequence's next step.
        sampling: how its tokens are sampled, a batch of one.
        partial_basis: what it keeps of InfiniGen's basis.
        seen: the tokens of prompt and answer, a batch of one; None: it has no penalties.
    """

    length: int
    blocks: tuple[int, ...]
    token: Int[Array, ""]
    sampling: SamplingState
    partial_basis: PartialBasis
    seen: Int[Array, "1 vocab"] | None


@jax.jit
def take_input(
    tokens: Int[Array, "batch"],
    sampling: SamplingState,
    bases: tuple[Array | None, ...],
    lane: Int[Array, ""],
) -> tuple[Int[Array, ""], SamplingState, PartialBasis]:
    """What a lane goes on with that no block holds: its token, its sampling parameters and its part of the basis."""
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, lane, 1), sampling)
    return tokens[lane], row, jax.tree.map(lambda x: x[lane], bases)


@jax.jit
def put_input(
    tokens: Int[Array, "batch"],
    sampling: SamplingState,
    lane: Int[Array, ""],
    token: Int[Array, ""],
    row: SamplingState,
) -> tuple[Int[Array, "batch"], SamplingState]:
    """The lanes' tokens and sampling parameters, with those of one lane exchanged."""
    return tokens.at[lane].set(token), jax.tree.map(lambda x, one: x.at[lane].set(one[0]), sampling, row)


@jax.jit
def take_seen(seen: Int[Array, "batch vocab"], lane: Int[Array, ""]) -> Int[Array, "1 vocab"]:
    """The tokens that a lane's sequence holds."""
    return jax.lax.dynamic_slice_in_dim(seen, lane, 1)


@functools.partial(jax.jit, donate_argnames=("seen",))
def put_seen(
    seen: Int[Array, "batch vocab"], lane: Int[Array, ""], row: Int[Array, "1 vocab"]
) -> Int[Array, "batch vocab"]:
    """The lanes' tokens, with those of one lane exchanged."""
    return jax.lax.dynamic_update_slice_in_dim(seen, row, lane, 0)


def seat(
    state: DecodeState,
    pools: Pools,
    lane: Int[Array, ""],
    block_ids: Int[Array, "blocks"],
    length: Int[Array, ""],
    bases: PartialBasis,
    *,
    backend: str | None,
) -> DecodeState:
    """Gives ``lane`` to a parked sequence; what the lane held before is forgotten.

    The slots get the tail, which no step fetches, and the block before it, whose keys a window needs before a step
    fetches anything. The steps fetch all other blocks that they select, those of layer 0 too.

    Args:
        state: the lanes.
        pools: the records, the partial tail's included.
        lane: which lane.
        block_ids: the sequence's physical blocks; behind its length anything.
        length: tokens of the sequence.
        bases: what it keeps of InfiniGen's basis.
        backend: of the copy kernel, see `fetch_records`.
    """
    block_size = state.layers[0].slots.shape[1] // 2
    first = jnp.maximum(length // block_size - (NEWEST - 1), 0)
    block = first + jnp.arange(min(NEWEST, state.block_table.shape[1]))
    exists = block * block_size < length
    physical = block_ids[jnp.minimum(block, block_ids.shape[0] - 1)]

    def seated(layer, pool):
        kv_heads = layer.residency.slot_of_block.shape[1]
        blocks = jnp.broadcast_to(block, (kv_heads, block.shape[0]))
        residency, slot_ids = give_slots(layer.residency, lane, blocks, exists)
        records = physical * kv_heads + jnp.arange(kv_heads)[:, None]
        count = jnp.broadcast_to(jnp.sum(exists, dtype=jnp.int32), kv_heads)
        plan = pack_plan(count, jnp.stack([records, slot_ids], axis=-1))
        slots = fetch_records(plan, pool, layer.slots, segments=kv_heads, backend=backend)
        return dataclasses.replace(layer, slots=slots, residency=residency)

    layers = tuple(seated(layer, pool) for layer, pool in zip(state.layers, pools, strict=True))
    return give_lane(dataclasses.replace(state, layers=layers), lane, block_ids, length, bases)
