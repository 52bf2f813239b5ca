"""A prefilled sequence comes to decode: its pages, and in a lane its tables and the first blocks in its slots."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.cache.kv import KVCache, LayerCache
from sparda_jax.cache.records import to_pages, to_records
from sparda_jax.cache.state import DecodeState, LayerState
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.forward import Skew
from sparda_jax.pallas_kernels.residency import Residency
from sparda_jax.selection import kept_basis

PartialBasis = tuple[Float[Array, "kv_heads head_dim channels"] | None, ...]
"""Per layer the columns of InfiniGen's basis that a sequence keeps; None in a layer without partial keys."""


def write_pages(
    state: DecodeState,
    cache: KVCache,
    block_ids: Int[Array, "blocks"],
    shared: Int[Array, ""],
    *,
    config: ModelConfig,
    skew: Skew | None = None,
) -> tuple[DecodeState, PartialBasis]:
    """Writes what the device keeps of every block of a sequence, wherever the sequence goes on: pages, partial keys.

    Args:
        state: the lanes.
        cache: of batch 1.
        block_ids: the physical block of each block of ``cache``'s capacity, the partial tail's included.
        shared: how many blocks, from the first on, have their pages already.
        config: the model.
        skew: InfiniGen's calibrated basis, where the lanes keep partial keys.

    Returns:
        The state, and what the sequence keeps of the basis.

    Raises:
        ConfigError: the lanes keep partial keys, and the basis or the prompt's channel weights are missing.
    """
    place, num_blocks = jnp.arange(block_ids.shape[0]), _num_blocks(cache.lengths[0], config)
    layers, bases = [], []
    for index, (layer, stored) in enumerate(zip(state.layers, cache.layers, strict=True)):
        # The other blocks get an index behind the end: the scatters drop them.
        physical = jnp.where((place >= shared) & (place < num_blocks), block_ids, layer.pages.shape[0])
        pages = to_pages(stored.compressed_k, config.sparse.windows_per_block)[0]
        layer = dataclasses.replace(layer, pages=layer.pages.at[physical].set(pages, mode="drop"))
        layer, basis = _write_partial_keys(layer, stored, physical, config, skew[index] if skew else None)
        layers.append(layer)
        bases.append(basis)
    return dataclasses.replace(state, layers=tuple(layers)), tuple(bases)


def admit(
    state: DecodeState,
    cache: KVCache,
    lane: Int[Array, ""],
    block_ids: Int[Array, "blocks"],
    shared: Int[Array, ""],
    *,
    config: ModelConfig,
    skew: Skew | None = None,
) -> DecodeState:
    """Gives ``lane`` to the sequence of a contiguous cache; what the lane held before is forgotten.

    The slots get what the prompt's last token has selected, the first and the local blocks among it, and then the
    newest ones; the first decode steps fetch what else they select. The whole blocks must lie in the host pool already.
    Arguments and errors are those of `write_pages`.
    """
    state, bases = write_pages(state, cache, block_ids, shared, config=config, skew=skew)
    length = cache.lengths[0]
    layers = tuple(
        _fill_slots(layer, stored, lane, _num_blocks(length, config), config)
        for layer, stored in zip(state.layers, cache.layers, strict=True)
    )
    return give_lane(dataclasses.replace(state, layers=layers), lane, block_ids, length, bases)


def give_lane(
    state: DecodeState,
    lane: Int[Array, ""],
    block_ids: Int[Array, "blocks"],
    length: Int[Array, ""],
    bases: PartialBasis,
) -> DecodeState:
    """The state whose ``lane`` decodes a sequence, what each layer has in its slots apart."""
    block_size, max_blocks = state.layers[0].slots.shape[1] // 2, state.block_table.shape[1]
    row = jnp.zeros(max_blocks, jnp.int32).at[jnp.arange(block_ids.shape[0])].set(block_ids, mode="drop")

    def with_basis(layer: LayerState, basis: Array | None) -> LayerState:
        if layer.partial_basis is None or basis is None:
            return layer
        return dataclasses.replace(layer, partial_basis=layer.partial_basis.at[lane].set(basis))

    return dataclasses.replace(
        state,
        layers=tuple(with_basis(layer, basis) for layer, basis in zip(state.layers, bases, strict=True)),
        block_table=state.block_table.at[lane].set(row),
        lengths=state.lengths.at[lane].set(length),
        live=state.live.at[lane].set(True),
        written=state.written.at[lane].set(length // block_size),
    )


def give_slots(
    tables: Residency, lane: Int[Array, ""], block: Int[Array, "kv_heads offsets"], taken: Bool[Array, "offsets"]
) -> tuple[Residency, Int[Array, "kv_heads offsets"]]:
    """Gives the first slots of a lane to these blocks and empties the others.

    Args:
        tables: of one layer.
        lane: which lane.
        block: the logical block of each slot and KV head, from the lane's first on.
        taken: which of the slots get theirs: the first few.

    Returns:
        The tables, and the global slot ids; behind the end where no block is.
    """
    kv_heads, max_blocks = tables.slot_of_block.shape[1:]
    num_slots, base, count = tables.block_of_slot.shape[1], tables.base[lane], tables.count[lane]
    head = jnp.arange(kv_heads)[:, None]
    offsets = block.shape[1]
    slot_ids = jnp.where(taken, base + jnp.arange(offsets), num_slots) * kv_heads + head
    every = jnp.arange(min(num_slots, max_blocks))  # a lane's range is at most the whole sequence long
    own = jnp.where(every < count, base + every, num_slots)
    held = jnp.full((kv_heads, *every.shape), -1).at[:, :offsets].set(jnp.where(taken, block, -1))
    tables = dataclasses.replace(
        tables,
        slot_of_block=tables.slot_of_block.at[lane]
        .set(-1)
        .at[lane, head, jnp.where(taken, block, max_blocks)]
        .set(slot_ids, mode="drop"),
        block_of_slot=tables.block_of_slot.at[head, own].set(held, mode="drop"),
        referenced=tables.referenced.at[head, own].set(0, mode="drop"),
        # The hand starts at the first empty slot, so nothing is evicted while one is left.
        hand=tables.hand.at[lane].set(jnp.sum(taken) % count),
    )
    return tables, slot_ids


def _num_blocks(length: Int[Array, ""], config: ModelConfig) -> Int[Array, ""]:
    return (length + config.sparse.block_size - 1) // config.sparse.block_size


def _fill_slots(
    layer: LayerState, stored: LayerCache, lane: Array, num_blocks: Array, config: ModelConfig
) -> LayerState:
    """The layer with the most wanted blocks of a cache in the slots of a lane; the first slots lose theirs first."""
    tables = layer.residency
    count = tables.count[lane]
    records = to_records(stored.k, stored.v, config.sparse.block_size)[0]
    order = _by_worth(stored, num_blocks, records.shape[0], config)
    filled = jnp.minimum(count, num_blocks)
    offset = jnp.arange(min(tables.block_of_slot.shape[1], tables.slot_of_block.shape[2]))
    block = order[:, jnp.clip(records.shape[0] - filled + offset, 0, records.shape[0] - 1)]
    residency, slot_ids = give_slots(tables, lane, block, offset < filled)
    slots = layer.slots.at[slot_ids].set(records[block, jnp.arange(order.shape[0])[:, None]], mode="drop")
    return dataclasses.replace(layer, slots=slots, residency=residency)


def _by_worth(stored: LayerCache, num_blocks: Array, blocks: int, config: ModelConfig) -> Int[Array, "kv_heads blocks"]:
    """Every block of a cache, those that decode will hardly want first; of equal ones the older first."""
    sparse, block = config.sparse, jnp.arange(blocks)
    wanted = (block < sparse.init_blocks) | (block >= num_blocks - 1 - sparse.local_blocks)
    wanted = jnp.broadcast_to(wanted, (config.num_kv_heads, blocks))
    if stored.selected is not None:
        head, ids = jnp.arange(config.num_kv_heads)[:, None], stored.selected[0]
        wanted = wanted.at[head, jnp.where(ids < 0, blocks, ids)].set(True, mode="drop")
    return jnp.argsort(jnp.where(block < num_blocks, block + blocks * wanted, -1), axis=1)


def _write_partial_keys(
    layer: LayerState, stored: LayerCache, physical: Array, config: ModelConfig, skew: Array | None
) -> tuple[LayerState, Array | None]:
    """InfiniGen's: the sequence keeps the channels that weighed most over its prompt, and all its keys get skewed."""
    if layer.partial_keys is None:
        return layer, None
    if skew is None or stored.channel_weight is None:
        raise ConfigError("mode=infinigen needs a calibrated basis and a cache made for it")
    basis = kept_basis(config, skew, stored.channel_weight)
    keys = stored.k.astype(jnp.float32)
    kept = jnp.einsum("bhwd,bhdc->bhwc", keys, basis, precision=jax.lax.Precision.HIGHEST)[0]
    pages = kept.reshape(kept.shape[0], physical.shape[0], -1, kept.shape[-1]).swapaxes(0, 1)
    written = layer.partial_keys.at[physical].set(pages.astype(layer.partial_keys.dtype), mode="drop")
    return dataclasses.replace(layer, partial_keys=written), basis[0]
