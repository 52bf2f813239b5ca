"""Where the oracle rounds: nowhere (exact), or at every point where a bf16 model rounds (docs/semantics.md 1.2)."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How numbers are carried.

    Attributes:
        dtype: the type of all arithmetic. float64 is the definition; float32 is for speed on larger models.
        bf16: round to bfloat16 at the points of section 1.2, as a model whose activations are bf16 does.
        ref_compat: reproduce the reference's quirks Q1, Q2, Q3 and, together with `bf16`, Q11 (section 10).
    """

    dtype: type = np.float64
    bf16: bool = False
    ref_compat: bool = False

    def cast(self, x: np.ndarray) -> np.ndarray:
        """`x` in the arithmetic type, unrounded."""
        return np.asarray(x).astype(self.dtype)

    def round(self, x: np.ndarray) -> np.ndarray:
        """`x` rounded to bfloat16 if activations are bf16, else unchanged; the dtype stays the arithmetic type."""
        return x.astype(ml_dtypes.bfloat16).astype(self.dtype) if self.bf16 else x

    def round_score(self, x: np.ndarray) -> np.ndarray:
        """Selection scores: the reference rounds them to bf16 (Q11), the clean semantics keep full precision."""
        return self.round(x) if self.ref_compat else x


EXACT = Numerics()


def linear(x: np.ndarray, weight: np.ndarray, numerics: Numerics = EXACT) -> np.ndarray:
    """`x [..., in]` times `weight [out, in]` transposed -> [..., out]; one rounding of the result."""
    return numerics.round(x @ weight.T)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, numerics: Numerics = EXACT) -> np.ndarray:
    """RMSNorm over the last axis. In bf16 the normalised value is rounded before and after the weight (section 1.2)."""
    variance = np.mean(np.square(x), axis=-1, keepdims=True)
    normed = numerics.round(x / np.sqrt(variance + eps))
    return numerics.round(normed * weight)


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x), without overflow for large negative x."""
    exp = np.exp(-np.abs(x))
    return x * np.where(x >= 0, 1.0, exp) / (1.0 + exp)
