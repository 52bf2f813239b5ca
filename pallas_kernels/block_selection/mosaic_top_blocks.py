"""The top-k of block selection for Hopper: exact, one warpgroup a row, without sort, prefix sum or scatter.

Mosaic has none of the three. The k-th largest score is found by counting, as in the Triton kernel. The chosen set
becomes 32-bit words, and every place of the list finds its own id: the word by comparing with the words' running counts
(a small matrix in registers), the bit by halving.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import mosaic_interpreter
from sparda_jax.pallas_kernels.block_selection.kernel_parts import FORCED_KEY, LOWEST_KEY, pages_seen, sort_key

WORD = 32

# A score a lane and a word a warp at a time: loads are coalesced, and a count is an addition per word and one exchange.
_WORDS = plgpu.Layout.TILED(plgpu.Tiling(((4, WORD), (1,))), (-3,), (-2,), -1)
# Every warp has all words, one a lane.
_LINE = plgpu.Layout.TILED(plgpu.Tiling(((WORD,), (1,))), (plgpu.Replicated(4),), (-2,), -1)
_MATRIX = plgpu.Layout.WGMMA


def num_words(blocks: int) -> int:
    """Words of 32 blocks that hold ``blocks``: a multiple of 32, so that a warp has one a lane."""
    return WORD * pl.cdiv(blocks, WORD * WORD)


def _popcount(x: Array) -> Array:
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


def _nth_bit(word: Array, n: Array) -> Array:
    """The position of the ``n``-th set bit, counted from 0; unspecified where there is none."""
    position = jnp.zeros_like(word)
    for width in (16, 8, 4, 2, 1):
        below = _popcount((word >> position) & ((1 << width) - 1))
        beyond = n >= below
        n = jnp.where(beyond, n - below, n)
        position = jnp.where(beyond, position + width, position)
    return position


def _threshold(key: Array, count: Array) -> Array:
    """The largest t that at least ``count`` keys reach, or any that exactly so many are above, two bits a step."""

    def two_bits(state):
        step, threshold, _ = state
        unit = jnp.int32(1) << (30 - 2 * step)
        at_least = [(key >= threshold + i * unit).astype(jnp.int32) for i in (1, 2, 3)]
        # One exchange between the warps for all three counts: a lane counts at most one key per word.
        lanes = jnp.sum(at_least[0] | (at_least[1] << 10) | (at_least[2] << 20), axis=0)
        outer = jnp.sum((lanes & 1023) | ((lanes >> 20) << 16), axis=0)
        reached = (outer & 0xFFFF, jnp.sum((lanes >> 10) & 1023, axis=0), outer >> 16)
        exact = sum((n == count).astype(jnp.int32) for n in reached)
        return step + 1, threshold + unit * sum((n >= count).astype(jnp.int32) for n in reached), exact

    start = (jnp.int32(0), jnp.int32(LOWEST_KEY), jnp.int32(0))
    _, threshold, exact = lax.while_loop(lambda state: (state[0] < 16) & (state[2] == 0), two_bits, start)
    return threshold - (exact > 0).astype(jnp.int32)


def top_blocks(
    parts: Float[Array, "batch kv_heads 2 padded"],
    visible: Int[Array, "batch"],
    query_block: Int[Array, "batch"],
    num_selected: Int[Array, "batch"],
    *,
    init_blocks: int,
    local_blocks: int,
    width: int,
) -> Int[Array, "batch kv_heads width"]:
    """The selected block ids from `mosaic_gpu.score_pages`: ascending, -1 at the end; exact, ties to the lowest id.

    Raises:
        ValueError: ``width`` is not a multiple of 4, the unit of a copy to global memory; or there are more blocks than
            the counters hold.
    """
    if width % 4:
        raise ValueError(f"width={width} is not a multiple of 4: round it up, or use backend=triton.")
    batch, kv_heads, _, padded = parts.shape
    if padded > WORD * 1024:
        raise ValueError(f"{padded - WORD} blocks are too many: at most {WORD * 1023}, or use backend=triton.")
    words, places = padded // WORD - 1, 64 * pl.cdiv(width, 64)
    tiles = range(pl.cdiv(words, 64))

    def body(parts_ref, visible_ref, query_block_ref, num_selected_ref, ids_ref, *scratch):
        above_s, equal_s, counts_s, sums_s, word_s, first_s, end_s, ids_s = scratch
        b, h = lax.axis_index("b"), lax.axis_index("h")
        visible = visible_ref[b]
        seen_pages = pages_seen(visible, WORD * words)
        query_block = query_block_ref[b]
        count = jnp.maximum(jnp.minimum(jnp.minimum(num_selected_ref[b], width), query_block + 1), 0)

        lane = plgpu.broadcasted_iota(jnp.int32, (words, WORD), 1, layout=_WORDS)
        ids = WORD * plgpu.broadcasted_iota(jnp.int32, (words, WORD), 0, layout=_WORDS) + lane
        own, after = (
            plgpu.load(parts_ref.at[b, h, part, pl.ds(1, words)], layout=_WORDS, optimized=False) for part in (0, 1)
        )
        own = jnp.where(ids < seen_pages, own, -jnp.inf)
        key = sort_key(jnp.maximum(own, jnp.where(ids + 1 < seen_pages, after, -jnp.inf)))
        forced = (ids < init_blocks) | (ids >= query_block - local_blocks)
        key = jnp.where(ids <= query_block, jnp.where(forced, FORCED_KEY, key), LOWEST_KEY)
        threshold = _threshold(key, count)
        above_s[...] = jnp.sum((key > threshold).astype(jnp.int32) << lane, axis=1)
        equal_s[...] = jnp.sum((key == threshold).astype(jnp.int32) << lane, axis=1)
        plgpu.commit_smem()

        def matrix(rows: int, dimension: int) -> Array:
            return plgpu.broadcasted_iota(jnp.int32, (rows, words), dimension, layout=_MATRIX)

        def across(ref) -> Array:
            """A number a word, the same in the 64 rows of a matrix."""
            return lax.broadcast_in_dim(
                plgpu.load(ref.at[pl.ds(0, words)], layout=_MATRIX.reduce(0), optimized=False), (64, words), [1]
            )

        def line(ref) -> Array:
            return plgpu.load(ref.at[pl.ds(0, words)], layout=_LINE, optimized=False)

        above, equal = line(above_s), line(equal_s)
        # Two counts in a number: keys above the threshold, and equal to it in the upper half.
        counts = _popcount(above) | (_popcount(equal) << 16)
        counts_s[...] = counts
        plgpu.commit_smem()
        for tile in tiles:
            earlier = matrix(64, 1) <= matrix(64, 0) + 64 * tile
            sums_s[pl.ds(64 * tile, 64)] = jnp.sum(jnp.where(earlier, across(counts_s), 0), axis=1)
        plgpu.commit_smem()
        sums = line(sums_s)

        # Places left for keys equal to the threshold; they go to the lowest ids.
        ties = count - (sums_s[words - 1] & 0xFFFF)

        def chosen_up_to(sums: Array) -> Array:
            return (sums & 0xFFFF) + jnp.minimum(sums >> 16, ties)

        first_s[...] = chosen_up_to(sums - counts)
        end_s[...] = chosen_up_to(sums)
        taken = jnp.clip(ties - ((sums - counts) >> 16), 0, counts >> 16)
        kept = jnp.where(taken < counts >> 16, (1 << _nth_bit(equal, taken)) - 1, -1)
        word_s[...] = above | (equal & kept)
        plgpu.commit_smem()

        for tile in range(places // 64):
            place, first = matrix(64, 0) + 64 * tile, across(first_s)
            here = (place >= first) & (place < across(end_s))
            word = jnp.sum(jnp.where(here, across(word_s), 0), axis=1)
            where = jnp.sum(jnp.where(here, (matrix(64, 1) << 16) | first, 0), axis=1)
            place = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=_MATRIX.reduce(1)) + 64 * tile
            found = WORD * (where >> 16) + _nth_bit(word, place - (where & 0xFFFF))
            ids_s[pl.ds(64 * tile, 64)] = jnp.where(place < count, found, -1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ids_s.at[pl.ds(0, width)], ids_ref.at[b, h])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, width), jnp.int32),
        grid=(kv_heads, batch),
        grid_names=("h", "b"),
        # Every buffer is written once and committed before it is read.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        scratch_types=[
            plgpu.SMEM((size,), jnp.int32)
            for size in (words, words, words, 64 * len(tiles), words, words, words, places)
        ],
    )
    with mosaic_interpreter():
        return kernel(parts.reshape(batch, kv_heads, 2, words + 1, WORD), visible, query_block, num_selected)
