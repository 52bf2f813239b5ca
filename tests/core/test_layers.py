"""Norm, linear maps, MLP, scales: rounding and factors (docs/semantics.md 1.2, 13.1, 13.4, 13.6)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder, rope_tables
from sparda_jax.model.layers import MLP, Linear, RMSNorm, matmul, scale
from tests import oracle
from tests.core.support import load, tokens, toy

BF16 = oracle.Numerics(bf16=True)
RNG = np.random.default_rng(0)


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def bf16(*shape: int, size: float = 1.0) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape) * size, jnp.bfloat16)


def ulps(found, expected: np.ndarray) -> np.ndarray:
    """Distance in bf16 units in the last place of the expected value, at least 2^-14."""
    return np.abs(f64(found) - expected) / np.maximum(
        2.0 ** np.floor(np.log2(np.abs(expected) + 1e-30)) * 2**-7, 2**-14
    )


@pytest.fixture(scope="module")
def norm() -> RMSNorm:
    module = RMSNorm(128, 1e-6, jnp.bfloat16)
    module.weight = nnx.Param((1 + 0.3 * bf16(128)).astype(jnp.bfloat16))
    return module


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_norm_rounds_twice(norm: RMSNorm, size: float, jitted: bool):
    x = bf16(200, 128, size=size)
    found = (nnx.jit(lambda m, x: m(x)) if jitted else lambda m, x: m(x))(norm, x)
    assert found.dtype == jnp.bfloat16
    weight = f64(norm.weight[...])
    twice = oracle.rms_norm(f64(x), weight, 1e-6, BF16)
    # Where float32 meets a boundary between two bf16 numbers, either is right; elsewhere it is exact.
    exact = oracle.rms_norm(f64(x), np.ones(128), 1e-6)
    low, high = (BF16.round(BF16.round(exact * (1 + e)) * weight) for e in (-(2.0**-21), 2.0**-21))
    assert np.all((f64(found) == low) | (f64(found) == high))
    assert np.mean(f64(found) == twice) > 0.999
    once = BF16.round(oracle.rms_norm(f64(x), weight, 1e-6))
    assert np.mean(twice != once) > 0.1


def test_norm_in_float32_is_exact_to_float32(norm: RMSNorm):
    x = RNG.standard_normal((50, 128))
    found = norm(jnp.asarray(x, jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, oracle.rms_norm(x, f64(norm.weight[...]), 1e-6), rtol=1e-5)


def test_scales_are_not_rounded():
    """0.2474873734 in bf16 is 0.2470703; the factor stays as it is and the product is rounded once."""
    x = bf16(64, 128)
    factor = 1.4 / np.sqrt(32)
    for run in (scale, jax.jit(scale, static_argnums=1)):
        found = run(x, factor)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(f64(found), BF16.round(f64(x) * factor))
    rounded_factor = BF16.round(f64(x) * float(jnp.bfloat16(factor)))
    assert np.mean(f64(scale(x, factor)) != rounded_factor) > 0.1


def test_linear_rounds_once():
    linear = Linear(128, 96, 0.1, jnp.bfloat16, nnx.Rngs(0))
    x = bf16(50, 128)
    exact = f64(x) @ f64(linear.kernel[...])
    found = linear(x)
    assert found.dtype == jnp.bfloat16
    # Only sums that land beside a boundary between two numbers may differ.
    assert np.mean(f64(found) == BF16.round(exact)) > 0.99
    assert ulps(found, exact).max() < 0.52
    assert matmul(jnp.asarray(x, jnp.float32), jnp.ones((128, 2), jnp.float32)).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mlp(dtype):
    config = oracle.toy_config()
    mlp = MLP(ModelConfig.from_hf(config | {"initializer_range": 0.3}), dtype, nnx.Rngs(1))
    x = jnp.asarray(bf16(40, 128), dtype)
    numerics = BF16 if dtype == jnp.bfloat16 else oracle.EXACT
    gate_w, up_w = np.split(f64(mlp.gate_up_proj.kernel[...]), 2, axis=1)
    gate, up = numerics.round(f64(x) @ gate_w), numerics.round(f64(x) @ up_w)
    product = numerics.round(numerics.round(oracle.silu(gate)) * up)
    expected = product @ f64(mlp.down_proj.kernel[...])
    found = mlp(x)
    assert found.dtype == dtype
    atol = np.abs(expected).max() * (2e-6 if dtype == jnp.float32 else 2**-8)
    np.testing.assert_allclose(f64(found), expected, rtol=0, atol=atol)
    if dtype == jnp.bfloat16:
        assert np.mean(f64(found) == BF16.round(expected)) > 0.9


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_without_branches_is_its_scales(dtype):
    """Zero attention and MLP: logits = head(norm(12 * embedding) / 2) (docs/semantics.md 13.4)."""
    config = oracle.toy_config(num_hidden_layers=1)
    weights = oracle.toy_weights(config)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"] = np.zeros_like(weights[f"model.layers.0.{name}.weight"])
    model = load(config, weights, dtype).decoder
    ids = jnp.asarray(tokens()[None, :6])
    x = model.embed(ids)
    x = model.layers[0](x, *rope_tables(model.config, jnp.arange(6)[None]), lambda p: jnp.zeros_like(p.q))
    numerics = BF16 if dtype == jnp.bfloat16 else oracle.EXACT
    embedded = numerics.round(12 * f64(weights["model.embed_tokens.weight"])[tokens()[:6]])
    np.testing.assert_array_equal(f64(x)[0], embedded)
    normed = oracle.rms_norm(embedded, f64(weights["model.norm.weight"]), 1e-6, numerics)
    expected = normed / 2 @ f64(weights["lm_head.weight"]).T
    found = model.logits(x)
    assert found.dtype == jnp.float32
    if dtype == jnp.bfloat16:
        # float32 of a bf16 product: the head rounds before the cast.
        np.testing.assert_array_equal(f64(found), BF16.round(f64(found)))
        assert ulps(found[0], expected).max() < 0.52
    else:
        np.testing.assert_allclose(found[0], expected, rtol=0, atol=2e-5)


def test_residual_scale():
    """An attention that hands back a known value is added with scale_depth / sqrt(layers), rounded, then summed."""
    model = toy("base", jnp.bfloat16).decoder
    layer = model.layers[0]
    x = model.embed(jnp.asarray(tokens()[None, :8]))
    out = bf16(1, 8, 8, 16, size=3)
    found = nnx.jit(
        lambda layer, x, out: x + scale(layer.self_attn.output(out), layer.residual_scale)
    )(layer, x, out)  # fmt: skip
    projected = f64(layer.self_attn.output(out))
    expected = BF16.round(f64(x) + BF16.round(projected * 1.4 / np.sqrt(2)))
    np.testing.assert_array_equal(f64(found), expected)
    assert layer.residual_scale == pytest.approx(1.4 / np.sqrt(2), abs=1e-15)


def test_tied_head_is_the_embedding():
    config = oracle.toy_config(num_hidden_layers=1, tie_word_embeddings=True)
    weights = oracle.toy_weights(config)
    tied = load(config, weights).decoder
    untied_weights = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    untied = load(config | {"tie_word_embeddings": False}, untied_weights).decoder
    x = jnp.asarray(RNG.standard_normal((2, 128)), jnp.float32)
    np.testing.assert_array_equal(tied.logits(x), untied.logits(x))
    assert not hasattr(tied, "lm_head")


def test_projections_have_their_columns_in_order():
    """q, k, v, q_future, and in layer 0 q_curr: each the HF tensor's own output; all but v rotated."""
    model = toy()
    n = RNG.standard_normal((1, 5, 128))
    positions = np.array([3, 50, 51, 600, 999])
    cos, sin = rope_tables(model.decoder.config, jnp.asarray(positions)[None])
    tables = oracle.rope.tables(dict(model.config), positions)
    for i, layer in enumerate(model.decoder.layers):
        found = layer.self_attn.project(jnp.asarray(n, jnp.float32), cos, sin)
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "q_future": "q_future_proj", "q_curr": "q_curr_proj"}
        for field, name in names.items():
            value = getattr(found, field)
            if field == "q_curr" and i > 0:
                assert value is None
                continue
            weight = f64(model.weights[f"model.layers.{i}.self_attn.{name}.weight"])
            expected = (n[0] @ weight.T).reshape(5, -1, 16)
            expected = expected if field == "v" else oracle.rope.rotate(expected, *tables)
            np.testing.assert_allclose(value[0], expected, rtol=0, atol=2e-4, err_msg=f"{i} {field}")
        guess = layer.self_attn.project_query(jnp.asarray(n, jnp.float32), cos, sin)
        np.testing.assert_allclose(guess, found.q, rtol=0, atol=1e-5)


def test_fresh_weights_have_the_configured_spread():
    config = ModelConfig.from_hf(oracle.toy_config() | {"initializer_range": 0.1})
    model = Decoder(config, has_forecast=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert np.std(np.asarray(model.embed_tokens[...])) == pytest.approx(0.1, rel=0.05)
    assert np.std(np.asarray(model.layers[1].mlp.down_proj.kernel[...])) == pytest.approx(0.1, rel=0.05)
    assert np.all(np.asarray(model.norm.weight[...]) == 1)
