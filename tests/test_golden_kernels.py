"""The oracle's operations against outputs of the reference's GPU kernels, quirks and bf16 rounding included.

Each step takes the golden output of the step before it, so that a near tie cannot move an error along.
"""

import numpy as np
import pytest

from tests import oracle
from tests.oracle.golden import Golden, allowed_by_ties, load_golden, tie_rows

REFERENCE = oracle.Numerics(bf16=True, ref_compat=True)
KINDS = ("g16", "sparda")
TOTAL, INIT, LOCAL = 6, 1, 2
T, N1, NUM_BLOCKS = 1000, 61, 16
ROWS = np.arange(T)
SEQUENCES, KEYS, KEYS_N1 = (0, 1), 2048, 127


@pytest.fixture(scope="module")
def prefill() -> Golden:
    return load_golden("prefill_T1000")


@pytest.fixture(scope="module")
def step() -> Golden:
    return load_golden("decode")


def f64(golden: Golden, name: str) -> np.ndarray:
    return golden[name].astype(np.float64)


def test_prefill_compressed_keys_are_equal(prefill: Golden):
    k1 = oracle.compress_keys(f64(prefill, "k"), numerics=REFERENCE)
    np.testing.assert_array_equal(k1, prefill["compressed_k"])


def test_prefill_stage1(prefill: Golden):
    rows, expected = prefill["q_rows"], prefill["stage1_g16"][:, prefill["q_rows"]]
    visible = oracle.visible_stage1(rows, T, N1, ref_compat=True)
    q, k1 = f64(prefill, "q"), f64(prefill, "compressed_k")
    np.testing.assert_allclose(oracle.stage1_score(q, k1, visible), expected, rtol=0, atol=0.06)
    rounded = oracle.stage1_score(q, k1, visible, REFERENCE)
    np.testing.assert_allclose(rounded, expected, rtol=2**-8, atol=1e-30)
    assert np.mean(rounded == expected) > 0.999


def test_prefill_stage1_sees_exactly_the_visible_keys(prefill: Golden):
    visible = oracle.visible_stage1(ROWS, T, N1, ref_compat=True)
    expected = np.broadcast_to(np.arange(N1) < visible[:, None], prefill["stage1_g16"].shape)
    np.testing.assert_array_equal(prefill["stage1_g16"] > 0, expected)


def test_prefill_forecast_scores(prefill: Golden):
    score = oracle.forecast_score(f64(prefill, "q_forecast"), f64(prefill, "compressed_k"), ROWS, numerics=REFERENCE)
    expected = prefill["stage1_sparda"]
    np.testing.assert_array_equal(np.isneginf(score), np.isneginf(expected))
    seen = np.isfinite(expected)
    np.testing.assert_allclose(score[seen], expected[seen], rtol=2**-7, atol=1e-5)
    assert np.mean(score[seen] == expected[seen]) > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_block_scores_are_equal(prefill: Golden, kind: str):
    pooled = oracle.pool_blocks(prefill[f"stage1_{kind}"], ROWS // 64, NUM_BLOCKS, INIT, LOCAL)
    np.testing.assert_array_equal(pooled, prefill[f"pooled_{kind}"])


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_selection(prefill: Golden, kind: str):
    pooled, expected = prefill[f"pooled_{kind}"], prefill[f"topk_{kind}"]
    ids = oracle.select_blocks(pooled, ROWS // 64, TOTAL, ref_compat=True)
    assert allowed_by_ties(pooled, expected, ROWS // 64, TOTAL).all()
    assert allowed_by_ties(pooled, ids, ROWS // 64, TOTAL).all()
    settled = ~tie_rows(pooled, TOTAL)
    np.testing.assert_array_equal(ids[settled], expected[settled])


def test_forecast_rows_lose_a_place_to_the_next_block(prefill: Golden):
    """Quirk Q2 is in the data, the clean selection differs from it there and in no other row."""
    pooled, expected = prefill["pooled_sparda"], prefill["topk_sparda"]
    settled = ~tie_rows(pooled, TOTAL)
    enough = ROWS // 64 + 1 >= TOTAL
    lost = enough & (expected < 0).any(axis=-1)
    assert (ROWS[lost.any(axis=0)] % 64 >= 48).all()
    assert (lost & settled).sum() > 20
    clean = oracle.select_blocks(pooled, ROWS // 64, TOTAL)
    assert (clean[:, enough] >= 0).all()
    same = (clean == expected).all(axis=-1)
    np.testing.assert_array_equal(same[settled], ~lost[settled])


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_attention(prefill: Golden, kind: str):
    rows = prefill["attn_rows"]
    q = f64(prefill, "q")[np.isin(prefill["q_rows"], rows)]
    chosen = oracle.block_mask(prefill[f"topk_{kind}"][:, rows], T)
    allowed = chosen & oracle.causal_mask(T, T)[rows]
    k, v, expected = f64(prefill, "k"), f64(prefill, "v"), prefill[f"attn_{kind}"]
    np.testing.assert_allclose(oracle.attend(q, k, v, allowed), expected, rtol=0, atol=0.02)
    rounded = oracle.attend(q, k, v, allowed, REFERENCE)
    np.testing.assert_allclose(rounded, expected, rtol=2**-7, atol=0.002)


@pytest.mark.parametrize("b", SEQUENCES)
def test_decode_compressed_keys_are_equal(step: Golden, b: int):
    k1 = oracle.compress_keys(f64(step, "k")[b], numerics=REFERENCE)
    np.testing.assert_array_equal(k1, step["compressed_k"][KEYS_N1 * b : KEYS_N1 * (b + 1)])


@pytest.mark.parametrize("b", SEQUENCES)
def test_decode_scores(step: Golden, b: int):
    k1 = f64(step, "compressed_k")[KEYS_N1 * b : KEYS_N1 * (b + 1)]
    stage1 = oracle.stage1_score(f64(step, "q")[b : b + 1], k1, np.array([KEYS_N1]), REFERENCE)
    np.testing.assert_allclose(stage1[:, 0], step["stage1_g16"][:, b, :KEYS_N1], rtol=2**-7, atol=0)
    forecast = oracle.forecast_score(f64(step, "q_forecast")[b : b + 1], k1, None, numerics=REFERENCE)
    np.testing.assert_allclose(forecast[:, 0], step["stage1_sparda"][:, b], rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b", SEQUENCES)
def test_decode_selection(step: Golden, kind: str, b: int):
    query_block = np.array([KEYS // 64])
    num_blocks = KEYS // 64 + 1
    expected = step[f"pooled_{kind}"][:, b : b + 1]
    pooled = oracle.pool_blocks(step[f"stage1_{kind}"][:, b : b + 1, :KEYS_N1], query_block, num_blocks, INIT, LOCAL)
    np.testing.assert_array_equal(pooled, expected)
    ids = oracle.select_blocks(expected, query_block, TOTAL, ref_compat=True)
    golden_ids = np.sort(step[f"topk_{kind}"][:, b : b + 1], axis=-1)
    assert allowed_by_ties(expected, golden_ids, query_block, TOTAL).all()
    settled = ~tie_rows(expected, TOTAL)
    np.testing.assert_array_equal(ids[settled], golden_ids[settled])


@pytest.mark.parametrize("b", SEQUENCES)
def test_decode_dense_attention(step: Golden, b: int):
    k, v = f64(step, "k")[b, :2043], f64(step, "v")[b, :2043]
    out = oracle.dense_attention(f64(step, "q")[b : b + 1], k, v)
    np.testing.assert_allclose(out, step["fa_kvcache"][b], rtol=2**-7, atol=0.001)
