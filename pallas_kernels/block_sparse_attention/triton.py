"""Block-sparse prefill attention lowered through Triton: a program for a few tokens, over the union of their blocks."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import interpreting
from sparda_jax.pallas_kernels.block_sparse_attention.groups import drop_padding, pad_groups

# Query heads of a program: the heads of one token, or of several neighbours.
_ROWS = 64
# Less than any logit and finite: the difference of two peaks is never NaN.
_LOWEST = -1e30


def takes(q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, block_size: int) -> bool:
    """Whether the kernel can run on such operands: sizes that are powers of two, groups up to 64."""
    group = q.shape[2] // k.shape[1]
    return group <= _ROWS and all(size >= 16 and size == pl.next_power_of_2(size) for size in (block_size, q.shape[3]))


def attention(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_heads capacity head_dim"],
    v: Float[Array, "batch kv_heads capacity head_dim"],
    masks: Int[Array, "batch kv_heads q_len words"],
    start: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    *,
    block_size: int,
    num_warps: int = 4,
    num_stages: int = 2,
) -> Float[Array, "batch q_len heads head_dim"]:
    """See `block_sparse_attention_prefill`; operands as `takes` says.

    Args:
        num_warps, num_stages: as Triton names them.
    """
    batch, q_len, heads, _ = q.shape
    kv_heads = k.shape[1]
    rows = pl.next_power_of_2(heads // kv_heads)
    tokens = _ROWS // rows
    q = pad_groups(q, kv_heads, rows)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(_tile, tokens=tokens, rows=rows, block=block_size),
        # One KV head after the other, and tokens in order: what neighbouring programs read stays in L2.
        grid=(pl.cdiv(q_len, tokens), kv_heads, batch),
        in_specs=[anywhere] * 6,
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpreting(),
        name="block_sparse_attention",
    )(q, k, v, masks, start, lengths)
    return drop_padding(out, kv_heads, heads)


def _tile(q_ref, k_ref, v_ref, masks, start, lengths, out_ref, *, tokens: int, rows: int, block: int) -> None:
    index, head, lane = (pl.program_id(axis) for axis in range(3))
    q_len, head_dim = q_ref.shape[1], q_ref.shape[3]
    words = masks.shape[3]
    scale = math.log2(math.e) / math.sqrt(head_dim)
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    first, length = index * tokens, lengths[lane]
    first_position = start[lane] + first
    # Beyond the chunk's end the last token is computed again.
    token = jnp.minimum(first + jnp.arange(_ROWS) // rows, q_len - 1)
    position = start[lane] + token
    valid = position < length
    heads = head * rows + jnp.arange(_ROWS) % rows
    column = jnp.arange(head_dim)
    q = q_ref[lane, token[:, None], heads[:, None], column[None, :]]
    count = jnp.clip(jnp.minimum(length - first_position, q_len - first), 0, tokens)
    last_block = (first_position + count - 1) // block
    num_words = jnp.where(count > 0, jnp.minimum(last_block // 32 + 1, words), 0)

    def one_block(carry):
        left, bits, word, acc, peak, total = carry
        bit = 31 - lax.clz(left & -left)
        begin = (word * 32 + bit) * block
        keys = begin + jnp.arange(block)
        k = k_ref[lane, head, pl.ds(begin, block), :]
        # 0 * NaN is NaN, so values beyond the length are not read.
        v = plgpu.load(v_ref.at[lane, head, pl.ds(begin, block), :], mask=(keys < length)[:, None], other=0)
        chosen = (lax.shift_right_logical(bits, jnp.broadcast_to(bit, bits.shape)) & 1) > 0
        logits = plgpu.dot(q, k.T, precision=precision) * scale
        allowed = chosen[:, None] & (keys[None, :] <= position[:, None])
        logits = jnp.where(allowed, logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        weights = jnp.exp2(logits - new_peak[:, None])
        shrink = jnp.exp2(peak - new_peak)
        acc = acc * shrink[:, None] + plgpu.dot(weights.astype(v.dtype), v, precision=precision)
        return left & (left - 1), bits, word, acc, new_peak, total * shrink + weights.sum(axis=1)

    def one_word(word, carry):
        bits = plgpu.load(masks.at[lane, head, token, word], mask=valid, other=0)
        left = jnp.int32(0)
        for offset in range(tokens):
            there = masks[lane, head, jnp.minimum(first + offset, q_len - 1), word]
            left |= jnp.where(offset < count, there, 0)
        # A block after the last token's own has no keys, and may lie beyond the cache.
        up_to = jnp.minimum(last_block - word * 32, 31)
        left &= lax.shift_right_logical(jnp.int32(-1), 31 - up_to)
        return lax.while_loop(lambda c: c[0] != 0, one_block, (left, bits, word, *carry))[3:]

    init = (
        jnp.zeros((_ROWS, head_dim), jnp.float32),
        jnp.full((_ROWS,), _LOWEST, jnp.float32),
        jnp.zeros((_ROWS,), jnp.float32),
    )
    acc, _, total = lax.fori_loop(0, num_words, one_word, init)
    out = acc / jnp.where(total > 0, total, 1)[:, None]
    out_ref[lane, token[:, None], heads[:, None], column[None, :]] = out.astype(out_ref.dtype)
