"""Block selection in decode for Hopper, in Mosaic: what scores the pages. `mosaic_top_blocks` has the top-k.

The Forecast has one query per KV head, too little for the tensor cores: pages go from global memory to registers, many
at a time. InfLLM's queries of a group are a matrix: pages come by TMA, the products are wgmma.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import mosaic_interpreter
from sparda_jax.pallas_kernels.block_selection.kernel_parts import pages_seen
from sparda_jax.pallas_kernels.block_selection.mosaic_top_blocks import WORD, num_words, top_blocks
from sparda_jax.pallas_kernels.block_selection.reference import Scorer

__all__ = ["score_pages", "takes", "top_blocks"]

_MATRIX = plgpu.Layout.WGMMA
_TILED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
# Every buffer is written once and committed before it is read.
_PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)


def takes(
    queries: Float[Array, "batch kv_heads group head_dim"],
    pages: Float[Array, "num_pages kv_heads 4 head_dim"],
    *,
    scorer: Scorer,
    width: int,
) -> bool:
    """Whether these kernels take the operands: KV heads in powers of two, a width in units of 16 bytes, and for InfLLM
    what wgmma and its tiles ask for.
    """
    kv_heads, group, head_dim = queries.shape[1:]
    if kv_heads & (kv_heads - 1) or head_dim not in (64, 128) or width % 4:
        return False
    return scorer is Scorer.FORECAST or (pages.dtype == jnp.bfloat16 and group % 8 == 0 and kv_heads % 2 == 0)


def _page_layout(rows: int, head_dim: int, itemsize: int):
    """Spreads one page [rows, head_dim] over the warpgroup, up to 16 contiguous bytes a thread."""
    vector = min(16 // itemsize, rows * head_dim // 128)
    per_warp = 32 * vector // head_dim
    if per_warp == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((4, head_dim), (vector,))), (-3,), (-2,), -1)
    tiling = plgpu.Tiling(((4 * per_warp, head_dim), (per_warp, head_dim), (vector,)))
    return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)


def _pool_layout(tile: int):
    """Every warp has all pages of a tile, one a lane, and its entries in registers."""
    lanes = (-2,) if tile == 32 else (-2, plgpu.Replicated(32 // tile))
    return plgpu.Layout.TILED(plgpu.Tiling(((tile, 4),)), (plgpu.Replicated(4),), lanes, -1)


def _seen(page: Array, column: Array, visible: Array) -> Array:
    """Whether entry ``column % 4`` of a page is a window that the query sees."""
    window = 4 * page + (column & 3) - 1
    return (window >= 0) & (window < visible)


def _store_parts(scores_s, parts_ref, b: Array, first: Array, visible: Array) -> None:
    """Pools a tile's scores [pages, 4 * kv_heads] and writes them to where `mosaic_top_blocks` looks for them.

    An entry 0 counts for the block before its page, so it goes one place lower.
    """
    tile, columns = scores_s.shape
    layout = _pool_layout(tile)
    scores = plgpu.load(scores_s, layout=layout, optimized=False)
    page, column = (
        plgpu.broadcasted_iota(jnp.int32, (tile, columns), dimension, layout=layout) for dimension in (0, 1)
    )
    scores = jnp.where(_seen(first + page, column, visible), scores, -jnp.inf)
    for h in range(columns // 4):
        own = jnp.max(jnp.where((column >= 4 * h) & (column < 4 * h + 4), scores, -jnp.inf), axis=1)
        entry = jnp.max(jnp.where(column == 4 * h, scores, -jnp.inf), axis=1)
        parts_ref[b, h, 0, pl.ds(first + WORD, tile)] = own
        parts_ref[b, h, 1, pl.ds(first + WORD - 1, tile)] = entry


def score_pages(
    queries: Float[Array, "batch kv_heads group head_dim"],
    pages: Float[Array, "num_pages kv_heads 4 head_dim"],
    block_table: Int[Array, "batch blocks"],
    visible: Int[Array, "batch"],
    *,
    scorer: Scorer,
    tile: int = 16,
) -> Float[Array, "batch kv_heads 2 padded"]:
    """For each page the max over its visible entries, and entry 0, float32; unspecified where nothing is visible.

    Block c's own max is at ``32 + c``, and so is entry 0 of page c + 1.

    Args:
        queries, pages, block_table, visible, scorer: as `select_blocks_decode` takes them; see `takes`.
        tile: pages a program: 8, 16 or 32.
    """
    if scorer is Scorer.FORECAST:
        return _forecast_parts(queries, pages, block_table, visible, tile=tile)
    weights, stats = _softmax_pieces(queries, pages, block_table, visible, tile=tile)
    blocks = block_table.shape[1]
    return _pooled_parts(weights, stats, visible, blocks=blocks, tile=tile)


def _forecast_parts(queries, pages, block_table, visible, *, tile: int) -> Array:
    batch, kv_heads, _, head_dim = queries.shape
    blocks, rows = block_table.shape[1], 4 * kv_heads
    layout = _page_layout(rows, head_dim, pages.dtype.itemsize)

    def body(q_ref, pages_ref, table_ref, visible_ref, parts_ref, scores_s):
        b, first = lax.axis_index("b"), lax.axis_index("t") * tile
        visible = visible_ref[b]
        seen_pages = pages_seen(visible, blocks)

        @pl.when(first < seen_pages)
        def _():
            # All pages are requested before any is used: bytes in flight are what this kernel lives on.
            physical = [table_ref[b, jnp.minimum(first + i, seen_pages - 1)] for i in range(tile)]
            keys = [plgpu.load(pages_ref.at[page], layout=layout, optimized=False) for page in physical]
            row = plgpu.broadcasted_iota(jnp.int32, (rows, head_dim), 0, layout=layout)
            q = jnp.zeros((), jnp.float32)
            for h in range(kv_heads):
                one = plgpu.load(q_ref.at[b, h, 0], layout=layout.reduce(0), optimized=False).astype(jnp.float32)
                q = jnp.where(row >= 4 * h, lax.broadcast_in_dim(one, (rows, head_dim), [1]), q)
            for i, page in enumerate(keys):
                scores_s[i] = jnp.sum(page.astype(jnp.float32) * q, axis=1)
            plgpu.commit_smem()
            _store_parts(scores_s, parts_ref, b, first, visible)

    kernel = plgpu.kernel(
        body,
        out_type=_parts_type(batch, kv_heads, blocks),
        grid=(pl.cdiv(blocks, tile), batch),
        grid_names=("t", "b"),
        scratch_types=[plgpu.SMEM((tile, rows), jnp.float32)],
        compiler_params=_PARAMS,
    )
    with mosaic_interpreter():
        return kernel(queries, pages.reshape(len(pages), rows, head_dim), block_table, visible)


def _parts_type(batch: int, kv_heads: int, blocks: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, kv_heads, 2, WORD * (num_words(blocks) + 1)), jnp.float32)


def _softmax_pieces(queries, pages, block_table, visible, *, tile: int) -> tuple[Array, Array]:
    """``exp(logit - peak)`` of every entry and head, [batch, tiles, tile * kv_heads * 4, group], where the peak is that
    of the tile; and each tile's peak (base 2) and sum, [batch, 2, kv_heads, tiles, group], tiles filled up to 64.
    """
    batch, kv_heads, group, head_dim = queries.shape
    blocks, page_rows = block_table.shape[1], 4 * kv_heads
    # A multiple of the 64 pages that a program of the second pass reads.
    tiles, rows = 64 // tile * pl.cdiv(blocks, 64), tile * page_rows
    scale = math.log2(math.e) / math.sqrt(head_dim)

    def body(q_ref, pages_ref, table_ref, visible_ref, weights_ref, stats_ref, q_s, keys_s, arrived):
        b, t = lax.axis_index("b"), lax.axis_index("t")
        first, visible = t * tile, visible_ref[b]
        seen_pages = pages_seen(visible, blocks)

        @pl.when(first < seen_pages)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[b], q_s, arrived)
            for i in range(tile):
                page = table_ref[b, jnp.minimum(first + i, seen_pages - 1)]
                plgpu.copy_gmem_to_smem(pages_ref.at[page], keys_s.at[pl.ds(i * page_rows, page_rows)], arrived)
            plgpu.barrier_wait(arrived)

            row = plgpu.broadcasted_iota(jnp.int32, (rows, group), 0, layout=_MATRIX)
            head = lax.div(row, 4) & (kv_heads - 1)
            seen = _seen(first + lax.div(row, page_rows), row, visible)
            logits = jnp.zeros((), jnp.float32)
            for h in range(kv_heads):

                def products(acc, h=h):
                    plgpu.wgmma(acc, keys_s, q_s.at[pl.ds(h * group, group)].transpose((1, 0)))
                    return acc[...]

                product = pl.run_scoped(products, plgpu.WGMMAAccumulatorRef((rows, group), jnp.float32))
                logits = jnp.where(head >= h, product * scale, logits)
            peak = jnp.zeros((), jnp.float32)
            for h in range(kv_heads):
                one = jnp.max(jnp.where(seen & (head == h), logits, -jnp.inf), axis=0)
                # A tile whose logits are all -inf has weights of zero.
                one = jnp.where(one == -jnp.inf, 0, one)
                stats_ref[b, 0, h, t] = one
                peak = jnp.where(head >= h, lax.broadcast_in_dim(one, (rows, group), [1]), peak)
            weights = jnp.where(seen, jnp.exp2(logits - peak), 0)
            for h in range(kv_heads):
                stats_ref[b, 1, h, t] = jnp.sum(jnp.where(head == h, weights, 0), axis=0)
            weights_ref[b, t] = weights

    f32 = jnp.float32
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, tiles, rows, group), f32),
            jax.ShapeDtypeStruct((batch, 2, kv_heads, 64 * pl.cdiv(tiles, 64), group), f32),
        ),
        grid=(tiles, batch),
        grid_names=("t", "b"),
        scratch_types=[
            plgpu.SMEM((kv_heads * group, head_dim), jnp.bfloat16, transforms=_TILED),
            plgpu.SMEM((rows, head_dim), jnp.bfloat16, transforms=_TILED),
            plgpu.Barrier(num_arrivals=tile + 1),
        ],
        compiler_params=_PARAMS,
    )
    with mosaic_interpreter():
        return kernel(
            queries.reshape(batch, kv_heads * group, head_dim),
            pages.reshape(len(pages), page_rows, head_dim),
            block_table,
            visible,
        )


def _pooled_parts(weights, stats, visible, *, blocks: int, tile: int) -> Array:
    """Every head's weights over its softmax denominator, summed over the group: the second pass, 64 pages a program."""
    batch, tiles, _, group = weights.shape
    kv_heads, all_tiles = stats.shape[2], stats.shape[3]

    def body(weights_ref, stats_ref, visible_ref, parts_ref):
        b, first = lax.axis_index("b"), lax.axis_index("t") * 64
        visible = visible_ref[b]
        seen_pages = pages_seen(visible, blocks)

        @pl.when(first < seen_pages)
        def _():
            used = plgpu.broadcasted_iota(jnp.int32, (all_tiles, group), 0, layout=_MATRIX) * tile < seen_pages
            row = plgpu.broadcasted_iota(jnp.int32, (64, group), 0, layout=_MATRIX)
            page = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=_MATRIX.reduce(1)) + first
            for h in range(kv_heads):
                peaks, totals = (
                    plgpu.load(stats_ref.at[b, kind, h], layout=_MATRIX, optimized=False) for kind in (0, 1)
                )
                peaks = jnp.where(used, peaks, -jnp.inf)
                peak = jnp.max(peaks, axis=0)
                scaled = totals * jnp.exp2(peaks - lax.broadcast_in_dim(peak, peaks.shape, [1]))
                total = jnp.sum(jnp.where(used, scaled, 0), axis=0)
                total = jnp.where(total > 0, total, 1)
                share = jnp.zeros((), jnp.float32)
                for i in range(64 // tile):
                    t = jnp.minimum(lax.div(first, tile) + i, tiles - 1)
                    own = plgpu.load(stats_ref.at[b, 0, h, t], layout=_MATRIX.reduce(0), optimized=False)
                    own = lax.broadcast_in_dim(jnp.exp2(own - peak) / total, (64, group), [1])
                    share = jnp.where(row >= i * tile, own, share)
                best = None
                for entry in range(4):
                    ref = weights_ref.at[b, pl.ds(first, 64), 4 * h + entry]
                    score = jnp.sum(plgpu.load(ref, layout=_MATRIX, optimized=False) * share, axis=1)
                    score = jnp.where(_seen(page, jnp.int32(entry), visible), score, -jnp.inf)
                    best = score if best is None else jnp.maximum(best, score)
                    if entry == 0:
                        parts_ref[b, h, 1, pl.ds(first + WORD - 1, 64)] = score
                parts_ref[b, h, 0, pl.ds(first + WORD, 64)] = best

    kernel = plgpu.kernel(
        body,
        out_type=_parts_type(batch, kv_heads, blocks),
        grid=(pl.cdiv(blocks, 64), batch),
        grid_names=("t", "b"),
        compiler_params=_PARAMS,
    )
    with mosaic_interpreter():
        return kernel(weights.reshape(batch, tiles * tile, 4 * kv_heads, group), stats, visible)
