"""The host pool: every finished record in pinned host memory, one array a layer.

Only this module and the programs it calls hold these arrays. A pool that anything else still views can't be donated,
and a pool that is not donated would be copied whole by every write.

The pool may keep packed records (`CacheShape.kv_host_dtype`): what writes to it packs them, what reads it unpacks them.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Float, Int, Shaped

from sparda_jax.cache.host_dtype import host_record
from sparda_jax.cache.kv import KVCache, LayerCache
from sparda_jax.cache.records import from_pages, from_records, to_records
from sparda_jax.cache.state import CacheShape, DecodeState
from sparda_jax.config import ModelConfig
from sparda_jax.pallas_kernels.record_copy import fetch_records, pack_plan, write_back_records

Pools = tuple[Shaped[Array, "records pool_rows head_dim"], ...]


class HostPool:
    """The records of all layers in ``pinned_host`` memory; record ``block * num_kv_heads + head`` of every layer.

    Args:
        config: the model.
        shape: how many blocks the pool has, and what it keeps of their numbers.
        dtype: of the keys and values.
        host: where the arrays go: ``pinned_host`` memory of the device that copies them.
        backend: of the copy kernel, see `fetch_records`.
    """

    def __init__(
        self,
        config: ModelConfig,
        shape: CacheShape,
        dtype: jnp.dtype,
        host: SingleDeviceSharding,
        backend: str | None = None,
    ):
        records = shape.num_blocks * config.num_kv_heads
        record = host_record((2 * config.sparse.block_size, config.head_dim), dtype, shape.kv_host_dtype)
        # Made layer by layer: the zeros pass through HBM on their way to the host.
        make = jax.jit(functools.partial(jnp.zeros, (records, *record.shape), record.dtype), out_shardings=host)
        self._pools: Pools = tuple(jax.block_until_ready(make()) for _ in range(config.num_layers))
        self._config, self._backend = config, backend
        jit = functools.partial(jax.jit, donate_argnums=0, out_shardings=(host,) * config.num_layers)
        self._store = jit(functools.partial(_store_blocks, config=config, backend=backend))
        self._write_back = jit(functools.partial(_write_back, backend=backend))
        self._write_tail = jit(functools.partial(_write_tail, backend=backend))
        # A layer at a time, so that the records of one are on the device beside what is made of them.
        self._load = jax.jit(functools.partial(_load_layer, config=config, backend=backend))

    @property
    def arrays(self) -> Pools:
        """For the decode step to read; keep no reference beyond the call."""
        return self._pools

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    @property
    def record_bytes(self) -> int:
        """Of one record, as it lies here and travels."""
        return self._pools[0].nbytes // self._pools[0].shape[0]

    @property
    def is_lost(self) -> bool:
        """Whether a program took the pool and gave nothing back, or failed on the device; waits for those under way."""
        try:
            jax.block_until_ready(self._pools)
        except Exception:  # whatever went wrong there, it went wrong with the pool
            return True
        return False

    def store(self, cache: KVCache, block_ids: Int[Array, "blocks"], first: int, end: int) -> None:
        """Writes blocks ``first`` to ``end`` - 1 of a contiguous cache of one sequence to the pool.

        Args:
            cache: of batch 1, with the blocks' keys and values; what lies behind its length is written as it is.
            block_ids: the physical block of each block of ``cache``'s capacity; of the others anything.
            first: the first block to write.
            end: the block behind the last one.
        """
        self._pools = self._store(self._pools, cache, block_ids, jnp.int32(first), jnp.int32(end))

    def lend[T](self, run: Callable[[Pools], tuple[Pools, T]]) -> T:
        """Runs a program that the pool is donated to, and that gives it back beside its own result."""
        # A program that could not even be launched has taken nothing: the pool stays what it was.
        self._pools, result = run(self._pools)
        return result

    def write_back(self, state: DecodeState) -> None:
        """Writes the next finished block of every lane that has one; the caller raises ``written`` afterwards."""
        self._pools = self._write_back(self._pools, state)

    def write_tail(self, state: DecodeState, lane: int) -> None:
        """Writes the partial block of a lane, if it has one; the next token makes the record stale."""
        self._pools = self._write_tail(self._pools, state, jnp.int32(lane))

    def load(self, state: DecodeState, blocks: Sequence[int], capacity: int) -> KVCache:
        """A contiguous cache of ``capacity`` tokens, of batch 1, that holds these blocks; one program per capacity.

        Args:
            state: its pages hold the blocks' compressed keys.
            blocks: physical blocks in the order of the sequence, all of them complete and in the pool.
            capacity: a multiple of ``block_size`` that holds them.
        """
        block_size = self._config.sparse.block_size
        ids = np.zeros(capacity // block_size, np.int32)
        ids[: len(blocks)] = blocks
        device = next(iter(state.lengths.devices()))
        block_ids, num_blocks = jax.device_put((ids, np.int32(len(blocks))), device)
        layers = tuple(
            self._load(pool, layer.pages, block_ids, num_blocks)
            for pool, layer in zip(self._pools, state.layers, strict=True)
        )
        lengths = jax.device_put(np.array([len(blocks) * block_size], np.int32), device)
        return KVCache(layers=layers, lengths=lengths)

    def snapshot(self, layer: int) -> np.ndarray:
        """A copy of one layer's records as they lie here, for tests and debugging."""
        device = SingleDeviceSharding(next(iter(self._pools[layer].devices())))
        return np.array(jax.jit(lambda pool: jax.device_put(pool, device))(self._pools[layer]))


def finished(
    live: Bool[Array, "batch"], lengths: Int[Array, "batch"], written: Int[Array, "batch"], block_size: int
) -> Bool[Array, "batch"]:
    """Lanes whose next block to write back is complete."""
    return live & (lengths // block_size > written)


def _store_blocks(
    pools: Pools,
    cache: KVCache,
    block_ids: Int[Array, "blocks"],
    first: Int[Array, ""],
    end: Int[Array, ""],
    *,
    config: ModelConfig,
    backend: str | None,
) -> Pools:
    kv_heads = config.num_kv_heads
    # Pairs from the end of the list are never followed.
    blocks = jnp.minimum(first + jnp.arange(block_ids.shape[0]), block_ids.shape[0] - 1)
    pairs = jnp.stack([_records_of(block_ids[blocks], kv_heads), _records_of(blocks, kv_heads)], axis=-1)
    plan = pack_plan(((end - first) * kv_heads)[None], pairs[None])

    def stored(pool, layer):
        records = to_records(layer.k, layer.v, config.sparse.block_size)
        return write_back_records(plan, records.reshape(-1, *records.shape[3:]), pool, segments=1, backend=backend)

    return tuple(stored(pool, layer) for pool, layer in zip(pools, cache.layers, strict=True))


def _load_layer(
    pool: Shaped[Array, "records pool_rows head_dim"],
    pages: Float[Array, "num_blocks kv_heads windows_per_block head_dim"],
    block_ids: Int[Array, "blocks"],
    num_blocks: Int[Array, ""],
    *,
    config: ModelConfig,
    backend: str | None,
) -> LayerCache:
    kv_heads = config.num_kv_heads
    wanted = _records_of(block_ids, kv_heads)
    pairs = jnp.stack([wanted, jnp.arange(wanted.shape[0])], axis=-1)
    plan = pack_plan((num_blocks * kv_heads)[None], pairs[None])
    record = (2 * config.sparse.block_size, config.head_dim)
    empty = jnp.zeros((wanted.shape[0], *record), pages.dtype)
    records = fetch_records(plan, pool, empty, segments=1, backend=backend)
    k, v = from_records(records.reshape(1, -1, kv_heads, *record))
    exists = (jnp.arange(block_ids.shape[0]) < num_blocks)[:, None, None, None]
    return LayerCache(
        k=k,
        v=v,
        compressed_k=from_pages(jnp.where(exists, pages[block_ids], 0)[None]),
        selected=jnp.full((1, kv_heads, config.sparse.num_selected_blocks), -1, jnp.int32),
    )


def _records_of(block_ids: Int[Array, "blocks"], kv_heads: int) -> Int[Array, "records"]:
    return (block_ids[:, None] * kv_heads + jnp.arange(kv_heads)).reshape(-1)


def _write_back(pools: Pools, state: DecodeState, *, backend: str | None) -> Pools:
    block_size = state.layers[0].slots.shape[1] // 2
    ready = finished(state.live, state.lengths, state.written, block_size)
    return _write_blocks(pools, state, state.written, ready, backend)


def _write_tail(pools: Pools, state: DecodeState, lane: Int[Array, ""], *, backend: str | None) -> Pools:
    block_size = state.layers[0].slots.shape[1] // 2
    has_tail = (jnp.arange(state.num_lanes) == lane) & (state.lengths % block_size > 0)
    return _write_blocks(pools, state, state.lengths // block_size, has_tail, backend)


def _write_blocks(
    pools: Pools, state: DecodeState, block: Int[Array, "batch"], ready: Bool[Array, "batch"], backend: str | None
) -> Pools:
    """The pools with one block of every lane that is ready, from its slot."""
    lanes = jnp.arange(state.num_lanes)
    block = jnp.minimum(block, state.block_table.shape[1] - 1)
    physical, counted = state.block_table[lanes, block], ready.astype(jnp.int32)

    def written(pool, layer):
        kv_heads = layer.residency.slot_of_block.shape[1]
        records = physical[:, None] * kv_heads + jnp.arange(kv_heads)
        slots = layer.residency.slot_of_block[lanes[:, None], jnp.arange(kv_heads), block[:, None]]
        pairs = jnp.stack([records, slots], axis=-1).reshape(-1, 1, 2)
        plan = pack_plan(jnp.repeat(counted, kv_heads), pairs)
        return write_back_records(plan, layer.slots, pool, segments=pairs.shape[0], backend=backend)

    return tuple(written(pool, layer) for pool, layer in zip(pools, state.layers, strict=True))
