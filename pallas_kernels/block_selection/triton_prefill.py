"""The scores of blocks in prefill, as Pallas kernels lowered through Triton; `triton_prefill_top` chooses from them.

Only blocks that compete are scored: those that are neither forced nor behind the query. With one local block or more,
all five windows of such a block have ended before the query, so no window has to be masked. What the kernels leave at
other blocks is unspecified.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import interpreting
from sparda_jax.pallas_kernels.block_selection.prefill_reference import BLOCK

# Less than any logit and finite: the difference of two peaks is never NaN.
_LOWEST = -1e30


def _call(kernel, *, name: str, grid: tuple[int, ...], out_shape, num_warps: int, num_stages: int):
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        interpret=interpreting(),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )


def _products(rows: Array, keys: Array) -> Array:
    return plgpu.dot(rows, keys, trans_b=True, precision=lax.Precision.HIGHEST)


def _last_position(start_ref, num_new_ref, b: Array, first: Array, tile: int) -> Array:
    """The position of the last token of a tile of rows; -1 if it has none."""
    last = jnp.minimum(first + tile, num_new_ref[b]) - 1
    return jnp.where(last >= first, start_ref[b] + last, -1)


def _scored_blocks(position: Array, *, local_blocks: int, num_selected: int) -> Array:
    """Blocks from the first on that have to be scored for a token at ``position`` and those before it."""
    query_block = jnp.where(position >= 0, lax.div(position, BLOCK), -1)
    return jnp.where(query_block >= num_selected, query_block - local_blocks, 0)


def forecast_scores(
    queries: Float[Array, "batch q_len kv_heads 1 head_dim"],
    compressed_k: Float[Array, "batch kv_heads windows head_dim"],
    start: Int[Array, "batch"],
    num_new: Int[Array, "batch"],
    offset: Int[Array, "1"],
    *,
    rows: int,
    blocks: int,
    local_blocks: int,
    num_selected: int,
    row_tile: int = 128,
    block_tile: int = 64,
    num_warps: int = 8,
    num_stages: int = 3,
) -> Float[Array, "batch kv_heads 1 rows blocks"]:
    """The scores of the ``rows`` tokens from ``offset`` on: per block the largest of its five products."""
    batch, q_len, kv_heads, _, head_dim = queries.shape
    windows = compressed_k.shape[2]

    def kernel(q_ref, keys_ref, start_ref, num_new_ref, offset_ref, scores_ref):
        b, h = lax.div(pl.program_id(2), kv_heads), lax.rem(pl.program_id(2), kv_heads)
        local = pl.program_id(1) * row_tile + jnp.arange(row_tile)
        first_block = pl.program_id(0) * block_tile
        first = offset_ref[0] + pl.program_id(1) * row_tile
        position = _last_position(start_ref, num_new_ref, b, first, row_tile)
        scored = _scored_blocks(position, local_blocks=local_blocks, num_selected=num_selected)

        @pl.when(first_block < scored)
        def _():
            row, d = offset_ref[0] + local, jnp.arange(head_dim)[None]
            q = plgpu.load(q_ref.at[b, row[:, None], h, 0, d], mask=(row < q_len)[:, None], other=0)
            block = first_block + jnp.arange(block_tile)

            def add(entry, best):
                # Window -1 becomes window 0, which is another one of block 0's.
                window = jnp.clip(4 * block + entry - 1, 0, windows - 1)
                keys = plgpu.load(keys_ref.at[b, h, window[:, None], d])
                return jnp.maximum(best, _products(q, keys))

            lowest = jnp.full((row_tile, block_tile), -jnp.inf, jnp.float32)
            # A loop, so that the next keys are requested before they are needed.
            best = lax.fori_loop(0, 5, add, lowest)
            inside = (local < rows)[:, None] & (block < blocks)[None]
            plgpu.store(scores_ref.at[b, h, 0, local[:, None], block[None]], best, mask=inside)

    return _call(
        kernel,
        name="prefill_forecast_scores",
        grid=(pl.cdiv(blocks, block_tile), pl.cdiv(rows, row_tile), batch * kv_heads),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, 1, rows, blocks), jnp.float32),
        num_warps=num_warps,
        num_stages=num_stages,
    )(queries, compressed_k, start, num_new, offset)


def softmax_logs(
    queries: Float[Array, "batch q_len kv_heads group head_dim"],
    compressed_k: Float[Array, "batch kv_heads windows head_dim"],
    start: Int[Array, "batch"],
    num_new: Int[Array, "batch"],
    *,
    num_selected: int,
    row_tile: int = 256,
    window_tile: int = 64,
    num_warps: int = 8,
    num_stages: int = 3,
) -> Float[Array, "batch kv_heads group q_len"]:
    """The binary logarithm of each head's softmax denominator over the windows that its token sees.

    Unspecified for tokens that choose among no blocks.
    """
    batch, q_len, kv_heads, group, head_dim = queries.shape
    windows = compressed_k.shape[2]
    scale = math.log2(math.e) / math.sqrt(head_dim)

    def kernel(q_ref, keys_ref, start_ref, num_new_ref, logs_ref):
        b, h, g = lax.div(pl.program_id(2), kv_heads), lax.rem(pl.program_id(2), kv_heads), pl.program_id(1)
        first = pl.program_id(0) * row_tile
        row = first + jnp.arange(row_tile)
        last_position = _last_position(start_ref, num_new_ref, b, first, row_tile)

        @pl.when(last_position >= BLOCK * num_selected)
        def _():
            d = jnp.arange(head_dim)[None]
            q = plgpu.load(q_ref.at[b, row[:, None], h, g, d], mask=(row < q_len)[:, None], other=0)
            visible = _windows_before(start_ref[b] + row + 1)
            seen_by_all = lax.div(_windows_before(start_ref[b] + first + 1), window_tile)
            seen_by_any = pl.cdiv(_windows_before(last_position + 1), window_tile)

            def add(t, state, masked: bool):
                peak, total = state
                window = t * window_tile + jnp.arange(window_tile)
                keys = plgpu.load(keys_ref.at[b, h, jnp.minimum(window, windows - 1)[:, None], d])
                logits = _products(q, keys)
                if masked:
                    logits = jnp.where(window[None] < visible[:, None], logits, -jnp.inf)
                higher = jnp.maximum(peak, jnp.max(logits, axis=1) * scale)
                weights = jnp.exp2(logits * scale - higher[:, None])
                return higher, total * jnp.exp2(peak - higher) + jnp.sum(weights, axis=1)

            state = jnp.full(row_tile, _LOWEST, jnp.float32), jnp.zeros(row_tile, jnp.float32)
            state = lax.fori_loop(0, seen_by_all, lambda t, s: add(t, s, False), state)
            peak, total = lax.fori_loop(seen_by_all, seen_by_any, lambda t, s: add(t, s, True), state)
            plgpu.store(logs_ref.at[b, h, g, row], peak + jnp.log2(total), mask=row < q_len)

    return _call(
        kernel,
        name="prefill_softmax_logs",
        grid=(pl.cdiv(q_len, row_tile), group, batch * kv_heads),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group, q_len), jnp.float32),
        num_warps=num_warps,
        num_stages=num_stages,
    )(queries, compressed_k, start, num_new)


def _windows_before(length: Array) -> Array:
    """Complete windows of the first ``length`` tokens."""
    return lax.div(jnp.maximum(length - 16, 0), 16)


def infllm_scores(
    queries: Float[Array, "batch q_len kv_heads group head_dim"],
    compressed_k: Float[Array, "batch kv_heads windows head_dim"],
    start: Int[Array, "batch"],
    num_new: Int[Array, "batch"],
    offset: Int[Array, "1"],
    logs: Float[Array, "batch kv_heads group q_len"],
    *,
    rows: int,
    blocks: int,
    local_blocks: int,
    num_selected: int,
    row_tile: int = 64,
    block_tile: int = 32,
    num_warps: int = 4,
    num_stages: int = 2,
) -> Float[Array, "batch kv_heads 2 rows blocks"]:
    """The scores of the ``rows`` tokens from ``offset`` on, in two parts.

    The first has block b's largest score of windows 4b - 1 .. 4b + 2, the second that of window 4b - 1 alone, which is
    the fifth of the block before.

    Args:
        logs: from `softmax_logs`.
    """
    batch, q_len, kv_heads, group, head_dim = queries.shape
    windows = compressed_k.shape[2]
    scale = math.log2(math.e) / math.sqrt(head_dim)

    def kernel(q_ref, keys_ref, start_ref, num_new_ref, offset_ref, logs_ref, scores_ref):
        b, h = lax.div(pl.program_id(2), kv_heads), lax.rem(pl.program_id(2), kv_heads)
        local = pl.program_id(1) * row_tile + jnp.arange(row_tile)
        first_block = pl.program_id(0) * block_tile
        first = offset_ref[0] + pl.program_id(1) * row_tile
        position = _last_position(start_ref, num_new_ref, b, first, row_tile)
        scored = _scored_blocks(position, local_blocks=local_blocks, num_selected=num_selected)

        # The fifth window of the last block is the first of the next.
        @pl.when((scored > 0) & (first_block <= scored))
        def _():
            row, d = offset_ref[0] + local, jnp.arange(head_dim)[None]
            block = first_block + jnp.arange(block_tile)
            keys = [
                plgpu.load(keys_ref.at[b, h, jnp.clip(4 * block + entry - 1, 0, windows - 1)[:, None], d])
                for entry in range(4)
            ]

            def add(g, scores):
                q = plgpu.load(q_ref.at[b, row[:, None], h, g, d], mask=(row < q_len)[:, None], other=0)
                log = plgpu.load(logs_ref.at[b, h, g, row], mask=row < q_len, other=0)[:, None]
                return tuple(s + jnp.exp2(_products(q, k) * scale - log) for s, k in zip(scores, keys, strict=True))

            none = (jnp.zeros((row_tile, block_tile), jnp.float32),) * 4
            scores = lax.fori_loop(0, group, add, none)
            best = jnp.maximum(jnp.maximum(scores[0], scores[1]), jnp.maximum(scores[2], scores[3]))
            inside = (local < rows)[:, None] & (block < blocks)[None]
            plgpu.store(scores_ref.at[b, h, 0, local[:, None], block[None]], best, mask=inside)
            plgpu.store(scores_ref.at[b, h, 1, local[:, None], block[None]], scores[0], mask=inside)

    return _call(
        kernel,
        name="prefill_infllm_scores",
        grid=(pl.cdiv(blocks, block_tile), pl.cdiv(rows, row_tile), batch * kv_heads),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, 2, rows, blocks), jnp.float32),
        num_warps=num_warps,
        num_stages=num_stages,
    )(queries, compressed_k, start, num_new, offset, logs)
