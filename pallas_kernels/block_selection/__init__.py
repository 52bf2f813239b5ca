"""Block selection: score compressed keys, pool to 64-token blocks, force init and local blocks, take the top-k."""

from sparda_jax.pallas_kernels.block_selection.reference import (
    block_mask,
    forecast_scores,
    infllm_scores,
    pool_to_blocks,
    select_blocks,
)

__all__ = ["block_mask", "forecast_scores", "infllm_scores", "pool_to_blocks", "select_blocks"]
