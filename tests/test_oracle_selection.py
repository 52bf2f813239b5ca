"""The oracle's scores, pooling, top-k, quirks Q1 and Q2 (docs/semantics.md section 13: 12-14, 16-22, 26-28, 51)."""

import numpy as np
import pytest

from tests import oracle

TOTAL, INIT, LOCAL = 96, 1, 32


def random_pooled(rng: np.random.Generator, num_blocks: int, query_block: int, kv_heads: int = 2) -> np.ndarray:
    score = rng.random((kv_heads, 1, 4 * num_blocks - 1))
    return oracle.pool_blocks(score, np.array([query_block]), num_blocks, INIT, LOCAL)


def test_visibility_table():
    rows = np.array([0, 14, 15, 30, 31, 46, 47, 63])
    for ref_compat in (False, True):
        seen = oracle.visible_stage1(rows, 64, 3, ref_compat=ref_compat)
        assert seen.tolist() == [0, 0, 0, 0, 1, 1, 2, 3]


def test_quirk_q1_hides_one_key_when_length_is_15_mod_16():
    for q_len in range(32, 200):
        rows, n1 = np.arange(q_len), oracle.num_compressed(q_len)
        clean = oracle.visible_stage1(rows, q_len, n1)
        assert clean.tolist() == [sum(16 * j + 31 <= r for j in range(n1)) for r in rows]
        compat = oracle.visible_stage1(rows, q_len, n1, ref_compat=True)
        np.testing.assert_array_equal(compat, np.maximum(clean - 1, 0) if q_len % 16 == 15 else clean)


def test_stage1_rows_sum_to_the_group_or_to_0():
    rng = np.random.default_rng(0)
    q, k1 = rng.standard_normal((64, 8, 16)), rng.standard_normal((3, 2, 16))
    score = oracle.stage1_score(q, k1, oracle.visible_stage1(np.arange(64), 64, 3))
    sums = score.sum(axis=-1)
    np.testing.assert_array_equal(sums[:, :31], 0)
    np.testing.assert_allclose(sums[:, 31:], 4, rtol=1e-12)


def test_stage1_sums_heads_after_the_softmax():
    """One head is sure of key 0, three mildly prefer key 1: summed logits choose 0, summed probabilities 1."""
    k1 = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    q = np.array([[[20.0, 0.0], [0.0, 2.0], [0.0, 2.0], [0.0, 2.0]]])
    score = oracle.stage1_score(q, k1, np.array([2]))[0, 0]
    z = np.array([20.0, 0, 0, 0]) / np.sqrt(2), np.array([0, 2.0, 2, 2]) / np.sqrt(2)
    assert z[0].sum() > z[1].sum()
    assert score[0] < score[1]
    expected = sum(np.exp(a) / (np.exp(a) + np.exp(b)) for a, b in zip(*z, strict=True))
    np.testing.assert_allclose(score, [expected, 4 - expected], rtol=1e-12)


@pytest.mark.parametrize("j", range(20))
def test_a_score_reaches_exactly_its_blocks(j: int):
    score = np.zeros((1, 1, 30))
    score[0, 0, j] = 1
    pooled = oracle.pool_blocks(score, np.array([100]), 8, 0, 0)[0, 0]
    assert np.flatnonzero(pooled == 1).tolist() == ([j // 4, j // 4 + 1] if j % 4 == 3 else [j // 4])


def test_forced_blocks():
    def forced(query_block: int) -> list[int]:
        return np.flatnonzero(np.isposinf(random_pooled(np.random.default_rng(0), 60, query_block)[0, 0])).tolist()

    assert forced(40) == [0, *range(8, 41)]
    assert forced(5) == [0, 1, 2, 3, 4, 5]


def test_blocks_without_a_compressed_key_score_minus_infinity():
    pooled = oracle.pool_blocks(np.ones((1, 1, 7)), np.array([0]), 5, 0, 0)[0, 0]
    # Keys 0..6: block 1 has keys 3..6, block 2 would start at key 7.
    assert pooled.tolist() == [np.inf, 1, -np.inf, -np.inf, -np.inf]


def test_token_grid_pools_the_block_and_one_token_before_it():
    for token in (63, 64, 127, 128):
        score = np.zeros((1, 1, 256))
        score[0, 0, token] = 1
        pooled = oracle.pool_blocks(score, np.array([50]), 4, 0, 0, ratio=64)[0, 0]
        owners = {token // 64} | ({token // 64 + 1} if token % 64 == 63 else set())
        assert set(np.flatnonzero(pooled == 1).tolist()) == owners


def test_top_96_of_120():
    pooled = random_pooled(np.random.default_rng(0), 120, 119)
    ids = oracle.select_blocks(pooled, np.array([119]), TOTAL)
    assert ids.shape == (2, 1, 96)
    assert ids.dtype == np.int32
    for m in range(2):
        chosen = ids[m, 0].tolist()
        forced = {0, *range(87, 120)}
        assert chosen == sorted(set(chosen))
        assert forced < set(chosen)
        free = set(chosen) - forced
        rest = set(range(120)) - set(chosen)
        assert len(free) == 62
        assert min(pooled[m, 0, b] for b in free) >= max(pooled[m, 0, b] for b in rest)


@pytest.mark.parametrize("ref_compat", [False, True])
def test_few_blocks_are_all_selected(ref_compat: bool):
    pooled = random_pooled(np.random.default_rng(0), 50, 20)
    ids = oracle.select_blocks(pooled, np.array([20]), TOTAL, ref_compat)
    assert ids.shape == (2, 1, 50)
    assert ids[0, 0].tolist() == [*range(21)] + [-1] * 29


def test_ties_go_to_the_lowest_block():
    ids = oracle.select_blocks(np.array([[[np.inf, 1, 2, 1, 2, 1, np.inf]]]), np.array([6]), 5)
    assert ids[0, 0].tolist() == [0, 1, 2, 4, 6]


def test_past_blocks_of_score_0_beat_future_ones():
    """A probability can underflow to 0, the score of every future block too: only the clean rule keeps the past."""
    pooled = np.zeros((1, 1, 9))
    pooled[0, 0, [0, 4]] = np.inf
    pooled[0, 0, 6] = 1
    assert oracle.select_blocks(pooled, np.array([4]), 5)[0, 0].tolist() == [0, 1, 2, 3, 4]
    assert oracle.select_blocks(pooled, np.array([4]), 5, ref_compat=True)[0, 0].tolist() == [0, 1, 2, 4, -1]


def test_forecast_score_is_the_raw_dot_product():
    rng = np.random.default_rng(0)
    forecast, k1 = rng.standard_normal((3, 2, 8)), rng.standard_normal((5, 2, 8))
    score = oracle.forecast_score(forecast, k1, None)
    for m, r, j in np.ndindex(2, 3, 5):
        np.testing.assert_allclose(score[m, r, j], sum(forecast[r, m] * k1[j, m]), rtol=1e-10)


@pytest.mark.parametrize("factor", [0.25, 1.7, 1024.0])
def test_scaling_the_forecast_changes_no_selection(factor: float):
    rng = np.random.default_rng(0)
    forecast, k1, block = rng.standard_normal((1, 2, 8)), rng.standard_normal((499, 2, 8)), np.array([124])

    def ids(f):
        pooled = oracle.pool_blocks(oracle.forecast_score(f, k1, None), block, 125, INIT, LOCAL)
        return oracle.select_blocks(pooled, block, TOTAL)

    np.testing.assert_array_equal(ids(factor * forecast), ids(forecast))


def test_forecast_mask_is_by_the_start_of_the_window():
    rows = np.arange(64)
    score = oracle.forecast_score(np.ones((64, 1, 2)), np.ones((3, 1, 2)), rows)
    first = [int(np.flatnonzero(np.isfinite(score[0, :, j]))[0]) for j in range(3)]
    assert first == [0, 16, 32]
    seen = oracle.visible_stage1(rows, 64, 3)
    assert int(np.flatnonzero(seen >= 2)[0]) == 47


@pytest.mark.parametrize(("offset", "valid"), [(47, 96), (48, 95), (63, 95)])
def test_quirk_q2_loses_a_place_to_the_next_block(offset: int, valid: int):
    query_block = 100
    row = np.array([64 * query_block + offset])
    rng = np.random.default_rng(0)
    forecast, k1 = np.ones((1, 1, 4)), rng.random((479, 1, 4))
    k1[4 * query_block + 3] = 50
    pooled = oracle.pool_blocks(oracle.forecast_score(forecast, k1, row), row // 64, 120, INIT, LOCAL)
    compat = oracle.select_blocks(pooled, row // 64, TOTAL, ref_compat=True)
    clean = oracle.select_blocks(pooled, row // 64, TOTAL)
    assert (compat >= 0).sum() == valid
    assert (clean >= 0).sum() == 96
    assert set(compat[compat >= 0].tolist()) <= set(clean.ravel().tolist())


def test_teacher_grid_alignment():
    """Kernel 2, stride 1: start rule j <= r; windows of 17 with stride 16 and one -inf before; cut to n1, or filled."""
    rng = np.random.default_rng(0)
    t = 80
    k = rng.standard_normal((t, 2, 8))
    fine = oracle.compress_keys(k, 2, 1)
    visible = np.minimum(np.arange(t) + 1, len(fine))
    teacher = oracle.stage1_score(rng.standard_normal((t, 4, 8)), fine, visible)
    assert [(row > 0).sum() for row in teacher[0]] == [min(r + 1, 79) for r in range(t)]
    n1 = oracle.num_compressed(t)
    aligned = oracle.align_teacher(teacher, 16, n1)
    assert aligned.shape == (2, t, 4)
    for j in range(n1):
        np.testing.assert_array_equal(aligned[..., j], teacher[..., max(0, 16 * j - 1) : 16 * j + 16].max(axis=-1))
    np.testing.assert_array_equal(oracle.align_teacher(teacher, 16, 7)[..., 5:], 0)
    np.testing.assert_array_equal(oracle.align_teacher(teacher, 1, 79), teacher)
