"""Compressed keys: the mean of every complete 32-token window of K, one window each 16 tokens."""

from sparda_jax.pallas_kernels.compressed_keys.reference import compress_windows, num_windows

__all__ = ["compress_windows", "num_windows"]
