"""A new token enters the cache: its K and V in the tail slot, every 16 tokens a compressed key, partial keys."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.cache.state import LayerState
from sparda_jax.config import SparseConfig


def finish_window(
    layer: LayerState,
    k: Float[Array, "batch kv_heads head_dim"],
    position: Int[Array, "batch"],
    block_table: Int[Array, "batch blocks"],
    sparse: SparseConfig,
) -> LayerState:
    """Writes the compressed key that the new token completes, if it completes one.

    The mean of the window's K rows, accumulated in float32: the last one is the new token's, the others lie in the
    slots of the tail and of the block before it, which is always selected and so always there.

    Args:
        layer: the cache before the new token.
        k: the new token's key.
        position: of the new token; -1 in an idle lane.
        block_table: as in `DecodeState`.
        sparse: the window's size and step.
    """
    size, stride, block_size = sparse.kernel_size, sparse.kernel_stride, sparse.block_size
    batch, kv_heads = k.shape[:2]
    lane, head = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[:, None]
    complete = (position >= size - 1) & ((position + 1) % stride == 0)
    earlier = jnp.maximum(position[:, None] - jnp.arange(size - 1, 0, -1), 0)[:, None]
    slot = layer.residency.slot_of_block[lane, head, earlier // block_size]
    rows = layer.slots[slot, earlier % block_size]
    window = jnp.concatenate([rows, k[:, :, None]], axis=2)
    mean = jnp.mean(window.astype(jnp.float32), axis=2).astype(k.dtype)
    # Window j is entry (j + 1) % 4 of page (j + 1) // 4, and here j + 1 = (position + 1) / stride - 1.
    entry = (position + 1) // stride - 1
    page = block_table[jnp.arange(batch), jnp.maximum(entry, 0) // sparse.windows_per_block]
    page = jnp.where(complete, page, layer.pages.shape[0])  # an index behind the end: the scatter drops it
    entry = (entry % sparse.windows_per_block)[:, None]
    pages = layer.pages.at[page[:, None], jnp.arange(kv_heads), entry].set(mean, mode="drop")
    return dataclasses.replace(layer, pages=pages)


def write_token(
    layer: LayerState,
    k: Float[Array, "batch kv_heads head_dim"],
    v: Float[Array, "batch kv_heads head_dim"],
    position: Int[Array, "batch"],
    block_size: int,
) -> LayerState:
    """Writes the new token into its lane's tail slot, which a residency plan has given it; idle lanes write nothing."""
    batch, kv_heads = k.shape[:2]
    lane, head = jnp.arange(batch)[:, None], jnp.arange(kv_heads)
    slot = layer.residency.slot_of_block[lane, head, jnp.maximum(position, 0)[:, None] // block_size]
    slot = jnp.where((position[:, None] >= 0) & (slot >= 0), slot, layer.slots.shape[0])
    row = (position % block_size)[:, None]
    slots = layer.slots.at[slot, row].set(k, mode="drop").at[slot, row + block_size].set(v, mode="drop")
    return dataclasses.replace(layer, slots=slots)


def write_partial_key(
    layer: LayerState,
    k: Float[Array, "batch kv_heads head_dim"],
    position: Int[Array, "batch"],
    block_table: Int[Array, "batch blocks"],
) -> LayerState:
    """Writes the new token's partial key for InfiniGen, in a layer that keeps them; idle lanes write nothing."""
    if layer.partial_keys is None or layer.partial_basis is None:
        return layer
    num_blocks, kv_heads, block_size, _ = layer.partial_keys.shape
    basis = layer.partial_basis
    kept = jnp.einsum("bhd,bhdc->bhc", k.astype(jnp.float32), basis, precision=jax.lax.Precision.HIGHEST)
    page = block_table[jnp.arange(k.shape[0]), jnp.maximum(position, 0) // block_size]
    page = jnp.where(position >= 0, page, num_blocks)  # an index behind the end: the scatter drops it
    place = (page[:, None], jnp.arange(kv_heads), (position % block_size)[:, None])
    partial_keys = layer.partial_keys.at[place].set(kept.astype(layer.partial_keys.dtype), mode="drop")
    return dataclasses.replace(layer, partial_keys=partial_keys)
