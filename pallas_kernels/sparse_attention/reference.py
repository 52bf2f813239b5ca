"""The definition of attention over a subset of the keys in plain jnp (docs/semantics.md section 6)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def masked_attention(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    k: Float[Array, "batch kv_heads kv_len head_dim"],
    v: Float[Array, "batch kv_heads kv_len head_dim"],
    allowed: Bool[Array, "batch #kv_heads q_len kv_len"],
    stored: Bool[Array, "batch kv_heads kv_len"],
) -> Float[Array, "batch q_len kv_heads group head_dim"]:
    """``softmax(q . k / sqrt(head_dim) | allowed) v``: float32 scores and sums, probabilities rounded to v's dtype.

    Args:
        allowed: which keys a query attends to; a row that allows none gives zeros.
        stored: which rows of k and v hold data. The others may hold anything, NaN included: 0 * NaN is NaN, so masking
            the probabilities alone would not do.
    """
    batch, q_len, kv_heads, group, head_dim = q.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    # The group's heads are rows of one matrix: XLA:CPU runs the five-dimensional product several times slower.
    rows = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(batch, kv_heads, group * q_len, head_dim)
    logits = jnp.einsum("bhrd,bhwd->bhrw", rows, k, precision=precision, preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, kv_heads, group, q_len, -1) / jnp.sqrt(jnp.float32(head_dim))
    logits = jnp.where(allowed[:, :, None], logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0))
    total = jnp.sum(weights, axis=-1)
    v = jnp.where(stored[..., None], v, 0)
    weights = weights.astype(v.dtype).reshape(batch, kv_heads, group * q_len, -1)
    out = jnp.einsum("bhrw,bhwd->bhrd", weights, v, precision=precision, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, group, q_len, head_dim) / jnp.where(total > 0, total, 1)[..., None]
    return jnp.transpose(out, (0, 3, 1, 2, 4)).astype(q.dtype)


def list_attention(
    q: Float[Array, "batch 1 kv_heads group head_dim"],
    k: Float[Array, "batch kv_heads kv_len head_dim"],
    v: Float[Array, "batch kv_heads kv_len head_dim"],
    block_ids: Int[Array, "batch kv_heads listed"],
    lengths: Int[Array, "batch"],
    block_size: int,
) -> Float[Array, "batch 1 kv_heads group head_dim"]:
    """Attention of one token per sequence over the listed blocks only; nothing else of k and v is read.

    Args:
        block_ids: ascending, -1 where the list is shorter.
        lengths: tokens stored per sequence, the query's own included.
    """
    batch, kv_heads, kv_len, head_dim = k.shape
    listed = block_ids.shape[-1]

    def gather(x: Array) -> Array:
        blocks = x.reshape(batch, kv_heads, kv_len // block_size, block_size, head_dim)
        rows = jnp.take_along_axis(blocks, jnp.maximum(block_ids, 0)[..., None, None], axis=2)
        return rows.reshape(batch, kv_heads, listed * block_size, head_dim)

    tokens = block_ids[..., None] * block_size + jnp.arange(block_size)
    stored = (block_ids[..., None] >= 0) & (tokens < lengths[:, None, None, None])
    stored = stored.reshape(batch, kv_heads, listed * block_size)
    return masked_attention(q, gather(k), gather(v), stored[:, :, None], stored)


def slot_attention(
    q: Float[Array, "batch kv_heads group head_dim"],
    slots: Float[Array, "slots rows head_dim"],
    slot_ids: Int[Array, "batch kv_heads width"],
    lengths: Int[Array, "batch"],
) -> Float[Array, "batch kv_heads group head_dim"]:
    """Attention of one token per sequence over the records in the listed slots; see `sparse_attention_decode`."""
    batch, kv_heads, width = slot_ids.shape
    block, head_dim = slots.shape[1] // 2, slots.shape[2]
    # A list ends at its first -1, and the block before that is the newest one, the only one that may be partly filled.
    listed = jnp.cumprod(slot_ids >= 0, axis=-1)
    last = jnp.sum(listed, axis=-1, keepdims=True) - 1
    tail_rows = (lengths - 1) % block + 1
    rows = jnp.where(jnp.arange(width) == last, tail_rows[:, None, None], block) * listed
    stored = (jnp.arange(block) < rows[..., None]).reshape(batch, kv_heads, width * block)
    records = slots[jnp.maximum(slot_ids, 0)]

    def tokens(x: Array) -> Array:
        return x.reshape(batch, kv_heads, width * block, head_dim)

    k, v = tokens(records[..., :block, :]), tokens(records[..., block:, :])
    return masked_attention(q[:, None], k, v, stored[:, :, None], stored)[:, 0]
