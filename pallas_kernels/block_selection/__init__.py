"""Block selection: score compressed keys, pool to 64-token blocks, force init and local blocks, take the top-k."""

from sparda_jax.pallas_kernels.block_selection.decode import select_blocks_decode, select_blocks_with_scratch
from sparda_jax.pallas_kernels.block_selection.reference import (
    Scorer,
    block_mask,
    forecast_scores,
    infllm_scores,
    pool_to_blocks,
    select_blocks,
)

__all__ = [
    "Scorer",
    "block_mask",
    "forecast_scores",
    "infllm_scores",
    "pool_to_blocks",
    "select_blocks",
    "select_blocks_decode",
    "select_blocks_with_scratch",
]
