"""The definition of block selection for the tokens of a prefill chunk, a few rows at a time, in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from sparda_jax.pallas_kernels.block_selection.prefill_bits import mask_to_bits
from sparda_jax.pallas_kernels.block_selection.reference import (
    Scorer,
    forecast_scores,
    infllm_scores,
    pool_to_blocks,
    select_blocks,
)
from sparda_jax.pallas_kernels.compressed_keys import num_windows

BLOCK = 64
"""Tokens of a block, of which 32 make a compressed key, one each 16 tokens."""


def select_blocks_prefill(
    queries: Float[Array, "batch q_len kv_heads group head_dim"],
    compressed_k: Float[Array, "batch kv_heads windows head_dim"],
    start: Int[Array, "batch"],
    num_new: Int[Array, "batch"],
    *,
    scorer: Scorer,
    init_blocks: int,
    local_blocks: int,
    num_selected: int,
    rows_at_once: int = 128,
) -> UInt32[Array, "batch kv_heads q_len words"]:
    """See `prefill.select_blocks_prefill`. ``rows_at_once`` limits the memory that scores take."""
    batch, q_len, kv_heads, group, head_dim = queries.shape
    keys = jnp.pad(compressed_k, ((0, 0), (0, 0), (0, -compressed_k.shape[2] % 4), (0, 0)))
    blocks = keys.shape[2] // 4
    rows = min(rows_at_once, q_len)
    pieces = -(-q_len // rows)
    padded = jnp.pad(queries, ((0, 0), (0, pieces * rows - q_len), (0, 0), (0, 0), (0, 0)))
    padded = padded.reshape(batch, pieces, rows, kv_heads, group, head_dim)

    def choose(piece: tuple[Array, Array]) -> Array:
        q, first = piece
        row = first + jnp.arange(rows)
        position = start[:, None] + row
        visible = num_windows(position + 1)
        if scorer is Scorer.FORECAST:
            scores = forecast_scores(q[:, :, :, 0], keys, visible)
        else:
            scores = infllm_scores(q, keys, visible)
        ids = select_blocks(
            pool_to_blocks(scores, 4),
            position // BLOCK,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            num_selected=num_selected,
        )
        # One more column takes the ends of the lists.
        named = jax.vmap(lambda mask, ids: mask.at[jnp.where(ids < 0, blocks, ids)].set(True))
        chosen = named(jnp.zeros((ids.size // ids.shape[-1], blocks + 1), bool), ids.reshape(-1, ids.shape[-1]))
        chosen = chosen[:, :blocks].reshape(*ids.shape[:-1], blocks)
        return mask_to_bits(chosen & (row < num_new[:, None])[:, None, :, None])

    bits = lax.map(choose, (jnp.moveaxis(padded, 1, 0), rows * jnp.arange(pieces)))
    bits = jnp.moveaxis(bits, 0, 2)
    return bits.reshape(batch, kv_heads, pieces * rows, -1)[:, :, :q_len]
