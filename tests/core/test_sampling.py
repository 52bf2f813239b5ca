"""Sampling: greedy, nucleus, seeds that depend on nothing but themselves, and the distribution that comes out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda_jax.sampling import SamplingParams, SamplingState, sample

PROBABILITIES = np.array([0.05, 0.3, 0.15, 0.5])
LOGITS = jnp.asarray(np.log(PROBABILITIES), jnp.float32)
DRAWS = 4096
run = jax.jit(sample)


def draw(logits: np.ndarray | jax.Array = LOGITS, count: int = DRAWS, first: int = 0, **params: Any) -> np.ndarray:
    """One draw at each of `count` positions."""
    defaults: dict[str, Any] = {"temperature": 1.0, "seed": 7}
    state = SamplingState.of([SamplingParams(**defaults | params)])
    state = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), state)
    rows = jnp.broadcast_to(jnp.asarray(logits), (count, len(logits)))
    return np.asarray(run(rows, state, jnp.arange(first, first + count)))


def assert_distributed(found: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square within what 4096 draws give (far beyond the 99.99 % quantile of 3 degrees of freedom: 21)."""
    counts = np.bincount(found, minlength=len(expected))
    assert not counts[expected == 0].any()
    wanted = expected[expected > 0] * len(found)
    assert ((counts[expected > 0] - wanted) ** 2 / wanted).sum() < 21


@given(seed=st.integers(0, 2**32 - 1))
def test_greedy_is_the_largest_logit(seed: int):
    logits = np.random.default_rng(seed).standard_normal((3, 16)).astype(np.float32)
    state = SamplingState.of([SamplingParams()] * 3)
    found = run(logits, state, jnp.arange(3))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, logits.argmax(axis=-1))


def test_extreme_temperatures():
    assert set(draw(temperature=1e-9, count=64).tolist()) == {int(PROBABILITIES.argmax())}
    assert_distributed(draw(temperature=1e300), np.full(4, 0.25))


def test_greedy_takes_the_lowest_of_equals():
    state = SamplingState.of([SamplingParams()])
    assert run(jnp.array([[1.0, 5.0, 5.0, 0.0]]), state, jnp.array([3])).tolist() == [1]


@given(seed=st.integers(0, 2**64 - 1))
def test_top_k_1_and_a_small_top_p_are_greedy(seed: int):
    logits = np.random.default_rng(seed % 2**32).standard_normal((2, 16)).astype(np.float32)
    params = [
        SamplingParams(temperature=5.0, seed=seed, top_k=1),
        SamplingParams(temperature=5.0, seed=seed, top_p=1e-6),
    ]
    np.testing.assert_array_equal(run(logits, SamplingState.of(params), jnp.array([1, 2])), logits.argmax(axis=-1))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_p": 0.79}, [1, 3]),
        ({"top_p": 0.81}, [1, 2, 3]),
        ({"top_p": 0.49}, [3]),
        ({"top_p": 0.96}, [0, 1, 2, 3]),
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_k": 100}, [0, 1, 2, 3]),
        # top_k comes first: of the remaining three, 0.3 and 0.5 hold 84 % of the mass.
        ({"top_k": 3, "top_p": 0.83}, [1, 3]),
        ({"top_k": 3, "top_p": 0.86}, [1, 2, 3]),
    ],
)
def test_distribution(params: dict, kept: list[int]):
    """The smallest set that holds top_p of the mass, renormalised."""
    expected = np.where(np.isin(np.arange(4), kept), PROBABILITIES, 0)
    assert_distributed(draw(**params), expected / expected.sum())


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_divides_the_logits(temperature: float):
    expected = PROBABILITIES ** (1 / temperature)
    assert_distributed(draw(temperature=temperature), expected / expected.sum())


def test_a_tiny_temperature_is_greedy():
    assert np.all(draw(temperature=1e-4) == 3)


def test_seed_and_position_decide_alone():
    base = draw(count=512)
    np.testing.assert_array_equal(draw(count=512), base)
    # The same positions among others.
    np.testing.assert_array_equal(draw(count=256, first=256), base[256:])
    for other in (draw(count=512, seed=8), draw(count=512, first=1), draw(count=512, seed=7 + 2**32)):
        # Independent draws agree with probability sum(p^2) = 0.365.
        assert 0.25 < np.mean(other == base) < 0.48


def test_neighbours_change_nothing():
    """A request draws the same alone, in any lane of a mixed batch, and next to greedy ones."""
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=2**63 + 11)
    others = [SamplingParams(), SamplingParams(temperature=2.0, seed=1), SamplingParams(temperature=0.5, top_k=1)]
    rng = np.random.default_rng(0)
    for position in range(20):
        logits = rng.standard_normal((4, 64)).astype(np.float32) * 3
        alone = run(logits[:1], SamplingState.of([params]), jnp.array([position]))[0]
        for lane in range(4):
            order = [*others[:lane], params, *others[lane:]]
            rows = np.roll(logits, lane, axis=0)
            positions = np.full(4, 900)
            positions[lane] = position
            found = run(rows, SamplingState.of(order), jnp.asarray(positions))
            assert found[lane] == alone
            for i, other in enumerate(order):
                if other.temperature == 0 or other.top_k == 1:
                    assert found[i] == rows[i].argmax()


def test_without_a_seed_every_request_draws_afresh():
    states = [np.asarray(SamplingState.of([SamplingParams(temperature=1.0)] * 2).seed) for _ in range(2)]
    seeds = {tuple(seed) for state in states for seed in state}
    assert len(seeds) == 4


def test_all_64_bits_of_a_seed_count():
    seeds = [0, 1, 2**32, 2**64 - 1, -2, -(2**63)]
    state = SamplingState.of([SamplingParams(seed=s) for s in seeds])
    found = [(int(high) << 32) | int(low) for high, low in np.asarray(state.seed)]
    assert found == [s % 2**64 for s in seeds]


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("max_tokens", [0, -1], [1, 10**6]),
        ("temperature", [-0.1, float("nan"), float("inf")], [0.0, 2.0]),
        ("top_p", [0.0, -1.0, 1.01, float("nan")], [1e-6, 1.0]),
        ("top_k", [-1], [0, 5]),
        ("seed", [2**64, -(2**63) - 1], [None, 0, 2**64 - 1, -(2**63)]),
    ],
)
def test_parameters_are_checked_by_name(name: str, bad: list, good: list):
    for value in bad:
        with pytest.raises(ValueError, match=rf"^{name}={value!r}.*it must be".replace("+", r"\+")):
            SamplingParams(**{name: value})
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
