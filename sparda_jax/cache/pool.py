"""The host pool: every finished record in pinned host memory, one array a layer.

Only this module and the programs it calls hold these arrays. A pool that anything else still views can't be donated,
and a pool that is not donated would be copied whole by every write.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int

from sparda_jax.cache.kv import KVCache
from sparda_jax.cache.records import to_records
from sparda_jax.cache.state import CacheShape, DecodeState
from sparda_jax.config import ModelConfig
from sparda_jax.pallas_kernels.record_copy import pack_plan, write_back_records

Pools = tuple[Float[Array, "records rows head_dim"], ...]


class HostPool:
    """The records of all layers in ``pinned_host`` memory; record ``block * num_kv_heads + head`` of every layer.

    Args:
        config: the model.
        shape: how many blocks the pool has.
        dtype: of the keys and values.
        host: where the arrays go: ``pinned_host`` memory of the device that copies them.
        backend: of the copy kernel, see `write_back_records`.
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
        size = (records, 2 * config.sparse.block_size, config.head_dim)
        # Made layer by layer: the zeros pass through HBM on their way to the host.
        make = jax.jit(functools.partial(jnp.zeros, size, dtype), out_shardings=host)
        self._pools: Pools = tuple(jax.block_until_ready(make()) for _ in range(config.num_layers))
        self._config, self._backend = config, backend
        jit = functools.partial(jax.jit, donate_argnums=0, out_shardings=(host,) * config.num_layers)
        self._store = jit(functools.partial(_store_blocks, config=config, backend=backend))
        self._write_back = jit(functools.partial(_write_back, backend=backend))

    @property
    def arrays(self) -> Pools:
        """For the decode step to read; keep no reference beyond the call."""
        return self._pools

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    def store(self, cache: KVCache, block_ids: Int[np.ndarray, " blocks"], num_blocks: int) -> None:
        """Writes the first ``num_blocks`` blocks of a contiguous cache of one sequence to the pool.

        Args:
            cache: of batch 1, with the blocks' keys and values.
            block_ids: the physical block of each block of ``cache``'s capacity; beyond ``num_blocks`` anything.
            num_blocks: how many blocks to write; all of them complete.
        """
        pools, self._pools = self._pools, ()
        self._pools = self._store(pools, cache, jnp.asarray(block_ids, jnp.int32), jnp.int32(num_blocks))

    def write_back(self, state: DecodeState) -> None:
        """Writes the next finished block of every lane that has one; the caller raises ``written`` afterwards."""
        pools, self._pools = self._pools, ()
        self._pools = self._write_back(pools, state)

    def snapshot(self, layer: int) -> np.ndarray:
        """A copy of one layer's records, for tests and debugging."""
        device = SingleDeviceSharding(next(iter(self._pools[layer].devices())))
        return np.array(jax.jit(lambda pool: jax.device_put(pool, device))(self._pools[layer]))


def finished(state: DecodeState, block_size: int) -> Array:
    """Lanes whose next block to write back is complete."""
    return state.live & (state.lengths // block_size > state.written)


def _store_blocks(
    pools: Pools,
    cache: KVCache,
    block_ids: Int[Array, "blocks"],
    num_blocks: Int[Array, ""],
    *,
    config: ModelConfig,
    backend: str | None,
) -> Pools:
    heads = jnp.arange(config.num_kv_heads)
    targets = (block_ids[:, None] * config.num_kv_heads + heads).reshape(-1)
    pairs = jnp.stack([targets, jnp.arange(targets.shape[0])], axis=-1)
    plan = pack_plan((num_blocks * config.num_kv_heads)[None], pairs[None])

    def stored(pool, layer):
        records = to_records(layer.k, layer.v, config.sparse.block_size)
        return write_back_records(plan, records.reshape(-1, *records.shape[3:]), pool, segments=1, backend=backend)

    return tuple(stored(pool, layer) for pool, layer in zip(pools, cache.layers, strict=True))


def _write_back(pools: Pools, state: DecodeState, *, backend: str | None) -> Pools:
    block_size = state.layers[0].slots.shape[1] // 2
    lanes = jnp.arange(state.num_lanes)
    block = jnp.minimum(state.written, state.block_table.shape[1] - 1)
    physical = state.block_table[lanes, block]
    ready = finished(state, block_size).astype(jnp.int32)

    def written(pool, layer):
        kv_heads = layer.residency.slot_of_block.shape[1]
        records = physical[:, None] * kv_heads + jnp.arange(kv_heads)
        slots = layer.residency.slot_of_block[lanes[:, None], jnp.arange(kv_heads), block[:, None]]
        pairs = jnp.stack([records, slots], axis=-1).reshape(-1, 1, 2)
        plan = pack_plan(jnp.repeat(ready, kv_heads), pairs)
        return write_back_records(plan, layer.slots, pool, segments=pairs.shape[0], backend=backend)

    return tuple(written(pool, layer) for pool, layer in zip(pools, state.layers, strict=True))
