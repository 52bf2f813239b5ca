"""Who uses which Forecast, and what its score is (docs/semantics.md 5, 13.26 - 13.34)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda_jax.config import ConfigError
from sparda_jax.generate import Runner
from sparda_jax.pallas_kernels.block_selection import forecast_scores, pool_to_blocks, select_blocks
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode, visible_windows
from tests import oracle
from tests.core.support import Output, Session, Toy, load, tokens, toy, whole

LENGTH = 650
ATTENTION = "model.layers.{}.self_attn."
CURR, FUTURE = ATTENTION + "q_curr_proj.weight", ATTENTION + "q_future_proj.weight"


@functools.cache
def original() -> dict[str, np.ndarray]:
    return dict(toy("deep").weights)


def run(weights: dict[str, np.ndarray], mode: Mode = Mode.SPARDA) -> Output:
    """The 3-layer model with these weights: same shapes, so no further program is compiled."""
    return Session(load(toy("deep").config, weights), mode).feed([tokens()[:LENGTH]])[0]


@functools.cache
def base(mode: Mode = Mode.SPARDA) -> Output:
    return run(original(), mode)


def other(weights: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    values = np.random.default_rng(1).standard_normal(weights[name].shape)
    return weights | {name: values.astype(weights[name].dtype)}


@functools.cache
def without_branches() -> dict[str, np.ndarray]:
    """What a layer reads leaves no trace in the residual stream, so that a selection cannot change a later one."""
    weights = dict(original())
    for layer in range(3):
        name = ATTENTION.format(layer) + "o_proj.weight"
        weights[name] = np.zeros_like(weights[name])
    return weights


@pytest.mark.parametrize(
    ("name", "seen_in"),
    [
        (CURR.format(0), [True, False, False]),
        (FUTURE.format(0), [False, True, False]),
        (FUTURE.format(1), [False, False, True]),
        (FUTURE.format(2), [False, False, False]),
    ],
)
def test_a_forecast_goes_to_the_next_layer_only(name: str, seen_in: list[bool]):
    before, found = run(without_branches()), run(other(without_branches(), name))
    for a, b, seen in zip(before.selected, found.selected, seen_in, strict=True):
        assert a is not None
        assert b is not None
        assert np.any(a != b) == seen


def test_the_last_forecast_changes_nothing():
    changed = run(other(original(), FUTURE.format(2)))
    np.testing.assert_array_equal(changed.logits, base().logits)
    used = run(other(original(), FUTURE.format(1)))
    assert np.abs(used.logits - base().logits).max() > 0.1


def test_three_layers_choose_as_the_oracle():
    expected = oracle.forward(original(), toy("deep").config, tokens()[:LENGTH], "sparda")
    np.testing.assert_allclose(base().logits, expected.logits, rtol=0, atol=1e-4)
    for found, ids in zip(base().selected, expected.selections, strict=True):
        np.testing.assert_array_equal(found, ids)


def test_the_baseline_does_not_look_at_a_forecast():
    weights = original()
    for name in (CURR.format(0), FUTURE.format(0), FUTURE.format(1)):
        weights = other(weights, name)
    np.testing.assert_array_equal(run(weights, Mode.SPARSE).logits, base(Mode.SPARSE).logits)


@pytest.mark.parametrize("factor", [2.0**-6, 3.0, 2.0**10])
def test_its_size_does_not_matter(factor: float):
    """No softmax, no scale: a larger Forecast chooses the same (docs/semantics.md 13.26)."""
    weights = {n: w.astype(np.float32) for n, w in original().items()}
    for name in (CURR.format(0), FUTURE.format(0), FUTURE.format(1)):
        weights[name] = weights[name] * np.float32(factor)
    found = run(weights)
    for a, b in zip(found.selected, base().selected, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(found.logits, base().logits, rtol=0, atol=0 if np.log2(factor) % 1 == 0 else 1e-5)


@functools.cache
def one_head_per_group() -> Toy:
    """A query head of its own for each KV head, and Forecasts that are the next layer's own queries in layer 0."""
    config = oracle.toy_config(num_attention_heads=2, num_hidden_layers=1, head_dim=16)
    weights = oracle.toy_weights(config)
    weights[CURR.format(0)] = weights[ATTENTION.format(0) + "q_proj.weight"]
    return load(config, weights)


def test_a_forecast_equal_to_the_query_chooses_like_it():
    """RoPE at its own position included: with one head softmax keeps the order of the dot products (section 13.31)."""
    by_forecast, by_query = (
        Session(one_head_per_group(), mode).feed([tokens()[:LENGTH]])[0] for mode in (Mode.SPARDA, Mode.SPARSE)
    )
    np.testing.assert_array_equal(by_forecast.selected[0], by_query.selected[0])
    np.testing.assert_allclose(by_forecast.logits, by_query.logits, rtol=0, atol=1e-5)


def test_no_compressed_key_no_difference():
    """Up to 31 tokens there is nothing to score: all modes read block 0 (docs/semantics.md 13.34)."""
    found = whole(Mode.SPARDA, 31)
    for ids in found.selected:
        assert ids is not None
        assert np.all(ids[..., 0] == 0)
        assert np.all(ids[..., 1:] == -1)
    np.testing.assert_allclose(found.logits, whole(Mode.SPARSE, 31).logits, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.logits, whole(Mode.DENSE, 31).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", [Mode.SPARDA, Mode.SPARDA_DECODE_ONLY])
def test_a_model_without_forecast_is_refused_by_name(mode: Mode):
    weights = {n: w for n, w in toy().weights.items() if "q_future" not in n and "q_curr" not in n}
    plain = load(toy().config, weights).decoder
    with pytest.raises(ConfigError, match=rf"mode={mode.value} needs a Forecast.*--forecast"):
        Runner(plain, mode=mode)
    runner = Runner(plain, mode=Mode.SPARSE, max_model_len=64)
    assert runner.start([5, 6, 7], SamplingParams(max_tokens=1)).advance() is not None
    with pytest.raises(ConfigError, match="needs a Forecast"):
        Session(load(toy().config, weights), Mode.SPARDA).feed([tokens()[:5]])


# The rules of visibility: ours (windows that have ended) and the published code's (windows that have started).
ROWS, BLOCKS, TOTAL, LOCAL = 768, 12, 6, 2


@jax.jit
def ours(f, k1):
    positions = jnp.arange(ROWS)[None]
    visible = visible_windows(positions, toy().decoder.config)
    pooled = pool_to_blocks(forecast_scores(f, k1, visible), 4)
    return select_blocks(pooled, positions // 64, init_blocks=1, local_blocks=LOCAL, num_selected=TOTAL)


def by_start_position(f: np.ndarray, k1: np.ndarray, *, compat: bool) -> np.ndarray:
    """The published rule (docs/semantics.md 5.4): key j scores -inf where 16 j > r."""
    rows = np.arange(ROWS)
    score = oracle.forecast_score(f, k1, rows)
    pooled = oracle.pool_blocks(score, rows // 64, BLOCKS, 1, LOCAL)
    return oracle.select_blocks(pooled, rows // 64, TOTAL, ref_compat=compat)


@given(seed=st.integers(0, 2**32 - 1), whole_numbers=st.booleans(), dominant=st.integers(0, 4 * BLOCKS - 2))
def test_ended_windows_select_what_started_windows_select(seed: int, whole_numbers: bool, dominant: int):
    """Every row of 12 blocks, ties included, also where one key outshines all others."""
    rng = np.random.default_rng(seed)
    n1 = 4 * BLOCKS - 1
    f, k1 = rng.standard_normal((ROWS, 2, 16)), rng.standard_normal((n1, 2, 16))
    if whole_numbers:
        # Small integers: exact in float32, and ties are everywhere.
        f, k1 = np.sign(f) * (np.abs(f) > 1), np.sign(k1)
    k1[dominant] *= 8
    f, k1 = f.astype(np.float32), k1.astype(np.float32)
    padded = np.concatenate([k1, np.full((1, 2, 16), np.nan, np.float32)]).swapaxes(0, 1)
    found = np.asarray(ours(f[None], padded[None]))[0]
    expected = by_start_position(f.astype(np.float64), k1.astype(np.float64), compat=False)
    if whole_numbers:
        np.testing.assert_array_equal(found, expected)
    else:
        # float32 sums may order a near tie the other way.
        assert np.mean((found == expected).all(axis=-1)) > 0.999


def test_the_next_block_never_takes_a_place():
    """Key 4 qb + 3, seen from r % 64 = 48 on, outshines all: the reference gives qb + 1 a place (section 13.28)."""
    rng = np.random.default_rng(0)
    f, k1 = np.abs(rng.standard_normal((ROWS, 2, 16))), rng.standard_normal((4 * BLOCKS - 1, 2, 16))
    own = 8
    k1[4 * own + 3] = 50
    rows = np.arange(64 * own, 64 * own + 64)
    clean, compat = (by_start_position(f, k1, compat=c)[:, rows] for c in (False, True))
    padded = np.concatenate([k1, np.zeros((1, 2, 16))]).swapaxes(0, 1).astype(np.float32)
    found = np.asarray(ours(f[None].astype(np.float32), padded[None]))[0][:, rows]
    late = rows % 64 >= 48
    assert np.all((compat[:, late] >= 0).sum(axis=-1) == TOTAL - 1)
    assert np.all((clean >= 0).sum(axis=-1) == TOTAL)
    np.testing.assert_array_equal(found, clean)
