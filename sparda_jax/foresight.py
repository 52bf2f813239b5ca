"""Forecasts of other designs than the published one, for experiments: several heads a group, two layers ahead.

A checkpoint's own Forecast is one head a group and one layer ahead, and part of the fused projection. What experiments
exchange for it is an array of weights of its own, of which `Foresight` makes what `Mode.SPARDA` scores blocks with in
contiguous caches. Decode lanes and the server know nothing of it.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.model.layers import matmul
from sparda_jax.model.rope import apply_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForecastDesign:
    """What a Forecast is.

    Attributes:
        heads_per_group: queries that it makes for each KV head. With one, blocks are ranked by its raw products with
            the compressed keys; with more, by the sum of their softmaxes, as InfLLM-V2 ranks by a layer's own queries.
        lookahead: layer l is selected for with the normed input of layer ``max(l - lookahead, 0)``.
    """

    heads_per_group: int = 1
    lookahead: int = 1

    def __post_init__(self) -> None:
        for name in ("heads_per_group", "lookahead"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not supported: it must be at least 1")

    def source(self, layer: int) -> int:
        """The layer whose normed input the Forecast for ``layer`` sees."""
        return max(layer - self.lookahead, 0)

    def outputs(self, config: ModelConfig) -> int:
        """Columns of a layer's weights: all heads of all KV heads, a KV head's side by side."""
        return config.num_kv_heads * self.heads_per_group * config.head_dim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Foresight:
    """A Forecast in place of the model's own.

    Attributes:
        weights: entry l is what layer l is selected with, in the model's dtype.
        design: see there.
    """

    weights: Float[Array, "layers hidden outputs"]
    design: ForecastDesign = dataclasses.field(metadata={"static": True})

    def queries(
        self,
        layer: int,
        inputs: Sequence[Float[Array, "batch q_len hidden"] | None],
        cos: Float[Array, "batch q_len half"],
        sin: Float[Array, "batch q_len half"],
        config: ModelConfig,
    ) -> Float[Array, "batch q_len kv_heads heads head_dim"]:
        """What the blocks of ``layer`` are scored with.

        Args:
            inputs: the normed inputs of layers 0 .. ``layer``.
            cos, sin: the rotation at the tokens' own positions.
        """
        normed = inputs[self.design.source(layer)]
        assert normed is not None  # only decode's kernel between two layers keeps it to itself
        heads = matmul(normed, self.weights[layer]).reshape(*normed.shape[:2], -1, config.head_dim)
        heads = apply_rope(heads, cos, sin)
        return heads.reshape(*normed.shape[:2], config.num_kv_heads, -1, config.head_dim)
