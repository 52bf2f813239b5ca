"""The frozen base's attention in training: whole rows at once, each query over its own blocks. Forward only."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from sparda_jax.pallas_kernels.block_selection import bits_to_mask, num_words
from sparda_jax.pallas_kernels.block_sparse_attention import block_sparse_attention_prefill, has_kernels
from sparda_jax.train._rows import dot

# Queries of a chunk and keys of a tile. The largest array has batch * heads * QUERY_CHUNK * KEY_TILE float32.
QUERY_CHUNK = 512
KEY_TILE = 2048


def attend(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    bits: UInt32[Array, "batch kv_heads q_len words"],
    begin: int | Int[Array, ""] = 0,
    *,
    block_size: int,
    **tiles: int,
) -> Float[Array, "batch q_len kv_heads group head_dim"]:
    """`block_attention`, by prefill's kernel where there is one. ``tiles`` are for the other places."""
    batch, count, kv_heads, group, head_dim = q.shape
    length = k.shape[1]
    if length % block_size or not has_kernels(group, head_dim, block_size):
        return block_attention(q, k, v, bits, begin, block_size=block_size, **tiles)
    attended = block_sparse_attention_prefill(
        q.reshape(batch, count, kv_heads * group, head_dim),
        jnp.swapaxes(k, 1, 2),
        jnp.swapaxes(v, 1, 2),
        bits,
        jnp.full(batch, begin, jnp.int32),
        jnp.full(batch, length, jnp.int32),
        block_size=block_size,
    )
    return attended.reshape(q.shape)


def block_attention(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    bits: UInt32[Array, "batch kv_heads q_len words"],
    begin: int | Int[Array, ""] = 0,
    *,
    block_size: int,
    chunk: int = QUERY_CHUNK,
    key_tile: int = KEY_TILE,
) -> Float[Array, "batch q_len kv_heads group head_dim"]:
    """``softmax(q . k / sqrt(head_dim)) v`` over the tokens of the chosen blocks up to the query's own.

    Same numbers as `masked_attention` up to the order of sums; no array has both a query and a key axis of full length.

    Args:
        q, k, v: finite, also in padding.
        bits: blocks of the row, see `choose_blocks`; a query without any gets zeros.
        begin: where in the row the first query stands.
        chunk, key_tile: queries and keys at a time, for memory and time only.

    Raises:
        ValueError: key_tile is no multiple of block_size.
    """
    batch, count, kv_heads, group, head_dim = q.shape
    length = k.shape[1]
    if key_tile % block_size:
        raise ValueError(f"key_tile={key_tile} must be a multiple of block_size={block_size}")
    chunk = min(chunk, count)
    tile = min(key_tile, -(-length // block_size) * block_size)
    after = ((0, 0), (0, 0), (0, -length % tile), (0, 0))
    keys, values = (jnp.pad(jnp.swapaxes(x, 1, 2), after) for x in (k, v))
    blocks = keys.shape[2] // block_size

    padded_q = jnp.pad(q, ((0, 0), (0, -count % chunk), (0, 0), (0, 0), (0, 0)))
    padded_bits = jnp.pad(bits, ((0, 0), (0, 0), (0, -count % chunk), (0, num_words(blocks) - bits.shape[3])))

    def of_chunk(carry: None, chunk_number: Array) -> tuple[None, Array]:
        rows = jax.lax.dynamic_slice_in_dim(padded_q, chunk_number * chunk, chunk, axis=1)
        rows = jnp.transpose(rows, (0, 2, 3, 1, 4)).reshape(batch, kv_heads, group * chunk, head_dim)
        chunk_bits = jax.lax.dynamic_slice_in_dim(padded_bits, chunk_number * chunk, chunk, axis=2)
        listed = bits_to_mask(chunk_bits, blocks)
        index = begin + chunk_number * chunk + jnp.arange(chunk)

        def add_tile(number: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, out = sums
            k_tile, v_tile = (jax.lax.dynamic_slice_in_dim(x, number * tile, tile, axis=2) for x in (keys, values))
            few = tile // block_size
            allowed = jnp.repeat(jax.lax.dynamic_slice_in_dim(listed, number * few, few, axis=3), block_size, axis=3)
            allowed &= number * tile + jnp.arange(tile) <= index[:, None]
            logits = dot("bhrd,bhwd->bhrw", rows, k_tile) / jnp.sqrt(jnp.float32(head_dim))
            logits = logits.reshape(batch, kv_heads, group, chunk, tile)
            logits = jnp.where(allowed[:, :, None], logits, -jnp.inf).reshape(batch, kv_heads, group * chunk, tile)
            higher = jnp.maximum(peak, jnp.max(logits, axis=-1))
            level = jnp.where(jnp.isneginf(higher), 0, higher)
            weights = jnp.exp(logits - level[..., None])
            shrink = jnp.exp(peak - level)
            product = dot("bhrw,bhwd->bhrd", weights.astype(v.dtype), v_tile)
            return higher, total * shrink + jnp.sum(weights, axis=-1), out * shrink[..., None] + product

        zeros = jnp.zeros((batch, kv_heads, group * chunk), jnp.float32)
        empty = (zeros - jnp.inf, zeros, jnp.zeros((*zeros.shape, head_dim), jnp.float32))
        last = jnp.minimum(index[-1] // tile, keys.shape[2] // tile - 1)
        _, total, out = jax.lax.fori_loop(0, last + 1, add_tile, empty)
        out = out / jnp.where(total > 0, total, 1)[..., None]
        out = jnp.transpose(out.reshape(batch, kv_heads, group, chunk, head_dim), (0, 3, 1, 2, 4))
        return carry, out.astype(q.dtype)

    _, out = jax.lax.scan(of_chunk, None, jnp.arange(padded_q.shape[1] // chunk))
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, kv_heads, group, head_dim)[:, :count]
