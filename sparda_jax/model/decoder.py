"""The decoder: embeddings, pre-norm layers with muP-style scales, logits (docs/semantics.md section 1.2)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from sparda_jax.config import ModelConfig
from sparda_jax.model.attention import ForecastAttention, Projections
from sparda_jax.model.layers import MLP, Linear, RMSNorm, matmul, scale

Attend = Callable[[Projections], Float[Array, "batch q_len heads head_dim"]]


class DecoderLayer(nnx.Module):
    """One layer. How it attends (over a cache, sparsely, in training) is the caller's function ``attend``."""

    def __init__(self, config: ModelConfig, layer: int, has_forecast: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.residual_scale = config.residual_scale
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = ForecastAttention(config, layer, has_forecast, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def project(
        self,
        x: Float[Array, "batch q_len hidden"],
        cos: Float[Array, "batch q_len half"],
        sin: Float[Array, "batch q_len half"],
    ) -> Projections:
        """What the layer computes before it attends."""
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def finish(
        self, x: Float[Array, "batch q_len hidden"], attended: Float[Array, "batch q_len heads head_dim"]
    ) -> Float[Array, "batch q_len hidden"]:
        """The residual stream after the layer, from the one before it and what its heads attended to."""
        x = x + scale(self.self_attn.output(attended), self.residual_scale)
        return x + scale(self.mlp(self.post_attention_layernorm(x)), self.residual_scale)

    def __call__(
        self,
        x: Float[Array, "batch q_len hidden"],
        cos: Float[Array, "batch q_len half"],
        sin: Float[Array, "batch q_len half"],
        attend: Attend,
    ) -> Float[Array, "batch q_len hidden"]:
        return self.finish(x, attend(self.project(x, cos, sin)))


class Decoder(nnx.Module):
    """A MiniCPM4.1-style model.

    Args:
        config: sizes and scales.
        has_forecast: every layer carries ``q_future`` (and layer 0 ``q_curr``); the last layer's is stored but unused.
        dtype: of the weights and activations, bfloat16 or float32.
        rngs: source of the fresh weights.
    """

    def __init__(self, config: ModelConfig, *, has_forecast: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config, self.has_forecast = config, has_forecast
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32)
        self.embed_tokens = nnx.Param((table * config.initializer_range).astype(dtype))
        self.layers = nnx.List(
            [DecoderLayer(config, layer, has_forecast, dtype, rngs) for layer in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, config.initializer_range, dtype, rngs)

    def embed(self, tokens: Int[Array, "batch q_len"]) -> Float[Array, "batch q_len hidden"]:
        return scale(self.embed_tokens[...][tokens], self.config.embedding_scale)

    def logits(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows vocab"]:
        """float32 logits of the residual stream after the last layer, rounded to its dtype before (section 1.2)."""
        x = scale(self.norm(x), 1 / self.config.logit_divisor)
        if self.config.tie_word_embeddings:
            return matmul(x, self.embed_tokens[...].astype(x.dtype).T).astype(jnp.float32)
        return self.lm_head(x).astype(jnp.float32)


def abstract_decoder(config: ModelConfig, *, has_forecast: bool, dtype: jnp.dtype) -> Decoder:
    """The model's structure with shapes in place of weights; nothing is allocated."""
    return nnx.eval_shape(lambda: Decoder(config, has_forecast=has_forecast, dtype=dtype, rngs=nnx.Rngs(0)))
