"""The choice of blocks in prefill from their scores, as a Pallas kernel lowered through Triton.

One warp chooses the blocks of one token and KV head, with all scores in its registers, so that counting needs no
barrier. The k-th largest score is found by halving an interval of the integer images of the scores, and the search ends
as soon as a threshold separates exactly k.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import interpreting
from sparda_jax.pallas_kernels.block_selection.prefill_bits import (
    WORD,
    bits_below,
    num_words,
)
from sparda_jax.pallas_kernels.block_selection.prefill_reference import BLOCK
from sparda_jax.pallas_kernels.block_selection.top_words import top_words


def top_bits(
    scores: Float[Array, "batch kv_heads parts rows blocks"],
    start: Int[Array, "batch"],
    num_new: Int[Array, "batch"],
    offset: Int[Array, "1"],
    *,
    init_blocks: int,
    local_blocks: int,
    num_selected: int,
    num_warps: int = 1,
) -> Int[Array, "batch kv_heads rows words"]:
    """The chosen blocks of the tokens from ``offset`` on, as int32 words of bits; ties go to the lowest id.

    Args:
        scores: one part, or two of which the second holds, one place further, what also counts for a block.
    """
    batch, kv_heads, parts, rows, blocks = scores.shape
    words = num_words(blocks)
    free = num_selected - init_blocks - local_blocks - 1
    widest = max(pl.next_power_of_2(blocks), WORD)

    def kernel(scores_ref, start_ref, num_new_ref, offset_ref, bits_ref):
        row, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        token = offset_ref[0] + row
        query_block = jnp.minimum(lax.div(start_ref[b] + token, BLOCK), blocks - 1)
        query_block = jnp.where(token < num_new_ref[b], query_block, -1)
        word = jnp.arange(pl.next_power_of_2(words))

        def forced(word: Array) -> Array:
            return bits_below(jnp.int32(init_blocks), word) | ~bits_below(query_block - local_blocks, word)

        def choose(width: int) -> None:
            """For a token in one of the first ``width`` blocks."""
            ids, narrow = jnp.arange(width), jnp.arange(width // WORD)
            competes = (ids >= init_blocks) & (ids < query_block - local_blocks)
            score = plgpu.load(scores_ref.at[b, h, 0, row, ids], mask=competes, other=-jnp.inf)
            if parts == 2:
                after = plgpu.load(scores_ref.at[b, h, 1, row, ids + 1], mask=competes, other=-jnp.inf)
                score = jnp.maximum(score, after)
            chosen = top_words(score, competes, free)
            chosen = (chosen | forced(narrow)) & bits_below(query_block + 1, narrow)
            plgpu.store(bits_ref.at[b, h, row, narrow], chosen, mask=narrow < words)
            if width < widest:
                plgpu.store(
                    bits_ref.at[b, h, row, word], jnp.zeros_like(word), mask=(word >= width // WORD) & (word < words)
                )

        @pl.when((query_block < num_selected) | (free == 0))
        def _():
            chosen = bits_below(query_block + 1, word)
            if not free:
                chosen = jnp.where(query_block < num_selected, chosen, chosen & forced(word))
            plgpu.store(bits_ref.at[b, h, row, word], chosen, mask=word < words)

        width = max(WORD, min(widest, 256))
        below = num_selected
        while free and below < blocks:
            pl.when((query_block >= below) & (query_block < width))(lambda width=width: choose(width))
            below, width = max(width, below), 2 * width

    return pl.pallas_call(
        kernel,
        name="prefill_top_bits",
        grid=(rows, kv_heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, rows, words), jnp.int32),
        interpret=interpreting(),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
    )(scores, start, num_new, offset)
