"""A contiguous KV cache in device memory, with the compressed keys that selection scores."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.config import ModelConfig, SparseConfig
from sparda_jax.pallas_kernels.compressed_keys import compress_windows, num_windows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's keys (after RoPE), values and compressed keys.

    Attributes:
        k, v: rows at and beyond a sequence's length hold anything.
        compressed_k: window j is the mean of K rows 16j .. 16j + 31; only complete windows are meaningful.
        channel_weight: InfiniGen's importance of each skewed channel, summed over the prompt; None in other modes.
        selected: the blocks that the prompt's newest token has selected, ascending, -1 at the end; decode begins with
            them in its slots. None: nobody keeps them.
    """

    k: Float[Array, "batch kv_heads capacity head_dim"]
    v: Float[Array, "batch kv_heads capacity head_dim"]
    compressed_k: Float[Array, "batch kv_heads windows head_dim"]
    channel_weight: Float[Array, "batch kv_heads head_dim"] | None = None
    selected: Int[Array, "batch kv_heads selected"] | None = None

    def append(
        self,
        k: Float[Array, "batch q_len kv_heads head_dim"],
        v: Float[Array, "batch q_len kv_heads head_dim"],
        lengths: Int[Array, "batch"],
        num_new: Int[Array, "batch"],
        sparse: SparseConfig,
    ) -> "LayerCache":
        """Writes the first ``num_new`` rows of each sequence behind its ``lengths``; finishes the windows they end."""
        batch, q_len = k.shape[:2]
        offsets = jnp.arange(q_len)
        capacity = self.k.shape[2]
        # Rows of padding get an index outside the cache, which the scatter drops.
        rows = jnp.where(offsets < num_new[:, None], lengths[:, None] + offsets, capacity)
        lane = jnp.arange(batch)[:, None]
        new_k = self.k.at[lane, :, rows].set(k, mode="drop")
        new_v = self.v.at[lane, :, rows].set(v, mode="drop")
        kernel = (sparse.kernel_size, sparse.kernel_stride)
        windows = num_windows(lengths, *kernel)[:, None] + jnp.arange(q_len // sparse.kernel_stride + 1)
        finished = compress_windows(new_k, windows, *kernel)
        complete = windows < num_windows(lengths + num_new, *kernel)[:, None]
        slots = jnp.where(complete, windows, self.compressed_k.shape[2])
        compressed = self.compressed_k.at[lane, :, slots].set(jnp.swapaxes(finished, 1, 2), mode="drop")
        return dataclasses.replace(self, k=new_k, v=new_v, compressed_k=compressed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """The cache of a batch: one :class:`LayerCache` a layer and the tokens stored per sequence."""

    layers: tuple[LayerCache, ...]
    lengths: Int[Array, "batch"]

    @property
    def capacity(self) -> int:
        return self.layers[0].k.shape[2]

    @classmethod
    def empty(
        cls, config: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype, *, infinigen: bool = False
    ) -> "KVCache":
        """A cache for ``capacity`` tokens per sequence, a multiple of ``block_size``.

        Raises:
            ValueError: ``capacity`` is not a positive multiple of ``block_size``.
        """
        if capacity <= 0 or capacity % config.sparse.block_size:
            raise ValueError(
                f"capacity={capacity} must be a positive multiple of block_size={config.sparse.block_size}"
            )
        heads, head_dim = config.num_kv_heads, config.head_dim

        def zeros(rows: int) -> Array:
            return jnp.zeros((batch, heads, rows, head_dim), dtype)

        layers = tuple(
            LayerCache(
                k=zeros(capacity),
                v=zeros(capacity),
                compressed_k=zeros(capacity // config.sparse.kernel_stride),
                channel_weight=jnp.zeros((batch, heads, head_dim), jnp.float32) if infinigen else None,
                selected=jnp.full((batch, heads, config.sparse.num_selected_blocks), -1, jnp.int32),
            )
            for _ in range(config.num_layers)
        )
        return cls(layers=layers, lengths=jnp.zeros((batch,), jnp.int32))

    def grow(self, capacity: int) -> "KVCache":
        """The same contents in a cache of ``capacity`` tokens per sequence."""

        def pad(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, 0), (0, x.shape[2] * capacity // self.capacity - x.shape[2]), (0, 0)))

        layers = tuple(
            dataclasses.replace(layer, k=pad(layer.k), v=pad(layer.v), compressed_k=pad(layer.compressed_k))
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers)
