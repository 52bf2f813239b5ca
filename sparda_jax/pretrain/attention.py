"""Attention of a training step: a whole sequence at once, dense or restricted to selected blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.config import ModelConfig
from sparda_jax.model import Projections
from sparda_jax.pallas_kernels.block_selection import (
    block_mask,
    forecast_scores,
    infllm_scores,
    pool_to_blocks,
    select_blocks,
)
from sparda_jax.pallas_kernels.compressed_keys import compress_windows
from sparda_jax.selection import group_heads, visible_windows


def _fused_attention(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
    """Causal attention through cuDNN where there is a GPU, else through XLA."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)


def dense_attention(projections: Projections) -> Float[Array, "batch q_len heads head_dim"]:
    return _fused_attention(projections.q, projections.k, projections.v, None)


def sparse_attention(
    config: ModelConfig,
    projections: Projections,
    forecast: Float[Array, "batch q_len kv_heads head_dim"] | None = None,
) -> Float[Array, "batch q_len heads head_dim"]:
    """Attention over the blocks that InfLLM-V2 or the Forecast selects; no gradient goes through the selection.

    The heads of one KV head share a mask, so that a call per KV head needs one mask instead of ``group_size``.
    """
    allowed = selected_tokens(config, projections, forecast)
    q = group_heads(projections.q, config)
    outputs = [
        _fused_attention(
            q[:, :, head],
            projections.k[:, :, head : head + 1],
            projections.v[:, :, head : head + 1],
            allowed[:, head : head + 1],
        )
        for head in range(config.num_kv_heads)
    ]
    return jnp.concatenate(outputs, axis=2)


def selected_tokens(
    config: ModelConfig,
    projections: Projections,
    forecast: Float[Array, "batch q_len kv_heads head_dim"] | None = None,
) -> Bool[Array, "batch kv_heads q_len kv_len"]:
    """Which tokens lie in the blocks that each query selects (causality within a block is left to the caller)."""
    sparse = config.sparse
    batch, length = projections.q.shape[:2]
    q, k, forecast = jax.lax.stop_gradient((projections.q, projections.k, forecast))
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if forecast is None:
        scores = score_blocks(config, group_heads(q, config), k, positions)
    else:
        scores = foresee_blocks(config, forecast, k, positions)
    ids = select_blocks(
        scores,
        positions // sparse.block_size,
        init_blocks=sparse.init_blocks,
        local_blocks=sparse.local_blocks,
        num_selected=sparse.num_selected_blocks,
    )
    return jnp.repeat(block_mask(ids, length // sparse.block_size), sparse.block_size, axis=-1)


def score_blocks(
    config: ModelConfig,
    q: Float[Array, "batch queries kv_heads group head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    positions: Int[Array, "batch queries"],
) -> Float[Array, "batch kv_heads queries blocks"]:
    """InfLLM-V2's score of every block for the queries at ``positions`` of a whole sequence, as serving computes it.

    ``kv_len`` must be a multiple of ``block_size``. Differentiable in q and k.
    """
    scores = infllm_scores(q, _compressed(config, k), visible_windows(positions, config))
    return pool_to_blocks(scores, config.sparse.windows_per_block)


def foresee_blocks(
    config: ModelConfig,
    forecast: Float[Array, "batch queries kv_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    positions: Int[Array, "batch queries"],
) -> Float[Array, "batch kv_heads queries blocks"]:
    """The Forecast's score of every block; the rest as in `score_blocks`."""
    scores = forecast_scores(forecast, _compressed(config, k), visible_windows(positions, config))
    return pool_to_blocks(scores, config.sparse.windows_per_block)


def _compressed(
    config: ModelConfig, k: Float[Array, "batch kv_len kv_heads head_dim"]
) -> Float[Array, "batch kv_heads windows head_dim"]:
    sparse = config.sparse
    batch, length = k.shape[:2]
    # The last window reaches past the end: it repeats the last key, and no query sees it.
    windows = jnp.broadcast_to(jnp.arange(length // sparse.kernel_stride), (batch, length // sparse.kernel_stride))
    return compress_windows(jnp.swapaxes(k, 1, 2), windows, sparse.kernel_size, sparse.kernel_stride)
