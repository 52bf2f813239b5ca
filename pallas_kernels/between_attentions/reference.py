"""The definition of the products between two layers' attention in plain jnp, lane by lane as rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def between_attentions(
    attended: Float[Array, "batch attended"],
    x: Float[Array, "batch hidden"],
    *,
    output: Float[Array, "attended hidden"],
    mlp_norm: Float[Array, "hidden"],
    gate_up: Float[Array, "hidden two_intermediate"],
    down: Float[Array, "intermediate hidden"],
    eps: float,
    residual_scale: float,
) -> Float[Array, "batch hidden"]:
    """The residual stream behind a layer, with the rounding points of docs/semantics.md section 1.2."""
    x = x + _scaled(_product(attended, output), residual_scale)
    gate, up = jnp.split(_product(normed(x, mlp_norm, eps), gate_up), 2, axis=-1)
    activated = jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up
    return x + _scaled(_product(activated, down), residual_scale)


def projections(
    x: Float[Array, "batch hidden"],
    norm: Float[Array, "hidden"],
    qkvf: Float[Array, "hidden columns"],
    cos: Float[Array, "batch half"],
    sin: Float[Array, "batch half"],
    *,
    heads: tuple[int, int, int, int],
    eps: float,
) -> tuple[Float[Array, "batch heads head_dim"], ...]:
    """q, k, v and the Forecast of a layer, all but v rotated (docs/semantics.md sections 1.3 and 5)."""
    batch = x.shape[0]
    every = _product(normed(x, norm, eps), qkvf).reshape(batch, sum(heads), -1)
    first, second = jnp.split(every.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    q, k, v, f = heads
    return turned[:, :q], turned[:, q : q + k], every[:, q + k : q + k + v], turned[:, q + k + v : q + k + v + f]


def normed(x: Float[Array, "batch hidden"], weight: Float[Array, "hidden"], eps: float) -> Float[Array, "batch hidden"]:
    """RMSNorm: rounded before the product with the weight, and after it."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype) * weight


def _product(x: Array, kernel: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, kernel, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)


def _scaled(x: Array, factor: float) -> Array:
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
