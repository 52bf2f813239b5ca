"""The choice of blocks for rows that hold several documents, as a Pallas kernel lowered through Triton.

As `triton_prefill_top`: a warp for a query and KV head, and a threshold found by halving an interval of integers.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import interpreting
from sparda_jax.pallas_kernels.block_selection.prefill_bits import (
    WORD,
    bits_below,
    num_words,
)
from sparda_jax.pallas_kernels.block_selection.top_words import top_words


def row_top_bits(
    scores: Float[Array, "batch kv_heads q_len blocks"],
    first: Int[Array, "batch q_len"],
    own: Int[Array, "batch q_len"],
    *,
    init_blocks: int,
    local_blocks: int,
    num_selected: int,
) -> Int[Array, "batch kv_heads q_len words"]:
    """See `choose_blocks`; the words are int32."""
    batch, kv_heads, q_len, blocks = scores.shape
    words = num_words(blocks)
    free = num_selected - init_blocks - local_blocks - 1
    widest = max(pl.next_power_of_2(blocks), WORD)

    def kernel(scores_ref, first_ref, own_ref, bits_ref):
        row, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        begin = first_ref[b, row]
        last = jnp.minimum(own_ref[b, row], blocks - 1)
        after = (last + 1 < blocks).astype(jnp.int32)
        free_begin, free_end = begin + init_blocks, last - local_blocks
        choice = (free_end - free_begin + after > free) & (free_end > free_begin)

        def past(word: Array) -> Array:
            return bits_below(last + 1, word) & ~bits_below(begin, word)

        def choose(width: int) -> None:
            """For a query whose own block and the next are among the first ``width``."""
            ids, narrow = jnp.arange(width), jnp.arange(width // WORD)
            competes = (ids >= free_begin) & (ids < free_end) | (ids == last + 1) & (ids < blocks)
            score = plgpu.load(scores_ref.at[b, h, row, ids], mask=competes, other=-jnp.inf)
            chosen = top_words(score, competes, free)
            forced = bits_below(free_begin, narrow) | ~bits_below(free_end, narrow)
            plgpu.store(bits_ref.at[b, h, row, narrow], (chosen | forced) & past(narrow), mask=narrow < words)
            if width < widest:
                word = jnp.arange(pl.next_power_of_2(words))
                plgpu.store(
                    bits_ref.at[b, h, row, word], jnp.zeros_like(word), mask=(word >= width // WORD) & (word < words)
                )

        @pl.when(~choice)
        def _():
            word = jnp.arange(pl.next_power_of_2(words))
            plgpu.store(bits_ref.at[b, h, row, word], past(word), mask=word < words)

        below, width = 0, max(WORD, min(widest, 256))
        while below < widest:
            # The block after the last one of the row does not exist.
            reach = jnp.minimum(last + 1, widest - 1)
            pl.when(choice & (reach >= below) & (reach < width))(lambda width=width: choose(width))
            below, width = width, 2 * width

    return pl.pallas_call(
        kernel,
        name="row_top_bits",
        grid=(q_len, kv_heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, q_len, words), jnp.int32),
        interpret=interpreting(),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
    )(scores, first, own)
