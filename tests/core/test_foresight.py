"""Forecasts of other designs in the cached forward pass (docs/semantics.md section 11.9)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.cache import KVCache
from sparda_jax.config import ConfigError
from sparda_jax.foresight import ForecastDesign, Foresight
from sparda_jax.forward import Trace, forward
from sparda_jax.generate import Runner
from sparda_jax.model import rope_tables
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from tests.core.support import CAPACITY, PROMPT_WIDTH, tokens, toy

LENGTH = 650


@functools.cache
def own_weights() -> np.ndarray:
    """The Forecast that the model carries, as training keeps it: ``q_curr`` first, the last ``q_future`` left out."""
    model = toy("deep").decoder
    config = model.config
    first = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    size = config.num_kv_heads * config.head_dim
    kernels = [np.asarray(layer.self_attn.qkvf_proj.kernel[...]) for layer in model.layers]
    futures = [kernel[:, first : first + size] for kernel in kernels[:-1]]
    return np.stack([kernels[0][:, first + size :], *futures])


def foresight(weights: np.ndarray, **design: int) -> Foresight:
    return Foresight(weights=jnp.asarray(weights), design=ForecastDesign(**design))


@functools.partial(jax.jit, static_argnames=("graphdef", "mode"))
def _prefill(graphdef, state, cache, ids, count, foresight, *, mode):
    model = nnx.merge(graphdef, state)
    _, _, trace = forward(model, cache, ids, count, jnp.array([True]), mode=mode, decode=False, foresight=foresight)
    return trace


def selections(given: Foresight | None, mode: Mode = Mode.SPARDA) -> list[np.ndarray]:
    """Of every layer, over the prompt."""
    model = toy("deep")
    ids = np.zeros((1, PROMPT_WIDTH), np.int32)
    ids[0, :LENGTH] = tokens()[:LENGTH]
    cache = KVCache.empty(model.decoder.config, 1, CAPACITY, jnp.float32)
    trace: Trace = _prefill(*model.split, cache, ids, jnp.array([LENGTH]), given, mode=mode)
    return [np.asarray(layer)[0, :, :LENGTH] for layer in trace.selected if layer is not None]


def test_the_models_own_weights_select_as_the_model() -> None:
    for found, expected in zip(selections(foresight(own_weights())), selections(None), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_equal_heads_select_as_one() -> None:
    """A softmax keeps the order of its products, but for what underflows; products of a toy are small."""
    config = toy("deep").decoder.config
    heads = own_weights().reshape(3, config.hidden_size, config.num_kv_heads, 1, config.head_dim)
    twice = np.repeat(heads, 2, axis=3).reshape(3, config.hidden_size, -1)
    for found, expected in zip(selections(foresight(twice, heads_per_group=2)), selections(None), strict=True):
        assert (found == expected).mean() > 0.999


def test_a_head_for_each_query_selects_as_the_layer_itself() -> None:
    model = toy("deep").decoder
    columns = model.config.num_heads * model.config.head_dim
    queries = np.stack([np.asarray(layer.self_attn.qkvf_proj.kernel[:, :columns]) for layer in model.layers])
    found = selections(foresight(queries, heads_per_group=model.config.group_size))
    expected = selections(None, Mode.SPARSE)
    np.testing.assert_array_equal(found[0], expected[0])  # layer 0 sees its own input
    assert (found[1] != expected[1]).any()


@pytest.mark.parametrize("lookahead", [1, 2])
def test_queries_are_made_of_an_earlier_input(lookahead: int) -> None:
    config = toy("deep").decoder.config
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.normal(size=(1, 7, config.hidden_size)), jnp.float32) for _ in range(3)]
    weights = rng.normal(size=(3, config.hidden_size, 2 * config.num_kv_heads * config.head_dim)).astype(np.float32)
    given = foresight(weights, heads_per_group=2, lookahead=lookahead)
    cos, sin = rope_tables(config, jnp.arange(3, 10)[None])
    half = config.head_dim // 2
    for layer in range(3):
        found = given.queries(layer, inputs[: layer + 1], cos, sin, config)
        source = np.asarray(inputs[max(0, layer - lookahead)], np.float64)
        heads = (source @ weights[layer]).reshape(1, 7, config.num_kv_heads, 2, config.head_dim)
        c, s = (np.asarray(x)[:, :, None, None] for x in (cos, sin))
        low, high = heads[..., :half], heads[..., half:]
        expected = np.concatenate([low * c - high * s, high * c + low * s], axis=-1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_a_runner_decodes_by_it() -> None:
    """Prefill and decode of the model's own weights, and of others that select otherwise."""
    model = toy("deep").decoder
    params = SamplingParams(max_tokens=4)

    def answer(given: Foresight | None) -> tuple[list[int], list[np.ndarray]]:
        lanes = Runner(model, mode=Mode.SPARDA, max_model_len=CAPACITY, foresight=given).start_batch(
            [tokens()[:LENGTH].tolist()], [params]
        )
        new: list[int] = []
        while len(new) < 4:
            if (step := lanes.advance()) is not None:
                new.append(int(step[0]))
        cache = lanes.take_cache()
        return new, [np.asarray(layer.k) for layer in cache.layers]

    own, expected = answer(foresight(own_weights())), answer(None)
    assert own[0] == expected[0]
    for a, b in zip(own[1], expected[1], strict=True):
        np.testing.assert_array_equal(a, b)
    other = answer(foresight(-own_weights()))
    assert any((a != b).any() for a, b in zip(other[1], expected[1], strict=True))


@pytest.mark.parametrize("field", ["heads_per_group", "lookahead"])
def test_a_design_without_heads_or_layers_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=0"):
        ForecastDesign(**{field: 0})
