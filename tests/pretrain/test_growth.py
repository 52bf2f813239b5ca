"""A grown model computes what it was grown from, and what was added to it can learn."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.model import Decoder
from sparda_jax.pretrain.growth import deeper, grow
from sparda_jax.pretrain.recipe import hf_config
from sparda_jax.pretrain.trainer import forward_logits
from sparda_jax.selection import Mode

LENGTH = 1024


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    found: dict[str, Any] = {**hf_config(128, 1, [2]), **small}
    return found | {"sparse_config": found["sparse_config"] | {"window_size": 64, "topk": 5}}


@pytest.fixture(scope="module")
def pair(description: dict[str, Any]) -> tuple[Decoder, Decoder]:
    """A model whose norms do something, and the grown one."""
    config = ModelConfig.from_hf(description)
    model = Decoder(config, has_forecast=True, dtype=jnp.float32, rngs=nnx.Rngs(3))
    for i, layer in enumerate(model.layers):
        weight = jax.random.uniform(jax.random.key(i), (config.hidden_size,), minval=0.5, maxval=1.5)
        layer.input_layernorm.weight[...] = weight
    return model, grow(model, ModelConfig.from_hf(deeper(description, 4)))


@pytest.mark.parametrize("mode", [Mode.DENSE, Mode.SPARSE, Mode.SPARDA])
def test_a_grown_model_computes_the_same(pair: tuple[Decoder, Decoder], mode: Mode) -> None:
    tokens = jax.random.randint(jax.random.key(0), (1, LENGTH), 0, 128)
    before, after = (jax.jit(forward_logits, static_argnums=2)(model, tokens, mode) for model in pair)
    np.testing.assert_allclose(after, before, atol=2e-5)
    assert len(pair[1].layers) == 2 * len(pair[0].layers)


def test_new_layers_are_the_last_ones_over_again(pair: tuple[Decoder, Decoder]) -> None:
    model, grown = pair
    heads = (model.config.num_heads + 2 * model.config.num_kv_heads) * model.config.head_dim
    for old, new in ((0, 2), (1, 3)):
        was, now = (m.layers[i].self_attn.qkvf_proj.kernel[:, :heads] for m, i in ((model, old), (grown, new)))
        np.testing.assert_array_equal(was, now)
        assert not grown.layers[new].self_attn.o_proj.kernel[...].any()
        assert not grown.layers[new].mlp.down_proj.kernel[...].any()


def test_the_forecast_of_a_new_layer_is_its_averaged_queries(pair: tuple[Decoder, Decoder]) -> None:
    """Exactly so where the layer in between adds nothing."""
    grown, config = pair[1], pair[1].config
    x = jax.random.normal(jax.random.key(1), (1, 8, config.hidden_size))
    cos, sin = jnp.ones((1, 8, config.head_dim // 2)), jnp.zeros((1, 8, config.head_dim // 2))
    seen, wanted = (grown.layers[i].project(x, cos, sin) for i in (2, 3))
    assert seen.q_future is not None
    averaged = wanted.q.reshape(1, 8, config.num_kv_heads, -1, config.head_dim).mean(axis=3)
    np.testing.assert_allclose(seen.q_future, averaged, atol=1e-5)


def test_every_new_layer_gets_a_gradient(pair: tuple[Decoder, Decoder]) -> None:
    graphdef, params = nnx.split(pair[1])
    tokens = jax.random.randint(jax.random.key(2), (1, 256), 0, 128)

    def loss(params: nnx.State) -> jax.Array:
        return forward_logits(nnx.merge(graphdef, params), tokens, Mode.DENSE)[:, :, 0].sum()

    layers = nnx.merge(graphdef, jax.jit(jax.grad(loss))(params)).layers
    for layer in (2, 3):
        assert jnp.abs(layers[layer].self_attn.o_proj.kernel[...]).max() > 0
        assert jnp.abs(layers[layer].mlp.down_proj.kernel[...]).max() > 0


def test_what_can_not_be_grown_is_told(description: dict[str, Any]) -> None:
    for layers in (2, 5):
        with pytest.raises(ConfigError, match=f"num_layers={layers} can't be grown from 2: give 3 to 4"):
            deeper(description, layers)
    scales = [ModelConfig.from_hf(d).residual_scale for d in (description, deeper(description, 3))]
    assert scales[1] == pytest.approx(scales[0], rel=1e-12)
