"""Rotary position tables, half-split pairing (docs/semantics.md 1.3, 1.4; yarn, linear, dynamic as in Hugging Face).

The phases are float32 by definition: inverse frequencies, and their product with the position, are rounded to
float32. Their cosine and sine are then taken in float64.
"""

import math
from typing import Any

import numpy as np


def head_dim(config: dict[str, Any]) -> int:
    """`head_dim`, or hidden size over heads where config.json has no such field."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rope_type(config: dict[str, Any]) -> str:
    """default, linear, dynamic, longrope or yarn."""
    scaling = config.get("rope_scaling") or {}
    return scaling.get("rope_type", scaling.get("type", "default"))


def _yarn(config: dict[str, Any], freqs: np.ndarray) -> tuple[np.ndarray, float]:
    scaling = config["rope_scaling"]
    dim, theta = head_dim(config), float(config.get("rope_theta", 10000.0))
    original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = scaling.get("factor") or config["max_position_embeddings"] / original

    def dim_of(rotations: float) -> float:
        """The channel that turns `rotations` times over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    inv_freq = interpolated / (factor * freqs) + (1.0 - interpolated) / freqs

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        all_dim = scaling.get("mscale_all_dim")
        both = scaling.get("mscale") and all_dim
        attention_factor = mscale(scaling["mscale"]) / mscale(all_dim) if both else mscale(1.0)
    return inv_freq, attention_factor


def tables(
    config: dict[str, Any], positions: np.ndarray, table_len: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float64 [T, head_dim / 2], for integer `positions [T]`.

    `table_len` (tokens) decides between short and long factors (longrope) and scales the base (dynamic); None means
    `max_position_embeddings`.
    """
    dim, theta = head_dim(config), float(config.get("rope_theta", 10000.0))
    scaling, kind = config.get("rope_scaling") or {}, rope_type(config)
    limit = config["max_position_embeddings"]
    table_len = limit if table_len is None else table_len
    exponent = np.arange(0, dim, 2) / dim
    t = np.asarray(positions).astype(np.float32)
    scale = 1.0
    if kind == "dynamic":
        growth = scaling["factor"] * max(table_len, limit) / limit - (scaling["factor"] - 1)
        theta *= growth ** (dim / (dim - 2))
    inv_freq = (1.0 / theta**exponent).astype(np.float32)
    if kind == "linear":
        inv_freq = (inv_freq / np.float32(scaling["factor"])).astype(np.float32)
    elif kind == "yarn":
        yarn_freq, scale = _yarn(config, theta**exponent)
        inv_freq = yarn_freq.astype(np.float32)
    elif kind not in ("default", "dynamic", "longrope"):
        raise ValueError(f"rope_scaling type is {kind!r}; known: default, linear, dynamic, longrope, yarn")
    if kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        factors = scaling["long_factor" if table_len > original else "short_factor"]
        ext = np.asarray(factors, np.float32)
        phase = (t[:, None] * (np.float32(1.0) / ext)) * inv_freq
        scale = math.sqrt(1 + math.log(limit / original) / math.log(original))
    else:
        phase = t[:, None] * inv_freq
    phase = phase.astype(np.float64)
    return scale * np.cos(phase), scale * np.sin(phase)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """`x [T, heads, D]` turned by the tables [T, D/2]; channel i is paired with i + D/2. Same shape and dtype as x."""
    low, high = np.split(x, 2, axis=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return np.concatenate([low * c - high * s, high * c + low * s], axis=-1).astype(x.dtype)
