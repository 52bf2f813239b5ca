"""The definition of compressed keys in plain jnp (docs/semantics.md section 3)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def num_windows(lengths: Int[Array, "*batch"], kernel_size: int = 32, kernel_stride: int = 16) -> Int[Array, "*batch"]:
    """Complete windows of a sequence of ``lengths`` tokens: 0 below ``kernel_size``."""
    return jnp.maximum((lengths - kernel_size) // kernel_stride + 1, 0)


def compress_windows(
    k: Float[Array, "batch kv_heads capacity head_dim"],
    windows: Int[Array, "batch windows"],
    kernel_size: int = 32,
    kernel_stride: int = 16,
) -> Float[Array, "batch kv_heads windows head_dim"]:
    """``mean(K[stride * j : stride * j + kernel_size])`` for each window j: accumulated in float32, rounded once.

    Args:
        k: keys after RoPE; rows beyond a sequence's length may hold anything.
        windows: window numbers j. A window that reaches past ``capacity`` gives an unspecified value, no error.
    """
    rows = windows[..., None] * kernel_stride + jnp.arange(kernel_size)
    batch, count = windows.shape
    rows = jnp.minimum(rows, k.shape[2] - 1).reshape(batch, 1, count * kernel_size, 1)
    gathered = jnp.take_along_axis(k, rows, axis=2).reshape(batch, k.shape[1], count, kernel_size, k.shape[3])
    return jnp.mean(gathered.astype(jnp.float32), axis=3).astype(k.dtype)
