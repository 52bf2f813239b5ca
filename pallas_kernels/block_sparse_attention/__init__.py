"""Attention of a prefill chunk over the blocks that each token selected."""

from sparda_jax.pallas_kernels.block_sparse_attention.prefill import block_sparse_attention_prefill, has_kernels

__all__ = ["block_sparse_attention_prefill", "has_kernels"]
