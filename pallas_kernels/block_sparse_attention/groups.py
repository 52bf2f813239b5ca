"""Query heads padded so that a group fills whole rows of a matrix product."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def pad_groups(
    q: Float[Array, "batch q_len heads head_dim"], kv_heads: int, rows: int
) -> Float[Array, "batch q_len padded head_dim"]:
    """``rows`` heads for each KV head; those behind the group's own are zeros."""
    batch, q_len, heads, head_dim = q.shape
    group = heads // kv_heads
    if rows == group:
        return q
    q = q.reshape(batch, q_len, kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, rows - group), (0, 0)))
    return q.reshape(batch, q_len, kv_heads * rows, head_dim)


def drop_padding(
    out: Float[Array, "batch q_len padded head_dim"], kv_heads: int, heads: int
) -> Float[Array, "batch q_len heads head_dim"]:
    """The heads that `pad_groups` did not add."""
    batch, q_len, padded, head_dim = out.shape
    if padded == heads:
        return out
    out = out.reshape(batch, q_len, kv_heads, padded // kv_heads, head_dim)[:, :, :, : heads // kv_heads]
    return out.reshape(batch, q_len, heads, head_dim)
