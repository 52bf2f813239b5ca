"""A deeper model out of a trained one, which computes what the trained one computes.

The new layers stand behind the old ones and are copies of the last of these, but what they add to the stream is zero at
first. A layer in front of the old ones, or between them, would take the Forecast of the layer before it from the layer
that it was trained for; and what the old last layer retrieves can only be looked up once more, or spelt with more care,
behind it.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.model import Decoder

# What a layer adds to the stream comes out of these.
_OUTPUTS = (("self_attn", "o_proj", "kernel"), ("mlp", "down_proj", "kernel"))


def deeper(description: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """``config.json`` with so many layers, each scaled as before: ``scale_depth / sqrt(num_hidden_layers)`` stays.

    Raises:
        ConfigError: that is not more than there are, or more than twice as many; or the model has other scales.
    """
    before = int(description["num_hidden_layers"])
    if not before < num_layers <= 2 * before:
        raise ConfigError(f"num_layers={num_layers} can't be grown from {before}: give {before + 1} to {2 * before}")
    if "scale_depth" not in description:
        raise ConfigError("scale_depth=None: only models of MiniCPM's scales can be grown")
    scale = float(description["scale_depth"]) * math.sqrt(num_layers / before)
    return {**description, "num_hidden_layers": num_layers, "scale_depth": scale}


def grow(model: Decoder, config: ModelConfig) -> Decoder:
    """A float32 model of ``config.num_layers`` layers with the logits of ``model``, in every mode.

    Args:
        model: float32 weights; they stay as they are.
        config: from `deeper`.
    """
    before, added = model.config.num_layers, config.num_layers - model.config.num_layers
    old: dict[tuple[Any, ...], Any] = dict(nnx.to_flat_state(nnx.state(model)))
    graphdef, state = nnx.split(Decoder(config, has_forecast=model.has_forecast, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    grown: dict[tuple[Any, ...], Any] = {}
    flat: list[tuple[tuple[Any, ...], Any]] = list(nnx.to_flat_state(state))
    for path, leaf in flat:
        if path[0] != "layers" or int(path[1]) < before:
            grown[path] = leaf.replace(jnp.copy(old[path][...]))
            continue
        value = old["layers", int(path[1]) - added, *path[2:]][...]
        # A copy of layer 0 leaves out its ``q_curr``, the last columns.
        value = value[tuple(slice(size) for size in leaf[...].shape)]
        grown[path] = leaf.replace(jnp.zeros_like(value) if path[2:] in _OUTPUTS else jnp.copy(value))
    result = nnx.merge(graphdef, nnx.from_flat_state(grown))
    if model.has_forecast:
        for layer in range(before - 1, config.num_layers - 1):
            _foresee(result, layer)
    return result


def _foresee(model: Decoder, layer: int) -> None:
    """Makes the ``q_future`` of ``layer`` the next layer's queries, averaged over each group, norms exchanged."""
    config = model.config
    seen, wanted = model.layers[layer], model.layers[layer + 1]
    queries = wanted.self_attn.qkvf_proj.kernel[:, : config.num_heads * config.head_dim]
    averaged = queries.reshape(config.hidden_size, config.num_kv_heads, -1, config.head_dim).mean(axis=2)
    exchange = _ratio(wanted.input_layernorm.weight[...], seen.input_layernorm.weight[...])
    start = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    stop = start + config.num_kv_heads * config.head_dim
    kernel = seen.self_attn.qkvf_proj.kernel
    kernel[...] = kernel[...].at[:, start:stop].set(averaged.reshape(config.hidden_size, -1) * exchange[:, None])


def _ratio(wanted: Float[Array, " hidden"], seen: Float[Array, " hidden"]) -> jax.Array:
    # Behind a norm weight of zero there is nothing to see.
    return jnp.where(seen == 0, 0, wanted / jnp.where(seen == 0, 1, seen))
