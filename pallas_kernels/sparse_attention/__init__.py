"""Attention over selected blocks: a mask per (token, KV head) in prefill, a list per KV head in decode."""

from sparda_jax.pallas_kernels.sparse_attention.decode import sparse_attention_decode
from sparda_jax.pallas_kernels.sparse_attention.reference import list_attention, masked_attention

__all__ = ["list_attention", "masked_attention", "sparse_attention_decode"]
