"""Attention of a prefill chunk over the blocks that each token selected, and the choice of what runs it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.block_sparse_attention import mosaic_gpu, reference, triton
from sparda_jax.pallas_kernels.operands import FLOATS, INT32, check_operands


def block_sparse_attention_prefill(
    q: Float[Array, "batch q_len heads head_dim"],
    k: Float[Array, "batch kv_heads capacity head_dim"],
    v: Float[Array, "batch kv_heads capacity head_dim"],
    masks: UInt32[Array, "batch kv_heads q_len words"],
    start: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    *,
    block_size: int,
    backend: str | None = None,
) -> Float[Array, "batch q_len heads head_dim"]:
    """``softmax(q . k / sqrt(head_dim)) v`` over the selected blocks, up to the query (docs/semantics.md section 6).

    Token ``i`` of a chunk has position ``start + i`` and attends to the keys of the blocks that its mask names, as far
    as they are not later than itself; the heads of a group share a mask. Float32 scores and sums, probabilities rounded
    to the dtype of v.

    Args:
        q: the chunk's queries after RoPE.
        k, v: one layer's cache in q's dtype, the chunk's own rows included. Rows at and beyond a sequence's length, and
            blocks that no token selected, may hold anything, NaN included; the other rows must be finite.
        masks: uint32; bit ``b % 32`` of word ``b // 32`` says whether a token and KV head selected block b. Bits of
            blocks after the token's own, and of tokens beyond the length, mean nothing.
        start: position of a sequence's first token of the chunk, int32.
        lengths: tokens stored per sequence, int32, those of the chunk included. A chunk may reach beyond its length.
        block_size: tokens of a block; it divides the capacity.
        backend: a name of `Backend`, or None for the fastest that runs here.

    Returns:
        The heads' outputs in q's dtype; zeros for a token at or beyond the length, or without a block.

    Raises:
        ValueError: the shapes or dtypes don't fit each other, or the backend is unknown or doesn't take them.
    """
    if masks.dtype != jnp.uint32:
        raise ValueError(f"masks are {masks.dtype}: they must be uint32.")
    words = lax.bitcast_convert_type(masks, jnp.int32)
    sizes: dict[str, tuple[int, str]] = {}
    check_operands(FLOATS, sizes=sizes, q=(q, "batch q_len heads head_dim"), k=(k, "batch kv_heads capacity head_dim"))
    check_operands(FLOATS, sizes=sizes, v=(v, "batch kv_heads capacity head_dim"))
    check_operands(INT32, sizes=sizes, masks=(words, "batch kv_heads q_len words"))
    check_operands(INT32, sizes=sizes, start=(start, "batch"), lengths=(lengths, "batch"))
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: they must have the same dtype.")
    heads, (kv_heads, capacity) = q.shape[2], k.shape[1:3]
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}.")
    if block_size < 1 or capacity % block_size:
        raise ValueError(f"block_size={block_size} must divide capacity={capacity}.")
    if masks.shape[3] * 32 * block_size < capacity:
        raise ValueError(
            f"masks{list(masks.shape)} name {masks.shape[3] * 32} blocks of {block_size}, and capacity={capacity}: "
            f"use {-(-capacity // (32 * block_size))} words."
        )
    available = [Backend.REFERENCE]
    if triton.takes(q, k, block_size):
        available.append(Backend.TRITON)
    if mosaic_gpu.takes(q, k, block_size):
        available.append(Backend.MOSAIC_GPU)
    chosen = choose_backend(backend, "block_sparse_attention", available=available)
    return _jitted(q, k, v, words, start, lengths, block_size=block_size, backend=chosen)


def has_kernels(group: int, head_dim: int, block_size: int) -> bool:
    """Whether such operands have a kernel on the device that a program traced here is meant for."""
    q = jax.ShapeDtypeStruct((1, 1, group, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 1, block_size, head_dim), jnp.bfloat16)
    return triton.takes(q, k, block_size) and choose_backend(None, "block_sparse_attention") is not Backend.REFERENCE


# One jit object for all layers, so that they share one lowering of the kernels.
@functools.partial(jax.jit, static_argnames=("block_size", "backend"))
def _jitted(
    q: Array, k: Array, v: Array, masks: Array, start: Array, lengths: Array, *, block_size: int, backend: Backend
) -> Array:
    if backend is Backend.REFERENCE:
        return reference.attention(q, k, v, masks, start, lengths, block_size=block_size)
    if backend is Backend.TRITON:
        return triton.attention(q, k, v, masks, start, lengths, block_size=block_size)
    return mosaic_gpu.attention(q, k, v, masks, start, lengths)
