"""Blocks that a prefill chunk finishes go to the host pool while the chunk is still being computed.

Each layer's records are copied as soon as its keys and values are there, beside its attention and the layers behind it,
in the one CUDA graph that a chunk is. So nothing is left to write at the end of a prompt but its last, partial block.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from sparda_jax.cache.kv import LayerCache
from sparda_jax.cache.pool import Pools
from sparda_jax.cache.records import to_records
from sparda_jax.pallas_kernels.record_copy import pack_plan, write_back_records

OnLayer = Callable[[int, LayerCache], None]
"""Is shown each layer's cache as soon as the new tokens are in it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkStore:
    """Where a chunk's blocks go.

    Attributes:
        block_ids: the physical block of each block of the cache's capacity; only those of blocks that the chunk
            finishes are looked at.
        start: tokens stored before the chunk. num_new: of the chunk.
    """

    block_ids: Int[Array, "blocks"]
    start: Int[Array, ""]
    num_new: Int[Array, ""]

    def write(
        self,
        pool: Shaped[Array, "records pool_rows head_dim"],
        layer: LayerCache,
        *,
        chunk: int,
        block_size: int,
        backend: str | None = None,
    ) -> Shaped[Array, "records pool_rows head_dim"]:
        """One layer's pool with the blocks that the chunk finishes, in place if it is donated.

        Args:
            pool: the layer's records.
            layer: its cache, of batch 1, which holds the chunk.
            chunk: tokens of the chunk, padding included.
            block_size: tokens of a block.
            backend: of the copy kernel, see `fetch_records`.
        """
        kv_heads, capacity = layer.k.shape[1:3]
        blocks = capacity // block_size
        # A chunk that begins inside a block finishes one more than it could hold.
        most = min(chunk // block_size + 1, blocks)
        first = self.start // block_size
        finished = (self.start + self.num_new) // block_size - first
        begin = jnp.minimum(first, blocks - most)
        k, v = (lax.dynamic_slice_in_dim(x, begin * block_size, most * block_size, 2) for x in (layer.k, layer.v))
        records = to_records(k, v, block_size)
        # Pairs from the end of the list are never followed.
        place = jnp.minimum(first + jnp.arange(most), blocks - 1)
        heads = jnp.arange(kv_heads)
        pairs = jnp.stack(
            [(ids[:, None] * kv_heads + heads).reshape(-1) for ids in (self.block_ids[place], place - begin)], axis=-1
        )
        plan = pack_plan((finished * kv_heads)[None], pairs[None])
        return write_back_records(plan, records.reshape(-1, *records.shape[3:]), pool, segments=1, backend=backend)


def written_by(
    pools: Pools, store: ChunkStore, *, chunk: int, block_size: int, backend: str | None = None
) -> tuple[list[Array], OnLayer]:
    """The pools, and what `forward` calls with each layer's cache to write that layer's blocks to them.

    The list's entries are replaced one by one, as the layers are computed.
    """
    written = list(pools)

    def write(index: int, layer: LayerCache) -> None:
        written[index] = store.write(written[index], layer, chunk=chunk, block_size=block_size, backend=backend)

    return written, write
