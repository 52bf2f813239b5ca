"""The attention projections: q, k, v and the Forecast in one matrix (docs/semantics.md section 5)."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparda_jax.config import ModelConfig
from sparda_jax.model.layers import Linear, matmul
from sparda_jax.model.rope import apply_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projections:
    """What one layer computes from its normed input, before it attends.

    Attributes:
        normed: the layer's input after its first norm; None where nothing but the kernel that made it has it.
        q, k: after RoPE; v: unrotated.
        q_future: this layer's Forecast of what layer l + 1 will look for, after RoPE at the token's own position.
            None when the model carries no Forecast.
        q_curr: layer 0's Forecast for itself; None elsewhere.
    """

    normed: Float[Array, "batch q_len hidden"] | None
    q: Float[Array, "batch q_len heads head_dim"]
    k: Float[Array, "batch q_len kv_heads head_dim"]
    v: Float[Array, "batch q_len kv_heads head_dim"]
    q_future: Float[Array, "batch q_len kv_heads head_dim"] | None
    q_curr: Float[Array, "batch q_len kv_heads head_dim"] | None


class ForecastAttention(nnx.Module):
    """Projections in and out of attention; ``qkvf_proj`` has the columns q, k, v, q_future and, in layer 0, q_curr."""

    def __init__(self, config: ModelConfig, layer: int, has_forecast: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config, self.has_forecast = config, has_forecast
        heads = config.num_heads + 2 * config.num_kv_heads
        heads += config.num_forecast_heads(layer) if has_forecast else 0
        std = config.initializer_range
        self.qkvf_proj = Linear(config.hidden_size, heads * config.head_dim, std, dtype, rngs)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, std, dtype, rngs)

    def project(
        self,
        normed: Float[Array, "batch q_len hidden"],
        cos: Float[Array, "batch q_len half"],
        sin: Float[Array, "batch q_len half"],
    ) -> Projections:
        """All projections of a layer; every one but ``v`` rotated."""
        config = self.config
        heads = self.qkvf_proj(normed).reshape(*normed.shape[:2], -1, config.head_dim)
        value_start = config.num_heads + config.num_kv_heads
        forecast_start = value_start + config.num_kv_heads
        rotated = apply_rope(heads[:, :, :value_start], cos, sin)
        q_future = q_curr = None
        if self.has_forecast:
            forecasts = apply_rope(heads[:, :, forecast_start:], cos, sin)
            q_future = forecasts[:, :, : config.num_kv_heads]
            q_curr = forecasts[:, :, config.num_kv_heads :] if forecasts.shape[2] > config.num_kv_heads else None
        return Projections(
            normed=normed,
            q=rotated[:, :, : config.num_heads],
            k=rotated[:, :, config.num_heads :],
            v=heads[:, :, value_start:forecast_start],
            q_future=q_future,
            q_curr=q_curr,
        )

    def project_query(
        self,
        normed: Float[Array, "batch q_len hidden"],
        cos: Float[Array, "batch q_len half"],
        sin: Float[Array, "batch q_len half"],
    ) -> Float[Array, "batch q_len heads head_dim"]:
        """This layer's rotated queries of another layer's input: InfiniGen's guess (docs/semantics.md section 7.3)."""
        columns = self.config.num_heads * self.config.head_dim
        q = matmul(normed, self.qkvf_proj.kernel[:, :columns].astype(normed.dtype))
        return apply_rope(q.reshape(*normed.shape[:2], -1, self.config.head_dim), cos, sin)

    def output(self, o: Float[Array, "batch q_len heads head_dim"]) -> Float[Array, "batch q_len hidden"]:
        return self.o_proj(o.reshape(*o.shape[:2], -1))
