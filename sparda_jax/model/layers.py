"""RMSNorm, linear maps and the SwiGLU MLP, with the rounding points of docs/semantics.md section 1.2."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparda_jax.config import ModelConfig


def matmul(x: Float[Array, "*rows inner"], kernel: Float[Array, "inner outer"]) -> Float[Array, "*rows outer"]:
    """``x @ kernel``, accumulated in float32 and rounded once to the dtype of ``x`` (no TF32 for float32 weights)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, kernel, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)


def scale(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    """``x * factor`` with an unrounded factor: multiplied in float32, rounded once to the dtype of ``x``."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``: rounded before the product with the weight, and after it."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * inverse).astype(x.dtype) * self.weight[...].astype(x.dtype)


class Linear(nnx.Module):
    """A map without bias; ``kernel`` is ``[inner, outer]``, the transpose of PyTorch's layout."""

    def __init__(self, inner: int, outer: int, std: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param((jax.random.normal(rngs.params(), (inner, outer), jnp.float32) * std).astype(dtype))

    def __call__(self, x: Float[Array, "*rows inner"]) -> Float[Array, "*rows outer"]:
        return matmul(x, self.kernel[...].astype(x.dtype))


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` with gate and up in one matrix, gate first."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        std = config.initializer_range
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, std, dtype, rngs)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, std, dtype, rngs)

    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up)
