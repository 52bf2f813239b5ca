"""The softmax over fine keys in plain jnp, tile by tile."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def scores(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    fine: Float[Array, "batch kv_heads length head_dim"],
    first: Int[Array, "batch q_len"],
    last: Int[Array, "batch q_len"],
    *,
    stride: int,
    block_size: int,
    tile: int,
) -> tuple[
    Float[Array, "batch kv_heads q_len strides"],
    Float[Array, "batch kv_heads q_len strides"],
    Float[Array, "batch kv_heads q_len blocks"],
]:
    """See `fine_softmax`. Only tiles that some query sees are visited."""
    batch, q_len, kv_heads, group, head_dim = q.shape
    length = fine.shape[2]
    # The group's heads are rows of one matrix.
    rows = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(batch, kv_heads, group * q_len, head_dim)
    some = first <= last
    first_tile = jnp.min(jnp.where(some, first, length - 1)) // tile
    last_tile = jnp.minimum(jnp.max(jnp.where(some, last, 0)) // tile, length // tile - 1)

    def logits(number: Array) -> Array:
        keys = jax.lax.dynamic_slice_in_dim(fine, number * tile, tile, axis=2)
        index = number * tile + jnp.arange(tile)
        seen = (index >= first[..., None]) & (index <= last[..., None])
        z = _dot(rows, keys) / np.sqrt(head_dim)
        return jnp.where(seen[:, None, None], z.reshape(batch, kv_heads, group, q_len, tile), -jnp.inf)

    def add_to_sum(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        peak, total = carry
        z = logits(number)
        higher = jnp.maximum(peak, jnp.max(z, axis=-1))
        level = jnp.where(jnp.isneginf(higher), 0, higher)
        return higher, total * jnp.exp(peak - level) + jnp.sum(jnp.exp(z - level[..., None]), axis=-1)

    # Zeros that are distributed over devices as the rows are, which loops demand of what they start from.
    wide = rows[..., 0].astype(jnp.promote_types(rows.dtype, jnp.float32))
    none = jnp.where(False, wide, 0).reshape(batch, kv_heads, group, q_len)
    peak, total = jax.lax.fori_loop(first_tile, last_tile + 1, add_to_sum, (none - jnp.inf, none))
    log_sum = jnp.where(total > 0, peak + jnp.log(jnp.where(total > 0, total, 1)), 0)[..., None]

    def put(whole: Array, part: Array, number: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, number * part.shape[-1], axis=3)

    def add_values(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, opening, mass = carry
        probability = jnp.sum(jnp.exp(logits(number) - log_sum), axis=2)
        strides = probability.reshape(batch, kv_heads, q_len, -1, stride)
        blocks = probability.reshape(batch, kv_heads, q_len, -1, block_size)
        return (
            put(largest, jnp.max(strides, axis=-1), number),
            put(opening, strides[..., 0], number),
            put(mass, jnp.sum(blocks, axis=-1), number),
        )

    def empty(size: int) -> Array:
        return jnp.broadcast_to(none[:, :, 0, :, None], (batch, kv_heads, q_len, size))

    start = (empty(length // stride), empty(length // stride), empty(length // block_size))
    return jax.lax.fori_loop(first_tile, last_tile + 1, add_values, start)


def _dot(rows: Array, keys: Array) -> Array:
    precision = None if rows.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.einsum("bhrd,bhfd->bhrf", rows, keys, precision=precision, preferred_element_type=wide)
