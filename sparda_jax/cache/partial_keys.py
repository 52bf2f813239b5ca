"""InfiniGen's partial key of a new token enters the cache."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.cache.state import LayerState


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
