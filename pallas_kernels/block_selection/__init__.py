"""Block selection: score compressed keys, pool to 64-token blocks, force init and local blocks, take the top-k."""

from sparda_jax.pallas_kernels.block_selection.decode import select_blocks_decode, select_blocks_with_scratch
from sparda_jax.pallas_kernels.block_selection.prefill import select_blocks_prefill
from sparda_jax.pallas_kernels.block_selection.prefill_bits import bits_to_ids, bits_to_mask, mask_to_bits, num_words
from sparda_jax.pallas_kernels.block_selection.reference import (
    Scorer,
    block_mask,
    forecast_scores,
    infllm_scores,
    pool_to_blocks,
    select_blocks,
)
from sparda_jax.pallas_kernels.block_selection.rows import choose_blocks

__all__ = [
    "Scorer",
    "bits_to_ids",
    "bits_to_mask",
    "block_mask",
    "choose_blocks",
    "forecast_scores",
    "infllm_scores",
    "mask_to_bits",
    "num_words",
    "pool_to_blocks",
    "select_blocks",
    "select_blocks_decode",
    "select_blocks_prefill",
    "select_blocks_with_scratch",
]
