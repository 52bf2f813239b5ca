"""The cached forward pass against the float64 oracle: prefill, then token by token, in every mode."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.infinigen import calibrate
from sparda_jax.selection import Mode
from tests import oracle
from tests.core.support import (
    LAYERS,
    SELECTING,
    OracleRun,
    Output,
    Session,
    assert_selects_as,
    kind_of,
    oracle_prefill,
    oracle_run,
    skew_for,
    tokens,
    toy,
)

# 600 tokens fill 10 blocks, of which 6 are read; the steps cross several window and block boundaries.
PROMPT, TOTAL, LONG_TOTAL = 620, 670, 960
# float32 against float64; logits reach 9. A wrong block moves them by 0.1 and more.
ATOL = 1e-4
# A float32 phase at position 900 is off by up to 6e-5.
CACHE_ATOL = 2e-4
PAIRS = [Mode.DENSE, *SELECTING]


@functools.cache
def our_run(mode: Mode, total: int = TOTAL) -> tuple[Session, Output, Output]:
    """The session after it, the prompt's output and the steps'."""
    session = Session(toy(kind_of(mode)), mode, skew=skew_for(mode))
    prefill = session.feed([tokens()[:PROMPT]])[0]
    return session, prefill, session.decode(tokens()[None, PROMPT:total])[0]


def step_ids(run: OracleRun, layer: int) -> np.ndarray:
    """The oracle's choices of all steps, [kv_heads, steps, k]; the width grows with the number of blocks."""
    ids = [step.routing(layer).ids for step in run.steps]
    width = max(i.shape[-1] for i in ids)
    return np.concatenate(
        [np.pad(i, ((0, 0), (0, 0), (0, width - i.shape[-1])), constant_values=-1) for i in ids], axis=1
    )


@pytest.mark.parametrize("mode", PAIRS)
def test_prefill_logits(mode: Mode):
    _, prefill, _ = our_run(mode)
    np.testing.assert_allclose(prefill.logits, oracle_run(mode, PROMPT, TOTAL).prefill.logits, rtol=0, atol=ATOL)


@pytest.mark.parametrize("mode", PAIRS)
def test_decode_logits(mode: Mode):
    _, _, steps = our_run(mode)
    expected = np.concatenate([step.logits for step in oracle_run(mode, PROMPT, TOTAL).steps])
    np.testing.assert_allclose(steps.logits, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("mode", SELECTING)
def test_selections(mode: Mode):
    _, prefill, steps = our_run(mode)
    run = oracle_run(mode, PROMPT, TOTAL)
    for layer in range(LAYERS):
        assert_selects_as(prefill.selected[layer], run.prefill.routing(layer).ids)
        assert_selects_as(steps.selected[layer], step_ids(run, layer))


def test_dense_mode_selects_nothing():
    _, prefill, steps = our_run(Mode.DENSE)
    assert prefill.selected == steps.selected == (None, None)
    np.testing.assert_array_equal(prefill.blocks_read, prefill.blocks_visible)


def test_modes_differ():
    """Or a test of one mode would pass with the code of another."""
    chosen = [our_run(mode)[2].selected[1] for mode in (Mode.SPARSE, Mode.SPARDA)]
    assert np.any(chosen[0] != chosen[1])
    logits = [our_run(mode)[2].logits for mode in (Mode.DENSE, Mode.SPARSE, Mode.SPARDA, Mode.SPARDA_DECODE_ONLY)]
    for i, a in enumerate(logits):
        for b in logits[:i]:
            assert np.abs(a - b).max() > 0.05
    sparse, infinigen = (Session(toy("wide"), m, skew=skew_for(m)) for m in (Mode.SPARSE, Mode.INFINIGEN))
    ids = []
    for session in (sparse, infinigen):
        session.feed([tokens()[:PROMPT]])
        ids.append(session.decode(tokens()[None, PROMPT : PROMPT + 8])[0].selected)
    np.testing.assert_array_equal(ids[0][0], ids[1][0])
    assert np.any(ids[0][1] != ids[1][1])


@pytest.mark.parametrize("mode", [Mode.SPARSE, Mode.SPARDA])
def test_hundreds_of_decode_steps(mode: Mode):
    session, _, steps = our_run(mode, LONG_TOTAL)
    run = oracle_run(mode, PROMPT, LONG_TOTAL)
    np.testing.assert_allclose(steps.logits, run.logits[PROMPT:], rtol=0, atol=ATOL)
    for layer in range(LAYERS):
        assert_selects_as(steps.selected[layer], step_ids(run, layer))
        k1 = run.steps[-1].routing(layer).k1
        assert len(k1) == LONG_TOTAL // 16 - 1
        found = np.asarray(session.cache.layers[layer].compressed_k)[0, :, : len(k1)].swapaxes(0, 1)
        np.testing.assert_allclose(found, k1, rtol=0, atol=CACHE_ATOL)


@pytest.mark.parametrize("mode", SELECTING)
def test_cache_contents(mode: Mode):
    """Keys, values and compressed keys after prompt and steps; finished windows only."""
    session, _, _ = our_run(mode)
    run = oracle_run(mode, PROMPT, TOTAL)
    assert session.cache.lengths.tolist() == [TOTAL]
    for layer, expected in enumerate(run.steps[-1].state.layers):
        ours = session.cache.layers[layer]
        for name, rows in (("k", expected.k), ("v", expected.v), ("compressed_k", oracle.compress_keys(expected.k))):
            found = np.asarray(getattr(ours, name))[0].swapaxes(0, 1)
            np.testing.assert_allclose(found[: len(rows)], rows, rtol=0, atol=CACHE_ATOL, err_msg=name)
            assert not found[len(rows) :].any()


def test_compressed_keys_are_there_in_the_step_that_completes_them():
    """After every single step, over three window boundaries (docs/semantics.md 13.9)."""
    session = Session(toy(), Mode.SPARSE)
    session.feed([tokens()[:PROMPT]])
    for n in range(PROMPT, PROMPT + 40):
        session.decode(tokens()[None, n : n + 1])
        layer = session.cache.layers[1]
        k = np.asarray(layer.k)[0, :, : n + 1].swapaxes(0, 1).astype(np.float64)
        expected = oracle.compress_keys(k)
        found = np.asarray(layer.compressed_k)[0].swapaxes(0, 1)
        np.testing.assert_allclose(found[: len(expected)], expected, rtol=0, atol=1e-6)
        assert not found[len(expected) :].any()


@pytest.mark.parametrize("prompt", [5, 31, 32, 40, 47])
def test_short_prompts(prompt: int):
    """No compressed key at first (docs/semantics.md 13.9, 13.34): only block 0 exists, and all of it is read."""
    run = oracle_run(Mode.SPARDA, prompt, prompt + 40)
    session = Session(toy(), Mode.SPARDA)
    prefill = session.feed([tokens()[:prompt]])[0]
    steps = session.decode(tokens()[None, prompt : prompt + 40])[0]
    found = np.concatenate([prefill.logits, steps.logits])
    np.testing.assert_allclose(found, run.logits, rtol=0, atol=ATOL)
    dense = oracle_prefill(Mode.DENSE, prompt + 40)
    np.testing.assert_allclose(found, dense.logits, rtol=0, atol=ATOL)
    k1 = run.steps[-1].routing(1).k1
    np.testing.assert_allclose(
        np.asarray(session.cache.layers[1].compressed_k)[0, :, : len(k1)].swapaxes(0, 1), k1, rtol=0, atol=CACHE_ATOL
    )


def test_decode_only_is_sparse_in_prefill_and_sparda_in_decode():
    """The prompt's output is the baseline's; the steps select as SparDA on that cache (docs/semantics.md 13.33)."""
    session, prefill, _ = our_run(Mode.SPARDA_DECODE_ONLY)
    baseline = our_run(Mode.SPARSE)[1]
    np.testing.assert_array_equal(prefill.logits, baseline.logits)
    for a, b in zip(prefill.selected, baseline.selected, strict=True):
        np.testing.assert_array_equal(a, b)
    next_token = tokens()[None, TOTAL : TOTAL + 1]
    other = Session(toy(), Mode.SPARDA)
    late = Session(toy(), Mode.SPARDA_DECODE_ONLY)
    other.cache = late.cache = session.cache
    a, b = other.decode(next_token)[0], late.decode(next_token)[0]
    np.testing.assert_array_equal(a.logits, b.logits)
    assert_selects_as(a.selected[1], b.selected[1])


def test_infinigen_with_our_own_bases():
    """`calibrate` on a short prompt, where dense and sparse attention agree: the same channels up to order and sign."""
    length = 380
    model = toy("wide")
    skew = calibrate(model.decoder, tokens()[:length].tolist())
    expected = oracle_prefill(Mode.INFINIGEN, length).state.layers
    for ours, layer in zip(skew, expected, strict=True):
        assert layer.basis is not None
        for a, b in zip(np.asarray(ours, np.float64), layer.basis, strict=True):
            overlap = np.abs(a.T @ b)
            # Nearly equal singular values leave a pair of channels free to turn, but no more than a few.
            assert np.mean(overlap.max(axis=0) > 0.999) > 0.9
            np.testing.assert_allclose(a.T @ a, np.eye(64), atol=1e-5)


def test_infinigen_scores_are_the_oracles_on_our_bases():
    model = toy("wide")
    skew = calibrate(model.decoder, tokens()[:380].tolist())
    basis = [np.asarray(a, np.float64) for a in skew]
    start = oracle.forward(model.weights, model.config, tokens()[:PROMPT], "infinigen", basis=basis)
    steps = oracle.decode_many(start.state, tokens()[PROMPT:TOTAL])
    mixed = tuple(a[:, :, ::-1] * jnp.where(jnp.arange(64) % 3 == 0, -1.0, 1.0) for a in skew)
    for ours in (skew, mixed):
        session = Session(model, Mode.INFINIGEN, skew=ours)
        session.feed([tokens()[:PROMPT]])
        found = session.decode(tokens()[None, PROMPT:TOTAL])[0]
        run = OracleRun(prefill=start, steps=steps)
        np.testing.assert_allclose(found.logits, run.logits[PROMPT:], rtol=0, atol=ATOL)
        for layer in range(LAYERS):
            assert_selects_as(found.selected[layer], step_ids(run, layer))
