"""A prefilled sequence enters a decode lane: its pages, its tables, and the first blocks in its slots."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from sparda_jax.cache.kv import KVCache, LayerCache
from sparda_jax.cache.records import to_pages, to_records
from sparda_jax.cache.state import DecodeState, LayerState
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.forward import Skew
from sparda_jax.selection import kept_basis


def admit(
    state: DecodeState,
    cache: KVCache,
    lane: Int[Array, ""],
    block_ids: Int[Array, "blocks"],
    *,
    config: ModelConfig,
    skew: Skew | None = None,
) -> DecodeState:
    """Gives ``lane`` to the sequence of a contiguous cache; what the lane held before is forgotten.

    The slots get the first blocks, which are always selected, and then the newest ones; the first decode steps fetch
    what else they select. The whole blocks must lie in the host pool already.

    Args:
        state: the lanes.
        cache: of batch 1.
        lane: which lane.
        block_ids: the physical block of each block of ``cache``'s capacity, the partial tail's included.
        config: the model.
        skew: InfiniGen's calibrated basis, where the lanes keep partial keys.

    Raises:
        ConfigError: the lanes keep partial keys, and the basis or the prompt's channel weights are missing.
    """
    block_size, length = config.sparse.block_size, cache.lengths[0]
    num_blocks = (length + block_size - 1) // block_size
    layers = []
    for index, (layer, stored) in enumerate(zip(state.layers, cache.layers, strict=True)):
        # Blocks that the sequence does not have get an index behind the end: the scatters drop them.
        physical = jnp.where(jnp.arange(block_ids.shape[0]) < num_blocks, block_ids, layer.pages.shape[0])
        layer = _admit_layer(layer, stored, lane, physical, num_blocks, config)
        layers.append(_admit_partial_keys(layer, stored, lane, physical, config, skew[index] if skew else None))
    max_blocks = state.block_table.shape[1]
    row = jnp.zeros(max_blocks, jnp.int32).at[jnp.arange(block_ids.shape[0])].set(block_ids, mode="drop")
    return dataclasses.replace(
        state,
        layers=tuple(layers),
        block_table=state.block_table.at[lane].set(row),
        lengths=state.lengths.at[lane].set(length),
        live=state.live.at[lane].set(True),
        written=state.written.at[lane].set(length // block_size),
    )


def _admit_layer(
    layer: LayerState, stored: LayerCache, lane: Array, physical: Array, num_blocks: Array, config: ModelConfig
) -> LayerState:
    tables, kv_heads = layer.residency, config.num_kv_heads
    max_blocks, num_slots = tables.slot_of_block.shape[2], tables.block_of_slot.shape[1]
    pages = to_pages(stored.compressed_k, config.sparse.windows_per_block)[0]

    # Which block each slot of the lane gets; -1: none. A lane's range is at most the whole sequence long.
    base, count = tables.base[lane], tables.count[lane]
    offset = jnp.arange(min(num_slots, max_blocks))
    newest = num_blocks - count + offset
    block = jnp.where((num_blocks <= count) | (offset < config.sparse.init_blocks), offset, newest)
    taken = (offset < count) & (block < num_blocks)
    records = to_records(stored.k, stored.v, config.sparse.block_size)[0]
    chosen = records[jnp.clip(block, 0, records.shape[0] - 1)]
    place = jnp.where(taken, base + offset, num_slots)
    head = jnp.arange(kv_heads)[:, None]
    slot_ids = place * kv_heads + head
    slots = layer.slots.at[slot_ids].set(jnp.swapaxes(chosen, 0, 1), mode="drop")
    own = jnp.where(offset < count, base + offset, num_slots)
    residency = dataclasses.replace(
        tables,
        slot_of_block=tables.slot_of_block.at[lane]
        .set(-1)
        .at[lane, head, jnp.where(taken, block, max_blocks)]
        .set(slot_ids, mode="drop"),
        block_of_slot=tables.block_of_slot.at[head, own].set(jnp.where(taken, block, -1), mode="drop"),
        referenced=tables.referenced.at[head, own].set(0, mode="drop"),
        # The hand starts at the first empty slot, so nothing is evicted while one is left.
        hand=tables.hand.at[lane].set(jnp.where(num_blocks < count, num_blocks, 0)),
    )
    pages = layer.pages.at[physical].set(pages, mode="drop")
    return dataclasses.replace(layer, slots=slots, pages=pages, residency=residency)


def _admit_partial_keys(
    layer: LayerState, stored: LayerCache, lane: Array, physical: Array, config: ModelConfig, skew: Array | None
) -> LayerState:
    """InfiniGen's: the sequence keeps the channels that weighed most over its prompt, and all its keys get skewed."""
    if layer.partial_keys is None or layer.partial_basis is None:
        return layer
    if skew is None or stored.channel_weight is None:
        raise ConfigError("mode=infinigen needs a calibrated basis and a cache made for it")
    basis = kept_basis(config, skew, stored.channel_weight)
    keys = stored.k.astype(jnp.float32)
    kept = jnp.einsum("bhwd,bhdc->bhwc", keys, basis, precision=jax.lax.Precision.HIGHEST)[0]
    pages = kept.reshape(kept.shape[0], physical.shape[0], -1, kept.shape[-1]).swapaxes(0, 1)
    return dataclasses.replace(
        layer,
        partial_keys=layer.partial_keys.at[physical].set(pages.astype(layer.partial_keys.dtype), mode="drop"),
        partial_basis=layer.partial_basis.at[lane].set(basis[0]),
    )
