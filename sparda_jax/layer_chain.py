"""The residual stream from one layer's attention to the next, by the layers' modules or by one kernel.

The kernel (`pallas_kernels.between_attentions`) keeps the stream feature by feature, so it is turned round once at the
beginning of a step and once at its end.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sparda_jax.model import Decoder, Projections
from sparda_jax.pallas_kernels.backend import Backend
from sparda_jax.pallas_kernels.between_attentions import (
    LayerWeights,
    between_attentions,
    between_backend,
    from_features,
    padded_rows,
    to_features,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerChain:
    """Where a decode step is: about to attend in a layer.

    Attributes:
        model: the weights.
        cos, sin: RoPE's tables of the lanes' positions.
        by_feature: the same feature by feature, where the kernel runs what lies between two attentions; else None.
        index: of the layer.
        projections: of the layer; None behind the last one.
        stream: the residual stream before the layer; feature by feature with ``by_feature``.
    """

    model: Decoder
    cos: Float[Array, "batch 1 half"]
    sin: Float[Array, "batch 1 half"]
    by_feature: tuple[Float[Array, "half rows"], Float[Array, "half rows"]] | None
    index: int
    projections: Projections | None
    stream: Float[Array, "..."]

    @classmethod
    def begin(
        cls,
        model: Decoder,
        x: Float[Array, "batch 1 hidden"],
        cos: Float[Array, "batch 1 half"],
        sin: Float[Array, "batch 1 half"],
        *,
        needs_normed: bool,
        backend: str | None,
    ) -> "LayerChain":
        """At the first layer.

        Args:
            needs_normed: the layers' normed inputs are wanted (InfiniGen), which the kernel keeps to itself.
            backend: of `between_attentions`; None: the kernel where it is the fastest.
        """
        batch = x.shape[0]
        fused = not needs_normed and model.has_forecast and x.dtype == jnp.bfloat16
        if fused:
            weights = _weights(model, 0)
            fused = between_backend(weights, batch, _heads(model), backend) is not Backend.REFERENCE
        stream, by_feature = x, None
        if fused:
            by_feature = to_features(cos[:, 0]), to_features(sin[:, 0])
            # At once: made where the kernel wants them, they get the place of something that the first fetch reads.
            x, stream, by_feature = jax.lax.optimization_barrier((x, to_features(x[:, 0]), by_feature))
        projections = model.layers[0].project(x, cos, sin)
        return cls(
            model=model, cos=cos, sin=sin, by_feature=by_feature, index=0, projections=projections, stream=stream
        )

    @property
    def attended_lanes(self) -> int:
        """How many lanes the attention's output must have; what lies in those beyond the batch means nothing."""
        batch = self.cos.shape[0]
        return padded_rows(batch) if self.by_feature else batch

    def after(self, attended: Float[Array, "lanes kv_heads group head_dim"]) -> "LayerChain":
        """At the next layer, from what the heads of this one attended to."""
        model, following = self.model, self.index + 1
        is_last = following == model.config.num_layers
        if self.by_feature:
            batch = self.cos.shape[0]
            stream, qkvf = between_attentions(
                attended.reshape(attended.shape[0], -1),
                self.stream,
                _weights(model, self.index),
                *self.by_feature,
                batch=batch,
                heads=_heads(model),
                eps=model.config.rms_norm_eps,
                residual_scale=model.config.residual_scale,
                backend=Backend.MOSAIC_GPU,
            )
            projections = None if is_last else _projections(*(x[:, None] for x in qkvf))
        else:
            config = model.config
            heads = attended.reshape(attended.shape[0], 1, config.num_heads, config.head_dim)
            stream = model.layers[self.index].finish(self.stream, heads)
            projections = None if is_last else model.layers[following].project(stream, self.cos, self.sin)
        return dataclasses.replace(self, index=following, projections=projections, stream=stream)

    def residual(self) -> Float[Array, "batch hidden"]:
        """The stream, lane by lane."""
        return from_features(self.stream, self.cos.shape[0]) if self.by_feature else self.stream[:, 0]


def _projections(q: Array, k: Array, v: Array, q_future: Array) -> Projections:
    return Projections(normed=None, q=q, k=k, v=v, q_future=q_future, q_curr=None)


def _heads(model: Decoder) -> tuple[int, int, int, int]:
    config = model.config
    return config.num_heads, config.num_kv_heads, config.num_kv_heads, config.num_kv_heads


def _weights(model: Decoder, index: int) -> LayerWeights:
    layer = model.layers[index]
    following = model.layers[index + 1] if index + 1 < model.config.num_layers else None
    return LayerWeights(
        output=layer.self_attn.o_proj.kernel[...],
        mlp_norm=layer.post_attention_layernorm.weight[...],
        gate_up=layer.mlp.gate_up_proj.kernel[...],
        down=layer.mlp.down_proj.kernel[...],
        attention_norm=None if following is None else following.input_layernorm.weight[...],
        qkvf=None if following is None else following.self_attn.qkvf_proj.kernel[...],
    )
