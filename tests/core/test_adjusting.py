"""Biases, held-back stop tokens, penalties and min_p against plain numpy, and log probabilities of their own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda_jax.adjusting import MAX_BIASES, MAX_STOP_IDS, adjust, all_allowed, count, prompt_tokens
from sparda_jax.logprobs import MAX_LOGPROBS, score, score_if
from sparda_jax.sampling import SamplingParams, SamplingState, sample

BATCH, VOCAB = 4, 48
seeds = st.integers(0, 2**32 - 1)
_adjust = jax.jit(lambda logits, state, position, seen: adjust(logits, state.adjustments, position, seen))
_masked = jax.jit(lambda logits, state, position, allowed: adjust(logits, state.adjustments, position, None, allowed))
_sample, _score = jax.jit(sample), jax.jit(score)


def random_params(rng: np.random.Generator, **more: Any) -> SamplingParams:
    """Each option in about half of them."""
    options: dict[str, Any] = {
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.choice([0.5, 1.3, 4.0]),
        "logit_bias": tuple((int(token), float(rng.uniform(-100, 100))) for token in rng.permutation(VOCAB)[:5]),
        "min_tokens": int(rng.integers(1, 20)),
        "stop_token_ids": tuple(map(int, rng.integers(0, VOCAB, 3))),
    }
    chosen = {name: value for name, value in options.items() if rng.random() < 0.5}
    return SamplingParams(max_tokens=20, **chosen | more)


def expected(logits: np.ndarray, params: SamplingParams, prompt: list[int], generated: list[int]) -> np.ndarray:
    """One token after the other, in vLLM's order."""
    wanted = logits.astype(np.float64).copy()
    for token in range(len(wanted)):
        wanted[token] += dict(params.logit_bias).get(token, 0)
        if token in params.stop_token_ids and len(generated) < params.min_tokens:
            wanted[token] = -np.inf
        if token in prompt or token in generated:
            factor = params.repetition_penalty
            wanted[token] = wanted[token] / factor if wanted[token] > 0 else wanted[token] * factor
        wanted[token] -= params.frequency_penalty * generated.count(token)
        wanted[token] -= params.presence_penalty * (token in generated)
    return wanted


@given(seed=seeds)
def test_adjusted_logits_are_those_of_plain_numpy(seed: int):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((BATCH, VOCAB)) * 5).astype(np.float32)
    params = [random_params(rng) for _ in range(BATCH)]
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 30)) for _ in range(BATCH)]
    answers = rng.integers(0, VOCAB, (12, BATCH))
    seen = jnp.asarray(prompt_tokens(prompts, VOCAB))
    for tokens in answers:
        seen = count(seen, jnp.asarray(tokens))
    state = SamplingState.of(params, [len(prompt) for prompt in prompts])
    position = jnp.asarray([len(prompt) + len(answers) for prompt in prompts])
    found = np.asarray(_adjust(logits, state, position, seen))
    wanted = [
        expected(logits[row], params[row], prompts[row].tolist(), answers[:, row].tolist()) for row in range(BATCH)
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
    for row, param in enumerate(params):
        if not param.adjusts:
            assert found[row].tobytes() == logits[row].tobytes()
    greedy = np.asarray(_sample(logits, state, position, seen))
    np.testing.assert_array_equal(greedy, found.argmax(axis=1))


@given(seed=seeds, vocab=st.sampled_from([32, 48, 70]))
def test_a_mask_lets_nothing_else_come(seed: int, vocab: int):
    """Greedy or drawn, with penalties or without; a neighbour's mask that nobody asked for changes nothing."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((BATCH, vocab)) * 5).astype(np.float32)
    drawn = [SamplingParams(temperature=float(t), seed=seed) for t in (0, 0, 1, 1)]
    params = [dataclasses.replace(p, masked=bool(rng.random() < 0.7)) for p in drawn]
    masks, may_come = all_allowed(BATCH, vocab), rng.random((BATCH, vocab)) < 0.1
    may_come[:, rng.integers(vocab)] = True
    for row, token in zip(*np.nonzero(~may_come), strict=True):
        masks[row, token // 32] &= ~np.uint32(1 << (token % 32))
    state, at = SamplingState.of(params), jnp.full(BATCH, 7)
    adjusted = np.asarray(_masked(logits, state, at, masks))
    tokens = np.asarray(_sample(logits, state, at, None, masks))
    free = np.asarray(_sample(logits, SamplingState.of(drawn), at, None, masks))
    for row, p in enumerate(params):
        allowed = may_come[row] if p.masked else np.ones(vocab, bool)
        np.testing.assert_array_equal(adjusted[row], np.where(allowed, logits[row], -np.inf))
        assert allowed[tokens[row]]
        if not p.masked:
            assert tokens[row] == free[row]
        elif not p.temperature:
            assert tokens[row] == adjusted[row].argmax()


def test_only_those_asked_for_are_counted():
    seen = jnp.asarray(prompt_tokens([np.array([3, 3]), np.array([], int)], 5))
    seen = count(seen, jnp.array([3, 4]), jnp.array([True, False]))
    assert seen.tolist() == [[0, 0, 0, 3, 0], [0, 0, 0, 0, 0]]


@given(seed=seeds, min_p=st.floats(0, 1), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_min_p_keeps_what_is_likely_enough(seed: int, min_p: float, temperature: float):
    """Every token that may come comes, in 400 draws among few tokens, and no other."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(6).astype(np.float32)
    params = SamplingParams(temperature=temperature, seed=seed, min_p=min_p)
    state = jax.tree.map(lambda x: jnp.repeat(x, 400, axis=0), SamplingState.of([params]))
    found = np.asarray(_sample(jnp.broadcast_to(logits, (400, 6)), state, jnp.arange(400)))
    relative = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    assert not set(found.tolist()) & set(np.flatnonzero(relative < min_p * 0.999).tolist())
    likely = (relative / relative.sum() > 0.05) & (relative > min_p * 1.001)
    assert set(np.flatnonzero(likely).tolist()) <= set(found.tolist())


def test_neighbours_with_penalties_change_no_draw():
    rng = np.random.default_rng(0)
    plain = SamplingParams(temperature=1.1, top_p=0.9, seed=5)
    for position in range(10):
        logits = rng.standard_normal((BATCH, VOCAB)).astype(np.float32)
        others = [random_params(rng, temperature=1.0, seed=position) for _ in range(BATCH - 1)]
        seen = jnp.asarray(rng.integers(0, 9, (BATCH, VOCAB)), jnp.int32)
        at = jnp.full(BATCH, position)
        together = _sample(logits, SamplingState.of([plain, *others]), at, seen)
        alone = _sample(logits, SamplingState.of([plain] * BATCH), at, jnp.zeros_like(seen))
        assert together[0] == alone[0]


@given(seed=seeds)
def test_log_probabilities_are_those_of_plain_numpy(seed: int):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((BATCH, VOCAB)) * 8).astype(np.float32)
    logits[0] = np.round(logits[0])  # with equal ones
    tokens = rng.integers(0, VOCAB, BATCH).astype(np.int32)
    found = _score(logits, tokens).to_host()
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    exact -= logits.max(axis=1, keepdims=True)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(found.ids, np.concatenate([tokens[:, None], order], axis=1))
    np.testing.assert_allclose(found.values, np.take_along_axis(exact, found.ids, axis=1), rtol=1e-5, atol=1e-5)
    few = found.row(1, 3)
    assert few.ids.shape == few.values.shape == (1, 4)


def test_nothing_is_scored_where_nobody_asks():
    logits, tokens = jnp.ones((2, VOCAB)), jnp.array([1, 2])
    assert not np.any(score_if(jnp.array([False, False]), logits, tokens).to_host().values)
    found = score_if(jnp.array([False, True]), logits, tokens).to_host()
    np.testing.assert_allclose(found.values, -np.log(VOCAB), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias"),
        ({"logit_bias": tuple((token, 1.0) for token in range(MAX_BIASES + 1))}, "logit_bias"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 1.0}, "min_tokens"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(MAX_STOP_IDS + 1))}, "stop_token_ids"),
        ({"logprobs": MAX_LOGPROBS + 1}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
    ],
)
def test_parameters_out_of_range_are_named(options: dict[str, Any], name: str):
    with pytest.raises(ValueError, match=f"^{name}="):
        SamplingParams(**options)


def test_the_largest_parameters_are_taken():
    biases = tuple((token, 100.0) for token in range(MAX_BIASES))
    params = SamplingParams(min_tokens=1, logit_bias=biases, stop_token_ids=tuple(range(MAX_STOP_IDS)))
    found = adjust(jnp.zeros((1, 400)), SamplingState.of([params], [7]).adjustments, jnp.array([7]), None)
    assert np.all(found[0, :MAX_STOP_IDS] == -np.inf)
    assert np.all(found[0, MAX_STOP_IDS:MAX_BIASES] == 100)
    assert np.all(found[0, MAX_BIASES:] == 0)
