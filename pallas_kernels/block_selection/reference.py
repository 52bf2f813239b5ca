"""The definition of block selection in plain jnp (docs/semantics.md sections 4 and 5, clean semantics of section 10).

A query sees the windows that end at or before it, in prefill and in decode alike. The reference lets the Forecast also
score windows that merely start there; those pool into blocks qb - 1, qb and qb + 1 only, of which the first two are
always selected and the last is never allowed, so the selection is the same and does not depend on how a prompt is cut.
Scores are float32 until the selection; equal scores go to the lowest block id.
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Scorer(enum.StrEnum):
    """What scores a compressed key in decode."""

    FORECAST = "forecast"
    """One query per KV head: the raw dot product."""
    INFLLM = "infllm"
    """All query heads of a KV head: their softmax over the visible windows, summed."""


def _dot(spec: str, a: Array, b: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _visible(count: Int[Array, "batch q_len"], windows: int) -> Bool[Array, "batch 1 q_len windows"]:
    return (jnp.arange(windows) < count[..., None])[:, None]


def forecast_scores(
    forecast: Float[Array, "batch q_len kv_heads head_dim"],
    compressed_k: Float[Array, "batch kv_heads windows head_dim"],
    visible: Int[Array, "batch q_len"],
) -> Float[Array, "batch kv_heads q_len windows"]:
    """The raw dot product ``F . K1[j]``, no scale and no softmax; -inf for j >= visible (section 5.4)."""
    scores = _dot("bqhd,bhwd->bhqw", forecast, compressed_k)
    return jnp.where(_visible(visible, scores.shape[-1]), scores, -jnp.inf)


def infllm_scores(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    compressed_k: Float[Array, "batch kv_heads windows head_dim"],
    visible: Int[Array, "batch q_len"],
) -> Float[Array, "batch kv_heads q_len windows"]:
    """InfLLM-V2: softmax over the visible windows per head, then summed over the group (section 4.1).

    ``sum_g softmax_j(q_g . K1[j] / sqrt(head_dim))``; -inf for j >= visible.
    """
    allowed = _visible(visible, compressed_k.shape[2])
    batch, q_len, kv_heads, group, head_dim = q.shape
    # The group's heads are rows of one matrix: XLA:CPU runs the five-dimensional product several times slower.
    rows = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(batch, kv_heads, group * q_len, head_dim)
    logits = _dot("bhrd,bhwd->bhrw", rows, compressed_k) / jnp.sqrt(jnp.float32(head_dim))
    logits = logits.reshape(batch, kv_heads, group, q_len, -1)
    logits = jnp.where(allowed[:, :, None], logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(allowed, jnp.sum(weights / jnp.where(total > 0, total, 1), axis=2), -jnp.inf)


def pool_to_blocks(scores: Float[Array, "*rows entries"], per_block: int) -> Float[Array, "*rows blocks"]:
    """Block b's score: the max over entries ``per_block * b - 1 .. per_block * b + per_block - 1`` (section 4.3).

    With windows (4 a block) these are the five that overlap the block; with tokens (64 a block), InfiniGen's rule.
    """
    padded = jnp.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(1, 0)], constant_values=-jnp.inf)
    own = padded[..., :-1].reshape(*scores.shape[:-1], -1, per_block).max(axis=-1)
    return jnp.maximum(own, padded[..., per_block::per_block])


def select_blocks(
    block_scores: Float[Array, "batch kv_heads q_len blocks"],
    query_block: Int[Array, "batch q_len"],
    *,
    init_blocks: int,
    local_blocks: int,
    num_selected: int,
    at_most: Int[Array, "batch q_len"] | None = None,
) -> Int[Array, "batch kv_heads q_len selected"]:
    """The selected block ids, ascending, -1 at the end where fewer blocks exist (section 4.4).

    Blocks before ``init_blocks`` and the last ``local_blocks`` up to the query's own are always selected; blocks after
    the query's own never are. ``selected = min(num_selected, blocks)``, of which a query uses ``at_most`` if given.
    """
    blocks = block_scores.shape[-1]
    ids = jnp.arange(blocks)
    query_block = query_block[:, None, :, None]
    past = ids <= query_block
    forced = (ids < init_blocks) | (ids >= query_block - local_blocks)
    # A score that overflowed must not compete with the forced blocks. It may be NaN, the sum of +inf and -inf, which
    # top_k sorts above +inf or below -inf.
    largest = jnp.finfo(block_scores.dtype).max
    finite = jnp.where(block_scores <= largest, block_scores, largest)
    # top_k sorts -0 below 0, and they are equal scores.
    finite = jnp.where(finite == 0, 0, finite)
    # A past block always has a visible window, so its score is finite and beats every block after the query's own;
    # where it is -inf, the past block has the lower id.
    ranked = jnp.where(past, jnp.where(forced, jnp.inf, finite), -jnp.inf)
    _, chosen = jax.lax.top_k(ranked, min(num_selected, blocks))
    taken = chosen <= query_block
    if at_most is not None:
        taken &= jnp.arange(chosen.shape[-1]) < at_most[:, None, :, None]
    chosen = jnp.sort(jnp.where(taken, chosen, blocks), axis=-1)
    return jnp.where(chosen == blocks, -1, chosen)


def block_mask(ids: Int[Array, "*rows selected"], blocks: int) -> Bool[Array, "*rows blocks"]:
    """True for the blocks named in ``ids``; -1 names none."""
    return jnp.any(ids[..., None] == jnp.arange(blocks), axis=-2)


def block_scores_decode(
    queries: Float[Array, "batch kv_heads group head_dim"],
    pages: Float[Array, "num_pages kv_heads 4 head_dim"],
    block_table: Int[Array, "batch blocks"],
    visible: Int[Array, "batch"],
    *,
    scorer: Scorer,
) -> Float[Array, "batch kv_heads blocks"]:
    """The block scores of one new token per sequence, its compressed keys read through a table of pages.

    Window j is entry ``(j + 1) % 4`` of the sequence's page ``(j + 1) // 4``, so a block's five windows are the four
    entries of its own page and entry 0 of the next; entry 0 of page 0 is no window. Entries of windows
    ``j >= visible`` may hold anything, and so may the table where a page has no visible window.
    """
    table = jnp.clip(block_table, 0, pages.shape[0] - 1)
    entries = jnp.moveaxis(pages[table], 2, 1).reshape(*queries.shape[:2], -1, pages.shape[-1])
    windows = entries[:, :, 1:]
    if scorer is Scorer.FORECAST:
        scores = forecast_scores(queries[:, None, :, 0], windows, visible[:, None])
    else:
        scores = infllm_scores(queries[:, None], windows, visible[:, None])
    # The last block's fifth window would end in a page that the table does not have.
    scores = jnp.pad(scores[:, :, 0], ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
    return pool_to_blocks(scores, 4)


def choose_blocks_decode(
    block_scores: Float[Array, "batch kv_heads blocks"],
    query_block: Int[Array, "batch"],
    num_selected: Int[Array, "batch"],
    *,
    init_blocks: int,
    local_blocks: int,
    width: int,
) -> Int[Array, "batch kv_heads width"]:
    """The best ``num_selected`` blocks of each sequence, as `select_blocks` chooses them; -1 up to ``width``."""
    ids = select_blocks(
        block_scores[:, :, None],
        query_block[:, None],
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        num_selected=width,
        at_most=num_selected[:, None],
    )[:, :, 0]
    return jnp.pad(ids, ((0, 0), (0, 0), (0, width - ids.shape[-1])), constant_values=-1)
