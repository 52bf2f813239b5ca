"""Rotary position embedding: default, linear, dynamic NTK, LongRoPE and YaRN (docs/semantics.md sections 1.3, 1.4).

Phases are float32 whatever the activations are: bfloat16 phases would be wrong by radians at far positions.
One factor set holds for a whole server, chosen from its maximum length, so that cached keys always match.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sparda_jax.config import ModelConfig, RopeConfig


def rope_frequencies(config: ModelConfig, max_len: int | None = None) -> tuple[np.ndarray, np.ndarray, float]:
    """The constants of the rotation: phase(t, i) = (t * position_scale[i]) * inv_freq[i], cos and sin times ``scale``.

    Args:
        config: the model.
        max_len: longest sequence that will be served, in tokens; picks LongRoPE's factor list and the base of dynamic
            NTK. None: ``max_position_embeddings``.

    Returns:
        ``position_scale`` and ``inv_freq``, float32 ``[head_dim / 2]``, and ``scale``.
    """
    rope, half = config.rope, config.head_dim // 2
    trained = config.max_position_embeddings
    max_len = max_len or trained
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    theta, ones = rope.theta, np.ones(half, np.float32)
    if rope.rope_type == "dynamic" and max_len > trained:
        ratio = rope.factor * max_len / trained - (rope.factor - 1)
        theta = theta * ratio ** (config.head_dim / (config.head_dim - 2))
    inv_freq = (1.0 / np.float32(theta) ** exponent).astype(np.float32)
    if rope.rope_type == "linear":
        return np.full(half, 1 / rope.factor, np.float32), inv_freq, 1.0
    if rope.rope_type == "longrope":
        original = rope.original_max_position_embeddings or trained
        factors = rope.long_factor if max_len > original else rope.short_factor
        stretch = trained / original
        scale = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        return np.float32(1) / np.asarray(factors, np.float32), inv_freq, scale
    if rope.rope_type == "yarn":
        return ones, _yarn_frequencies(rope, config.head_dim, inv_freq), _yarn_scale(rope)
    return ones, inv_freq, 1.0


def _yarn_scale(rope: RopeConfig) -> float:
    return rope.attention_factor or (0.1 * math.log(rope.factor) + 1.0)


def _yarn_frequencies(rope: RopeConfig, head_dim: int, inv_freq: np.ndarray) -> np.ndarray:
    """Interpolates slow rotations by ``factor``, keeps fast ones, blends in between (YaRN, arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        length = rope.original_max_position_embeddings or 1
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    interpolated = np.clip(ramp, 0, 1)
    return (inv_freq / rope.factor * interpolated + inv_freq * (1 - interpolated)).astype(np.float32)


def rope_tables(
    config: ModelConfig, positions: Int[Array, "batch q_len"], max_len: int | None = None
) -> tuple[Float[Array, "batch q_len half"], Float[Array, "batch q_len half"]]:
    """cos and sin of every position, float32; ``max_len`` as in :func:`rope_frequencies`."""
    position_scale, inv_freq, scale = rope_frequencies(config, max_len)
    phase = (positions[..., None].astype(jnp.float32) * position_scale) * inv_freq
    return jnp.cos(phase) * scale, jnp.sin(phase) * scale


def apply_rope(
    x: Float[Array, "batch q_len heads head_dim"],
    cos: Float[Array, "batch q_len half"],
    sin: Float[Array, "batch q_len half"],
) -> Float[Array, "batch q_len heads head_dim"]:
    """Rotates the pairs (i, i + head_dim / 2) in float32 and rounds once, to the dtype of ``x``."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
