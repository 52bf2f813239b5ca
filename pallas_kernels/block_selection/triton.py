"""Block selection in decode, as Pallas kernels lowered through Triton.

Scoring leaves two numbers a page: the max over its four entries, and entry 0 alone, which belongs to the block before
as well. So no program has to read a page of its neighbour; `top_blocks` puts the two together.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import interpreting
from sparda_jax.pallas_kernels.block_selection.kernel_parts import FORCED_KEY, LOWEST_KEY, pages_seen, sort_key
from sparda_jax.pallas_kernels.block_selection.reference import Scorer

# Bytes of compressed keys that one program reads: about what its registers hold, and enough in flight on every SM.
_TILE_BYTES = 32 * 1024


def _call(
    kernel,
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape,
    num_warps: int,
    num_stages: int = 1,
    aliases: dict[int, int] | None = None,
):
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        interpret=interpreting(),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )


def _windows_seen(page: Array, visible: Array) -> Array:
    """For each entry of each page [pages]: whether it is a window that the query sees, [pages, 4]."""
    window = 4 * page[:, None] + jnp.arange(4)[None] - 1
    return (window >= 0) & (window < visible)


def _store_parts(parts_ref, b: Array, h: int | Array, page: Array, scores: Array, seen: Array) -> None:
    """Writes the max over each page's entries, and entry 0, from ``scores`` [pages, 4], -inf where not visible."""
    first = jnp.where(jnp.arange(4)[None] == 0, scores, -jnp.inf)
    plgpu.store(parts_ref.at[b, h, 0, page], jnp.max(scores, axis=1), mask=seen)
    plgpu.store(parts_ref.at[b, h, 1, page], jnp.max(first, axis=1), mask=seen)


def score_pages(
    queries: Float[Array, "batch kv_heads group head_dim"],
    pages: Float[Array, "num_pages kv_heads 4 head_dim"],
    block_table: Int[Array, "batch blocks"],
    visible: Int[Array, "batch"],
    *,
    scorer: Scorer,
    scratch: Float[Array, "batch kv_heads 2 blocks"] | None = None,
    pages_per_program: int | None = None,
    num_warps: int = 4,
    pool_pages: int = 64,
    pool_warps: int = 4,
) -> Float[Array, "batch kv_heads 2 blocks"]:
    """For each page the max over its visible entries, and entry 0: float32, unspecified where nothing is visible.

    Args:
        queries, pages, block_table, visible, scorer: as `select_blocks_decode` takes them.
        scratch: an earlier result, in whose place the Forecast's goes.
        pages_per_program: a power of two, at least 4; by default what makes a tile of 32 KB.
        num_warps: of the programs that read the pages.
        pool_pages, pool_warps: pages a program, a power of two, and warps of InfLLM's second pass.
    """
    page_bytes = math.prod(pages.shape[1:]) * pages.dtype.itemsize
    tile = pages_per_program or max(4, pl.next_power_of_2(_TILE_BYTES // page_bytes))
    if scorer is Scorer.FORECAST:
        return _forecast_parts(queries, pages, block_table, visible, scratch, tile=tile, num_warps=num_warps)
    weights, stats = _softmax_pieces(queries, pages, block_table, visible, tile=tile, num_warps=num_warps)
    return _pooled_parts(weights, stats, visible, tile=tile, pool_pages=pool_pages, num_warps=pool_warps)


def _forecast_parts(queries, pages, block_table, visible, scratch: Array | None, *, tile: int, num_warps: int) -> Array:
    batch, kv_heads, _, head_dim = queries.shape
    blocks = block_table.shape[1]

    def kernel(q_ref, pages_ref, table_ref, visible_ref, *parts_refs):
        parts_ref = parts_refs[-1]  # the scratch before it is the same memory
        b = pl.program_id(1)
        visible = visible_ref[b]
        page = pl.program_id(0) * tile + jnp.arange(tile)
        seen_pages = pages_seen(visible, blocks)

        @pl.when(pl.program_id(0) * tile < seen_pages)
        def _():
            seen = page < seen_pages
            physical = plgpu.load(table_ref.at[b, page], mask=seen, other=0)
            windows = _windows_seen(page, visible)
            q = [q_ref[b, h, 0, :].astype(jnp.float32) for h in range(kv_heads)]
            entry, d = jnp.arange(4)[None, :, None], jnp.arange(head_dim)[None, None]
            # All heads are requested before any is used: bytes in flight are what this kernel lives on.
            keys = [
                plgpu.load(pages_ref.at[physical[:, None, None], h, entry, d], mask=windows[:, :, None], other=0)
                for h in range(kv_heads)
            ]
            for h in range(kv_heads):
                scores = jnp.sum(keys[h].astype(jnp.float32) * q[h][None, None], axis=2)
                _store_parts(parts_ref, b, h, page, jnp.where(windows, scores, -jnp.inf), seen)

    return _call(
        kernel,
        name="forecast_scores",
        grid=(pl.cdiv(blocks, tile), batch),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, 2, blocks), jnp.float32),
        num_warps=num_warps,
        aliases={} if scratch is None else {4: 0},
    )(queries, pages, block_table, visible, *(() if scratch is None else (scratch,)))


def _softmax_pieces(queries, pages, block_table, visible, *, tile: int, num_warps: int) -> tuple[Array, Array]:
    """``exp(logit - peak)`` of every entry and head, [batch, kv_heads, entries, group], where the peak is that of the
    entry's tile of pages; and each tile's peak and sum, [batch, kv_heads, tiles, 2, group].
    """
    batch, kv_heads, group, head_dim = queries.shape
    blocks = block_table.shape[1]
    tiles = pl.cdiv(blocks, tile)
    # The tensor cores want at least 16 columns.
    columns = max(16, pl.next_power_of_2(group))

    def kernel(q_ref, pages_ref, table_ref, visible_ref, weights_ref, stats_ref):
        b, t = pl.program_id(1), pl.program_id(0)
        visible = visible_ref[b]

        @pl.when(t * tile < pages_seen(visible, blocks))
        def _():
            row = 4 * t * tile + jnp.arange(4 * tile)
            window = row - 1
            seen = (window >= 0) & (window < visible) & (row < 4 * blocks)
            physical = plgpu.load(table_ref.at[b, lax.div(row, 4)], mask=seen, other=0)
            d, head = jnp.arange(head_dim)[None], jnp.arange(columns)
            rows = physical[:, None], lax.rem(row, 4)[:, None]
            q = [
                plgpu.load(q_ref.at[b, h, head[:, None], d], mask=(head < group)[:, None], other=0)
                for h in range(kv_heads)
            ]
            keys = [
                plgpu.load(pages_ref.at[rows[0], h, rows[1], d], mask=seen[:, None], other=0) for h in range(kv_heads)
            ]
            for h in range(kv_heads):
                logits = plgpu.dot(keys[h], q[h], trans_b=True, precision=lax.Precision.HIGHEST)
                logits = jnp.where(seen[:, None], logits * (1 / math.sqrt(head_dim)), -jnp.inf)
                peak = jnp.max(logits, axis=0)
                # A tile whose logits are all -inf has weights of zero.
                weights = jnp.exp(logits - jnp.where(peak == -jnp.inf, 0, peak)[None])
                total = jnp.sum(weights, axis=0)
                kept = seen[:, None] & (head < group)[None]
                plgpu.store(weights_ref.at[b, h, row[:, None], head[None]], weights, mask=kept)
                plgpu.store(stats_ref.at[b, h, t, 0, head], peak, mask=head < group)
                plgpu.store(stats_ref.at[b, h, t, 1, head], total, mask=head < group)

    return _call(
        kernel,
        name="infllm_weights",
        grid=(tiles, batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, kv_heads, 4 * blocks, group), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, tiles, 2, group), jnp.float32),
        ),
        num_warps=num_warps,
    )(queries, pages, block_table, visible)


def _pooled_parts(weights, stats, visible, *, tile: int, pool_pages: int, num_warps: int) -> Array:
    """Every head's weights over its softmax denominator, summed over the group: the second pass."""
    batch, kv_heads, entries, group = weights.shape
    blocks, tiles = entries // 4, stats.shape[2]
    columns, all_tiles = pl.next_power_of_2(group), pl.next_power_of_2(tiles)

    def kernel(weights_ref, stats_ref, visible_ref, parts_ref):
        b, h = pl.program_id(2), pl.program_id(1)
        visible = visible_ref[b]
        seen_pages = pages_seen(visible, blocks)
        page = pl.program_id(0) * pool_pages + jnp.arange(pool_pages)

        @pl.when(pl.program_id(0) * pool_pages < seen_pages)
        def _():
            seen, windows, head = page < seen_pages, _windows_seen(page, visible), jnp.arange(columns)
            entry = jnp.arange(4)[None, :, None]
            kept = windows[:, :, None] & (head < group)[None, None]
            scaled = plgpu.load(
                weights_ref.at[b, h, 4 * page[:, None, None] + entry, head[None, None]], mask=kept, other=0
            )
            t = jnp.arange(all_tiles)
            used = (t * tile < seen_pages)[:, None] & (head < group)[None]
            peaks = plgpu.load(stats_ref.at[b, h, t[:, None], 0, head[None]], mask=used, other=-jnp.inf)
            totals = plgpu.load(stats_ref.at[b, h, t[:, None], 1, head[None]], mask=used, other=0)
            peak = jnp.max(peaks, axis=0)
            peak = jnp.where(peak == -jnp.inf, 0, peak)
            total = jnp.sum(totals * jnp.exp(peaks - peak[None]), axis=0)
            own = seen[:, None] & (head < group)[None]
            own_peak = plgpu.load(stats_ref.at[b, h, lax.div(page, tile)[:, None], 0, head[None]], mask=own, other=0)
            share = jnp.exp(own_peak - peak[None]) / jnp.where(total > 0, total, 1)[None]
            scores = jnp.sum(scaled * share[:, None], axis=2)
            _store_parts(parts_ref, b, h, page, jnp.where(windows, scores, -jnp.inf), seen)

    return _call(
        kernel,
        name="infllm_scores",
        grid=(pl.cdiv(blocks, pool_pages), kv_heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, 2, blocks), jnp.float32),
        num_warps=num_warps,
    )(weights, stats, visible)


def top_blocks(
    parts: Float[Array, "batch kv_heads 2 blocks"],
    visible: Int[Array, "batch"],
    query_block: Int[Array, "batch"],
    num_selected: Int[Array, "batch"],
    *,
    init_blocks: int,
    local_blocks: int,
    width: int,
    num_warps: int = 4,
) -> Int[Array, "batch kv_heads width"]:
    """The selected block ids from the scores of pages: ascending, -1 at the end; exact, ties to the lowest id.

    The k-th largest score is found digit by digit on its order-preserving integer image, two bits a step; the places of
    the chosen ids come from one prefix sum.
    """
    batch, kv_heads, _, blocks = parts.shape
    places = pl.next_power_of_2(width)

    def kernel(parts_ref, visible_ref, query_block_ref, num_selected_ref, ids_ref):
        b, h = pl.program_id(1), pl.program_id(0)
        seen_pages, query_block = pages_seen(visible_ref[b], blocks), jnp.minimum(query_block_ref[b], blocks - 1)
        count = jnp.maximum(jnp.minimum(jnp.minimum(num_selected_ref[b], width), query_block + 1), 0)
        ids = jnp.arange(pl.next_power_of_2(blocks))
        own = plgpu.load(parts_ref.at[b, h, 0, ids], mask=ids < seen_pages, other=-jnp.inf)
        after = plgpu.load(parts_ref.at[b, h, 1, ids + 1], mask=ids + 1 < seen_pages, other=-jnp.inf)
        forced = (ids < init_blocks) | (ids >= query_block - local_blocks)
        key = jnp.where(forced, FORCED_KEY, sort_key(jnp.maximum(own, after)))
        key = jnp.where(ids <= query_block, key, LOWEST_KEY)

        def unsettled(state):
            step, _, exact = state
            return (step < 16) & (exact == 0)

        def two_bits(state):
            """Keeps ``threshold`` the largest multiple of the step's unit that at least ``count`` keys reach."""
            step, threshold, _ = state
            unit = jnp.int32(1) << (30 - 2 * step)
            at_least = [(key >= threshold + i * unit).astype(jnp.int32) for i in (1, 2, 3)]
            packed = jnp.sum(at_least[0] | (at_least[1] << 16))
            reached = (packed & 0xFFFF, packed >> 16, jnp.sum(at_least[2]))
            # Once exactly ``count`` keys reach a threshold, its lower bits don't matter.
            exact = sum((n == count).astype(jnp.int32) for n in reached)
            return step + 1, threshold + unit * sum((n >= count).astype(jnp.int32) for n in reached), exact

        _, threshold, exact = lax.while_loop(unsettled, two_bits, (jnp.int32(0), jnp.int32(LOWEST_KEY), jnp.int32(0)))
        threshold -= (exact > 0).astype(jnp.int32)
        above, equal = (key > threshold).astype(jnp.int32), (key == threshold).astype(jnp.int32)
        ties = count - jnp.sum(above)
        marks = (above << 16) | equal
        before = jnp.cumsum(marks) - marks
        equal_before = before & 0xFFFF
        chosen = (above == 1) | ((equal == 1) & (equal_before < ties))
        place = (before >> 16) + jnp.minimum(equal_before, ties)
        # The interpreter writes masked places too: those beyond the end are dropped.
        plgpu.store(ids_ref.at[b, h, jnp.where(chosen, place, width)], ids, mask=chosen)
        place = jnp.arange(places)
        empty = (place >= count) & (place < width)
        plgpu.store(ids_ref.at[b, h, jnp.where(empty, place, width)], jnp.full(places, -1), mask=empty)

    return _call(
        kernel,
        name="top_blocks",
        grid=(kv_heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, width), jnp.int32),
        num_warps=num_warps,
    )(parts, visible, query_block, num_selected)
