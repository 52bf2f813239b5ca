"""The oracle's whole model against the reference's, prefill of 1000 tokens and 28 decode steps, in three modes.

The reference ran in bf16 on a GPU. The oracle rounds where it rounds; what is left is the order of sums.
"""

import numpy as np
import pytest

from tests import oracle
from tests.oracle.golden import Golden, allowed_by_ties, golden_weights, load_golden

MODES = ("dense", "sparse", "sparda")
SPARSE_MODES = MODES[1:]
LAYERS = 3
TOTAL, INIT, LOCAL = 6, 1, 2


def file_of(mode: str) -> str:
    return f"model_minicpm_hk1_{mode}_T1000"


@pytest.fixture(scope="module", params=MODES)
def run(request: pytest.FixtureRequest) -> tuple[str, Golden, oracle.OracleResult, list[oracle.OracleResult]]:
    """Mode, golden file, prefill and decode steps of the oracle, with the file's selections forced."""
    mode = request.param
    golden, weights = load_golden(file_of(mode)), golden_weights(file_of(mode))
    sparse = mode in SPARSE_MODES
    # float32 sums, as in the reference; a float64 run would take twice as long.
    prefill = oracle.forward(
        weights,
        golden.config,
        golden["ids"],
        mode,
        bf16=True,
        dtype=np.float32,
        ref_compat=True,
        forced=list(golden["topk"]) if sparse else None,
    )
    steps = oracle.decode_many(prefill.state, golden["dec_ids"][0], forced=list(golden["dec_topk"]) if sparse else None)
    return mode, golden, prefill, steps


def test_weights_are_those_of_the_reference():
    for mode in MODES:
        assert golden_weights(file_of(mode)).keys() == load_golden(file_of(mode)).meta["crc32"].keys()


def test_prefill_logits(run):
    _, golden, prefill, _ = run
    error = np.abs(prefill.logits - golden["logits"])
    assert error.max() < 0.1
    assert error.mean() < 0.015
    assert np.mean(prefill.logits.argmax(-1) == golden["logits"].argmax(-1)) > 0.97


def test_decode_logits(run):
    _, golden, _, steps = run
    logits = np.concatenate([step.logits for step in steps])
    error = np.abs(logits - golden["dec_logits"][:, 0])
    assert error.max() < 0.1
    assert error.mean() < 0.015


def test_residual_stream(run):
    _, golden, prefill, steps = run
    np.testing.assert_array_equal(prefill.hidden[0][golden["hidden_rows"]], golden["hidden"][0])
    for i in range(LAYERS + 1):
        np.testing.assert_allclose(prefill.hidden[i][golden["hidden_rows"]], golden["hidden"][i], rtol=0, atol=0.07)
    for expected, step in zip(golden["dec_hidden"], golden["dec_hidden_steps"], strict=True):
        found = np.stack(steps[step].hidden)
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.07)


def test_unrounded_forward_is_within_bf16_noise():
    """Without any rounding the distance is what bf16 activations cost the reference."""
    golden = load_golden(file_of("sparda"))
    free_of_rounding = oracle.forward(
        golden_weights(file_of("sparda")), golden.config, golden["ids"], "sparda", dtype=np.float32,
        ref_compat=True, forced=list(golden["topk"]),
    )  # fmt: skip
    error = np.abs(free_of_rounding.logits - golden["logits"])
    assert error.max() < 0.12
    assert error.mean() < 0.016


def test_dense_mode_selects_nothing(run):
    mode, _, prefill, steps = run
    dense = [selection is None for result in (prefill, *steps) for selection in result.selections]
    assert all(dense) if mode == "dense" else not any(dense)


@pytest.mark.parametrize("run", SPARSE_MODES, indirect=True)
def test_prefill_selection(run):
    """Layer 0 exact up to ties in its own scores; later layers see other bf16 noise."""
    _, golden, prefill, _ = run
    query_block = np.arange(1000) // 64
    for i, least in enumerate((0.999, 0.98, 0.97)):
        expected = golden["topk"][i]
        assert allowed_by_ties(golden["pooled"][i], expected, query_block, TOTAL).all()
        ids = prefill.routing(i).ids
        allowed = allowed_by_ties(golden["pooled"][i], ids, query_block, TOTAL)
        assert allowed.mean() >= least
        assert np.mean((ids == expected).all(-1) | ~allowed) >= 0.88


@pytest.mark.parametrize("run", SPARSE_MODES, indirect=True)
def test_prefill_scores(run):
    mode, golden, prefill, _ = run
    # bf16 scores reach 16 (sparse) and about 40 (Forecast): one unit in the last place is 1/16 and 1/4 there.
    atol = 0.07 if mode == "sparse" else 0.3
    for i in range(LAYERS):
        found = prefill.routing(i)
        score, pooled, k1 = found.score, found.pooled, found.k1
        np.testing.assert_array_equal(np.isinf(score), np.isinf(golden["score"][i]))
        np.testing.assert_allclose(score, golden["score"][i], rtol=0, atol=atol)
        np.testing.assert_array_equal(np.isinf(pooled), np.isinf(golden["pooled"][i]))
        again = oracle.pool_blocks(golden["score"][i], np.arange(1000) // 64, 16, INIT, LOCAL)
        np.testing.assert_array_equal(again, golden["pooled"][i])
        np.testing.assert_allclose(k1, golden["k1"][i], rtol=0, atol=0.02)


@pytest.mark.parametrize("run", SPARSE_MODES, indirect=True)
def test_decode_selection_and_compressed_keys(run):
    _, golden, _, steps = run
    for i in range(LAYERS):
        agree = []
        for n, step in enumerate(steps):
            position = np.array([1000 + n])
            num_blocks = position[0] // 64 + 1
            pooled = golden["dec_pooled"][n, i][..., :num_blocks]
            found = step.routing(i)
            ids, k1 = found.ids, found.k1
            # The window completed by a step's own token is visible in that very step.
            assert len(k1) == (position[0] + 1) // 16 - 1
            assert np.isfinite(golden["dec_score"][n, i, 0, 0]).sum() == len(k1)
            assert allowed_by_ties(pooled, golden["dec_topk"][n, i], position // 64, TOTAL).all()
            agree.append(allowed_by_ties(pooled, ids, position // 64, TOTAL).all())
        assert np.mean(agree) >= (1.0 if i == 0 else 0.92)
        k1 = steps[-1].routing(i).k1
        np.testing.assert_allclose(k1, golden["k1_end"][i], rtol=0, atol=0.02)


@pytest.mark.parametrize("run", ["sparda"], indirect=True)
def test_forecasts(run):
    _, golden, prefill, steps = run
    assert prefill.q_curr is not None
    np.testing.assert_allclose(prefill.q_curr, golden["q_curr"], rtol=0, atol=0.02)
    for i in range(LAYERS):
        np.testing.assert_allclose(prefill.forecasts[i], golden["forecast"][i], rtol=0, atol=0.07)
        found = np.stack([step.forecasts[i] for step in steps])
        np.testing.assert_allclose(found, golden["dec_forecast"][:, i], rtol=0, atol=0.07)


@pytest.mark.parametrize("mode", SPARSE_MODES)
def test_free_running(mode: str):
    """With its own selections, rows whose selections agree in every layer stay within bf16 noise."""
    golden = load_golden(file_of(mode))
    result = oracle.forward(
        golden_weights(file_of(mode)), golden.config, golden["ids"], mode, bf16=True, dtype=np.float32, ref_compat=True
    )
    equal = np.stack([(ids == golden["topk"][i]).all(axis=(0, 2)) for i, ids in enumerate(result.selections)])
    assert (equal.mean(axis=1) >= 0.95).all()
    # A later row attends to keys of a row whose selection differed, so a few agreeing rows may still move.
    error = np.abs(result.logits - golden["logits"])
    assert np.mean(error[equal.all(axis=0)].max(axis=-1) < 0.1) > 0.97
    assert error.mean() < 0.025
