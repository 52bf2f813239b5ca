"""Compressed keys: means over sliding windows of post-RoPE keys (docs/semantics.md section 3)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from tests.oracle.numerics import EXACT, Numerics


def num_compressed(length: int, kernel: int = 32, stride: int = 16) -> int:
    """Complete windows in `length` tokens."""
    return 0 if length < kernel else (length - kernel) // stride + 1


def compress_keys(
    k: Float[np.ndarray, "length kv_heads head_dim"], kernel: int = 32, stride: int = 16, numerics: Numerics = EXACT
) -> Float[np.ndarray, "n1 kv_heads head_dim"]:
    """`k [T, Hk, D]` -> [n1, Hk, D], entry j the mean of tokens stride*j .. stride*j + kernel - 1."""
    windows = [k[stride * j : stride * j + kernel] for j in range(num_compressed(len(k), kernel, stride))]
    means = [window.mean(axis=0) for window in windows]
    return numerics.round(np.stack(means)) if means else np.zeros((0, *k.shape[1:]), k.dtype)


@dataclass(frozen=True, kw_only=True)
class RollingKeys:
    """The incremental form (section 3.3): finished means `k1 [n1, Hk, D]` and the `tail` of keys still needed."""

    k1: np.ndarray
    tail: np.ndarray
    kernel: int = 32
    stride: int = 16
    numerics: Numerics = EXACT

    @staticmethod
    def prefill(
        k: Float[np.ndarray, "length kv_heads head_dim"], kernel: int = 32, stride: int = 16, numerics: Numerics = EXACT
    ) -> "RollingKeys":
        """From the keys [T, Hk, D] of a whole prompt."""
        k1 = compress_keys(k, kernel, stride, numerics)
        return RollingKeys(k1=k1, tail=k[stride * len(k1) :], kernel=kernel, stride=stride, numerics=numerics)

    def append(self, k_new: Float[np.ndarray, "kv_heads head_dim"]) -> "RollingKeys":
        """After one more token's key [Hk, D]: the window that it completes is there at once."""
        tail = np.concatenate([self.tail, k_new[None]])
        k1 = self.k1
        if len(tail) >= self.kernel:
            mean = self.numerics.round(tail[: self.kernel].mean(axis=0, keepdims=True))
            k1, tail = np.concatenate([k1, mean]), tail[self.stride :]
        return RollingKeys(k1=k1, tail=tail, kernel=self.kernel, stride=self.stride, numerics=self.numerics)
