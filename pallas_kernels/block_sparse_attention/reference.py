"""The definition of block-sparse prefill attention in plain jnp (docs/semantics.md section 6)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.pallas_kernels.sparse_attention import masked_attention


def attention(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_heads capacity head_dim"],
    v: Float[Array, "batch kv_heads capacity head_dim"],
    masks: Int[Array, "batch kv_heads q_len words"],
    start: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    *,
    block_size: int,
) -> Float[Array, "batch q_len heads head_dim"]:
    """See `block_sparse_attention_prefill`. Every score is computed and held in memory."""
    batch, q_len, heads, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    positions = start[:, None] + jnp.arange(q_len)
    rows = jnp.arange(capacity)
    causal = (rows <= positions[..., None]) & (positions < lengths[:, None])[..., None]
    allowed = jnp.repeat(_bits(masks, capacity // block_size), block_size, axis=-1) & causal[:, None]
    out = masked_attention(
        q.reshape(batch, q_len, kv_heads, heads // kv_heads, head_dim),
        k,
        v,
        allowed,
        jnp.any(allowed, axis=2),
    )
    return out.reshape(q.shape)


def _bits(masks: Int[Array, "*rows words"], blocks: int) -> Bool[Array, "*rows blocks"]:
    bits = (masks[..., None] >> jnp.arange(32)) & 1
    return bits.reshape(*masks.shape[:-1], -1)[..., :blocks] > 0
