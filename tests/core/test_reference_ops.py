"""The operations' definition against the oracle: awkward contents (docs/semantics.md 13.8 - 13.26, 13.36 - 13.39)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda_jax.config import ModelConfig
from sparda_jax.pallas_kernels.block_selection import (
    block_mask,
    forecast_scores,
    infllm_scores,
    pool_to_blocks,
    select_blocks,
)
from sparda_jax.pallas_kernels.compressed_keys import compress_windows, num_windows
from sparda_jax.pallas_kernels.sparse_attention import list_attention, masked_attention
from sparda_jax.selection import visible_windows
from tests import oracle

# One shape for all: 2 KV heads of 16, a group of 4, 12 blocks.
KV_HEADS, GROUP, DIM, BLOCKS = 2, 4, 16, 12
WINDOWS, CAPACITY = 4 * BLOCKS, 64 * BLOCKS
CONFIG = ModelConfig.from_hf(oracle.toy_config())
SEEDS = st.integers(0, 2**32 - 1)
# What scores may look like: ordinary, all negative, drawn from few values (ties), with infinities among them.
SHAPES_OF_SCORES = st.sampled_from(["normal", "negative", "ties", "infinite", "equal"])

compress = jax.jit(compress_windows)
forecast = jax.jit(forecast_scores)
infllm = jax.jit(infllm_scores)
pool = jax.jit(pool_to_blocks, static_argnums=1)
select = jax.jit(select_blocks, static_argnames=("init_blocks", "local_blocks", "num_selected"))
masked = jax.jit(masked_attention)
listed = jax.jit(functools.partial(list_attention, block_size=64))


def make_scores(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape)
    if kind == "negative":
        x = -1 - np.abs(x)
    elif kind == "ties":
        x = rng.integers(-2, 3, shape).astype(float)
    elif kind == "infinite":
        x = np.where(rng.random(shape) < 0.2, -np.inf, x)
    elif kind == "equal":
        x = np.full(shape, 3.0)
    return x.astype(np.float32)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def test_window_counts():
    """docs/semantics.md 13.8, and every length up to 130."""
    assert num_windows(jnp.array([31, 32, 47, 48, 63, 64])).tolist() == [0, 1, 1, 2, 2, 3]
    lengths = np.arange(131)
    assert num_windows(jnp.asarray(lengths)).tolist() == [oracle.num_compressed(n) for n in range(131)]


def test_visible_windows_are_those_that_end_at_or_before():
    """docs/semantics.md 13.12, and the rule for every position; the count does not depend on how long the prompt is."""
    at = jnp.array([[0, 14, 15, 30, 31, 46, 47, 63]])
    assert visible_windows(at, CONFIG).tolist() == [[0, 0, 0, 0, 1, 1, 2, 3]]
    rows = np.arange(CAPACITY)
    found = np.asarray(visible_windows(jnp.asarray(rows)[None], CONFIG))[0]
    for length in (79, 130, CAPACITY):
        n1 = oracle.num_compressed(length)
        np.testing.assert_array_equal(found[:length], oracle.visible_stage1(rows[:length], length, n1))
    assert found.tolist() == [oracle.num_compressed(r + 1) for r in range(CAPACITY)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_compressed_keys(dtype):
    """All windows, each sequence its own, NaN behind the sequences' ends (docs/semantics.md 13.8)."""
    rng = np.random.default_rng(0)
    k = jnp.asarray(normal(rng, 2, KV_HEADS, CAPACITY, DIM), dtype)
    lengths = (130, CAPACITY)
    k = jnp.where(jnp.arange(CAPACITY)[:, None] < jnp.array(lengths)[:, None, None, None], k, jnp.nan)
    found = compress(k, jnp.broadcast_to(jnp.arange(WINDOWS), (2, WINDOWS)))
    assert found.dtype == dtype
    numerics = oracle.Numerics(bf16=dtype == jnp.bfloat16)
    for lane, length in enumerate(lengths):
        expected = oracle.compress_keys(np.asarray(k[lane, :, :length], np.float64).swapaxes(0, 1), numerics=numerics)
        ours = np.asarray(found[lane, :, : len(expected)], np.float64).swapaxes(0, 1)
        if dtype == jnp.bfloat16:
            # The sum of 32 bf16 numbers in float32 may round the other way on a boundary.
            assert np.mean(ours == expected) > 0.999
        np.testing.assert_allclose(ours, expected, rtol=2**-7 if dtype == jnp.bfloat16 else 0, atol=1e-6)


def test_compressed_keys_are_summed_in_float32():
    """256 followed by small numbers: a bf16 sum would lose each of them (docs/semantics.md 13.11)."""
    window = np.full(32, 0.75)
    window[0] = 256
    k = jnp.asarray(np.broadcast_to(window[None, None, :, None], (1, 1, 32, 8)), jnp.bfloat16)
    np.testing.assert_array_equal(compress(k, jnp.array([[0]])), jnp.bfloat16(window.mean()))
    assert float(jnp.bfloat16(window.mean())) != 256 / 32


@given(seed=SEEDS, kind=SHAPES_OF_SCORES, spike=st.integers(0, WINDOWS - 1))
def test_pooling(seed: int, kind: str, spike: int):
    """The oracle's blocks without its forcing; and one spike appears in its own block and the one it reaches into."""
    rng = np.random.default_rng(seed)
    scores = make_scores(kind, rng, (1, KV_HEADS, 4, WINDOWS))
    nowhere = np.full(4, -1000)
    expected = oracle.pool_blocks(scores[0], nowhere, BLOCKS, 0, 0)
    np.testing.assert_array_equal(np.asarray(pool(scores, 4))[0], expected)
    lone = np.full((1, KV_HEADS, 4, WINDOWS), -1.0, np.float32)
    lone[..., spike] = 5
    blocks = {spike // 4} | ({spike // 4 + 1} if spike % 4 == 3 and spike // 4 + 1 < BLOCKS else set())
    assert set(np.flatnonzero(np.asarray(pool(lone, 4))[0, 0, 0] == 5)) == blocks


def test_pooling_of_tokens():
    """InfiniGen's grid: block b is tokens 64b - 1 .. 64b + 63 (docs/semantics.md 13.20)."""
    rng = np.random.default_rng(0)
    scores = normal(rng, 1, KV_HEADS, 1, CAPACITY)
    expected = oracle.pool_blocks(scores[0], np.array([-1000]), BLOCKS, 0, 0, ratio=64)
    np.testing.assert_array_equal(np.asarray(pool(scores, 64))[0], expected)


def ours_and_the_oracles(
    scores: np.ndarray, query_block: np.ndarray, *, init: int = 1, local: int = 2, total: int = 6
) -> tuple[np.ndarray, np.ndarray]:
    """Selections from block scores `[kv_heads, n, blocks]`; the oracle forces by its own rule."""
    found = select(
        scores[None], jnp.asarray(query_block)[None], init_blocks=init, local_blocks=local, num_selected=total
    )
    block = np.arange(scores.shape[-1])
    distance = query_block[:, None] - block
    forced = (block < init) | ((distance >= 0) & (distance <= local))
    expected = oracle.select_blocks(np.where(forced, np.inf, scores), query_block, total)
    return np.asarray(found)[0], expected


@given(seed=SEEDS, kind=SHAPES_OF_SCORES)
def test_selection(seed: int, kind: str):
    """Every query block, ties to the lowest block, -1 where fewer blocks exist than are selected."""
    query_block = np.arange(BLOCKS)
    scores = make_scores(kind, np.random.default_rng(seed), (KV_HEADS, BLOCKS, BLOCKS))
    found, expected = ours_and_the_oracles(scores, query_block)
    np.testing.assert_array_equal(found, expected)
    for row, ids in enumerate(found.swapaxes(0, 1)):
        assert np.all((ids >= 0).sum(axis=-1) == min(6, row + 1))
        assert set(range(max(0, row - 2), row + 1)) | {0} <= set(ids[0])


@given(seed=SEEDS)
def test_future_blocks_never_take_a_place(seed: int):
    """Garbage in the scores of blocks after the query, NaN and +inf included, changes nothing (Q2, clean)."""
    rng = np.random.default_rng(seed)
    query_block = np.arange(BLOCKS)
    scores = make_scores("normal", rng, (KV_HEADS, BLOCKS, BLOCKS))
    future = np.arange(BLOCKS) > query_block[:, None]
    garbage = np.where(future, rng.choice([np.nan, np.inf, 1e30], scores.shape), scores).astype(np.float32)
    np.testing.assert_array_equal(
        ours_and_the_oracles(garbage, query_block)[0], ours_and_the_oracles(scores, query_block)[0]
    )


def test_infinite_scores_do_not_push_out_forced_blocks():
    """A dot product that overflowed is only the largest score there is; the query's own block stays."""
    scores = np.zeros((KV_HEADS, 1, BLOCKS), np.float32)
    scores[:, :, 1:8] = np.inf
    found, _ = ours_and_the_oracles(scores, np.array([BLOCKS - 1]))
    np.testing.assert_array_equal(found[0, 0], [0, 1, 2, 9, 10, 11])


def test_ties_go_to_the_lowest_block():
    scores = np.zeros((KV_HEADS, 1, BLOCKS), np.float32)
    found, _ = ours_and_the_oracles(scores, np.array([BLOCKS - 1]))
    np.testing.assert_array_equal(found[0, 0], [0, 1, 2, 9, 10, 11])
    scores[:, :, [4, 6, 8]] = 1
    found, _ = ours_and_the_oracles(scores, np.array([BLOCKS - 1]))
    np.testing.assert_array_equal(found[0, 0], [0, 4, 6, 9, 10, 11])


def test_published_width():
    """120 blocks: 96 are returned, sorted, 34 forced; 50 blocks: 21 valid ones at block 20 (section 13.21, 13.22)."""
    rng = np.random.default_rng(0)
    found, expected = ours_and_the_oracles(normal(rng, 1, 3, 120), np.array([119, 40, 5]), local=32, total=96)
    np.testing.assert_array_equal(found, expected)
    assert np.all(np.diff(found[0, 0]) > 0)
    assert {0, *range(87, 120)} <= set(found[0, 0])
    assert found.shape == (1, 3, 96)
    assert found[0, 1].tolist() == [*range(41), *[-1] * 55]
    assert found[0, 2].tolist() == [*range(6), *[-1] * 90]
    few, _ = ours_and_the_oracles(normal(rng, 1, 1, 50), np.array([20]), local=32, total=96)
    assert few.shape == (1, 1, 50)
    assert few[0, 0].tolist() == [*range(21), *[-1] * 29]


def test_forcing_at_block_40():
    """Blocks 0 and 8..40 whatever their score: 34 of them (docs/semantics.md 13.18)."""
    scores = np.zeros((1, 1, 60), np.float32)
    scores[..., 1:8] = 1
    found, _ = ours_and_the_oracles(scores, np.array([40]), local=32, total=34)
    assert found[0, 0].tolist() == [0, *range(8, 41)]


@functools.cache
def score_inputs(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return normal(rng, 131, KV_HEADS, GROUP, DIM), normal(rng, 131, KV_HEADS, DIM), normal(rng, KV_HEADS, WINDOWS, DIM)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e38])
def test_scores_of_every_length(garbage: float):
    """Positions 0..130: the oracle's scores where a window is complete, -inf behind, whatever lies there."""
    q, f, k1 = score_inputs(0)
    rows = np.arange(131)
    visible = visible_windows(jnp.asarray(rows)[None], CONFIG)
    n1 = oracle.num_compressed(131)
    dirty = k1.copy()
    dirty[:, n1:] = garbage
    keys = k1[:, :n1].swapaxes(0, 1).astype(np.float64)
    seen = np.arange(WINDOWS) < np.asarray(visible)[0][:, None]
    standard = oracle.stage1_score(
        q.reshape(131, -1, DIM).astype(np.float64), keys, oracle.visible_stage1(rows, 131, n1)
    )
    raw = np.einsum("tmd,jmd->mtj", f.astype(np.float64), keys)
    for found, expected in (
        (infllm(q[None], dirty[None], visible), standard),
        (forecast(f[None], dirty[None], visible), raw),
    ):
        found = np.asarray(found)[0]
        assert np.all(np.isneginf(found) == ~seen)
        np.testing.assert_allclose(found[..., :n1][:, seen[:, :n1]], expected[:, seen[:, :n1]], rtol=0, atol=1e-5)


def test_infllm_rows_sum_to_the_group():
    """docs/semantics.md 13.14: each head's softmax sums to 1, a row that sees nothing to 0."""
    q, _, k1 = score_inputs(1)
    visible = visible_windows(jnp.arange(131)[None], CONFIG)
    found = np.asarray(infllm(q[None], k1[None], visible))[0]
    total = np.where(np.isfinite(found), found, 0).sum(axis=-1)
    np.testing.assert_allclose(total[:, 31:], GROUP, rtol=1e-5)
    np.testing.assert_array_equal(total[:, :31], 0)


def test_infllm_survives_huge_logits():
    """A softmax without its maximum taken out would overflow at 1e4."""
    q, _, k1 = score_inputs(2)
    visible = visible_windows(jnp.arange(131)[None], CONFIG)
    found = np.asarray(infllm(q[None] * 1e4, k1[None], visible))[0]
    assert np.all(np.isfinite(found[:, 31:, 0]))
    np.testing.assert_allclose(np.where(np.isfinite(found), found, 0).sum(axis=-1)[:, 31:], GROUP, rtol=1e-5)


def test_heads_are_summed_after_their_softmax():
    """One head with a sharp opinion, three with weak ones: before or after matters (docs/semantics.md 13.16)."""
    q = np.zeros((1, 1, 1, GROUP, DIM), np.float32)
    k1 = np.zeros((1, 1, WINDOWS, DIM), np.float32)
    k1[0, 0, 0, 0], k1[0, 0, 1, 1] = 1, 1
    q[0, 0, 0, 0, 0] = 400
    q[0, 0, 0, 1:, 1] = 40
    found = np.asarray(infllm(q, k1, jnp.array([[2]])))[0, 0, 0, :2]
    np.testing.assert_allclose(found, [1, 3], atol=1e-3)
    assert (q[0, 0, 0] @ k1[0, 0, :2].T).sum(axis=0).argmax() == 0


@given(seed=SEEDS, power=st.integers(-8, 8))
def test_forecast_score_is_the_raw_dot(seed: int, power: int):
    """Scaling F by a power of two scales each bf16 score exactly, so it never changes a selection (section 13.26)."""
    rng = np.random.default_rng(seed)
    f = jnp.asarray(normal(rng, 1, 131, KV_HEADS, DIM), jnp.bfloat16)
    k1 = jnp.asarray(normal(rng, 1, KV_HEADS, WINDOWS, DIM), jnp.bfloat16)
    visible = visible_windows(jnp.arange(600, 731)[None], CONFIG)
    plain, scaled = forecast(f, k1, visible), forecast(f * jnp.bfloat16(2.0**power), k1, visible)
    assert plain.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(plain) * 2.0**power, scaled)


@functools.cache
def attention_inputs(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [n, KV heads, group, D], k, v [KV heads, capacity, D]; 131 queries for 131 positions."""
    rng = np.random.default_rng(seed)
    q = normal(rng, 131, KV_HEADS, GROUP, DIM)
    return q, normal(rng, KV_HEADS, CAPACITY, DIM), normal(rng, KV_HEADS, CAPACITY, DIM)


def random_ids(rng: np.random.Generator, query_block: np.ndarray, width: int = 6) -> np.ndarray:
    """For each (KV head, query) some blocks up to its own, ascending, -1 behind; the own one always."""
    ids = np.full((KV_HEADS, len(query_block), width), -1, np.int32)
    for m in range(KV_HEADS):
        for row, own in enumerate(query_block):
            others = rng.permutation(own)[: rng.integers(0, width)]
            chosen = np.sort(np.append(others, own))[-width:]
            ids[m, row, : len(chosen)] = chosen
    return ids


@given(seed=SEEDS)
def test_masked_attention(seed: int):
    """Random sets per token and KV head against the oracle; NaN in rows that hold nothing (section 13.36 - 13.39)."""
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, CAPACITY - 131))
    total = start + 131
    q, k, v = attention_inputs(seed % 3)
    positions = np.arange(start, total)
    ids = random_ids(rng, positions // 64)
    keys = np.asarray(block_mask(jnp.asarray(ids), BLOCKS)).repeat(64, axis=-1)
    allowed = keys & (np.arange(CAPACITY) <= positions[:, None])
    stored = np.broadcast_to(np.arange(CAPACITY) < total, (1, KV_HEADS, CAPACITY))
    dirty = [np.where(stored[0][..., None], x, np.nan) for x in (k, v)]
    found = np.asarray(masked(q[None], dirty[0][None], dirty[1][None], allowed[None], stored))[0]
    keys, values = (x[:, :total].swapaxes(0, 1).astype(np.float64) for x in (k, v))
    expected = oracle.block_sparse_attention(q.reshape(131, -1, DIM).astype(np.float64), keys, values, ids)
    np.testing.assert_allclose(found.reshape(131, -1, DIM), expected, rtol=0, atol=2e-6)


@given(seed=SEEDS)
def test_list_attention_is_masked_attention_is_the_oracle(seed: int):
    """A ragged batch of 4; lengths around block boundaries; all that is not listed or not stored is NaN."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([1, 2, 63, 64, 65, 127, 128, 129, 640, 700, CAPACITY - 1, CAPACITY], 4)
    q, k, v = attention_inputs(seed % 3)
    q = q[None, :4].swapaxes(0, 1)
    ids = np.stack([random_ids(rng, np.array([(n - 1) // 64]))[:, 0] for n in lengths])
    chosen = np.asarray(block_mask(jnp.asarray(ids), BLOCKS)).repeat(64, axis=-1)
    stored = np.arange(CAPACITY) < lengths[:, None, None]
    used = (chosen & stored)[..., None]
    dirty_k, dirty_v = (np.where(used, x, np.nan).astype(np.float32) for x in (k, v))
    found = np.asarray(listed(q, dirty_k, dirty_v, jnp.asarray(ids), jnp.asarray(lengths)))
    everywhere = np.broadcast_to(stored, (4, KV_HEADS, CAPACITY))
    batch_k, batch_v = (np.broadcast_to(x, (4, *x.shape)) for x in (k, v))
    by_mask = np.asarray(masked(q, batch_k, batch_v, (chosen & stored)[:, :, None], everywhere))
    np.testing.assert_allclose(found, by_mask, rtol=0, atol=1e-6)
    for lane, n in enumerate(lengths):
        query = q[lane].reshape(1, -1, DIM).astype(np.float64)
        keys, values = (x[:, :n].swapaxes(0, 1).astype(np.float64) for x in (k, v))
        expected = oracle.block_sparse_attention(query, keys, values, ids[lane][:, None])
        np.testing.assert_allclose(found[lane].reshape(1, -1, DIM), expected, rtol=0, atol=2e-6)


def test_row_0_reads_itself_only():
    q, k, v = attention_inputs(0)
    lengths = jnp.array([1])
    ids = jnp.broadcast_to(jnp.array([0, -1]), (1, KV_HEADS, 2))
    found = listed(q[None, :1], k[None], v[None], ids, lengths)
    expected = np.broadcast_to(v[None, None, :, 0][:, :, :, None], found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_row_that_allows_nothing_gives_zeros():
    q, k, v = attention_inputs(0)
    nothing = np.zeros((1, KV_HEADS, 131, CAPACITY), bool)
    empty = np.zeros((1, KV_HEADS, CAPACITY), bool)
    found = masked(q[None], np.full_like(k[None], np.nan), np.full_like(v[None], np.nan), nothing, empty)
    np.testing.assert_array_equal(found, 0)


def test_kv_heads_keep_their_own_sets():
    """Head 0 reads block 0, head 1 block 2: moving the values of the other blocks changes nothing (section 13.38)."""
    q, k, v = attention_inputs(0)
    ids = jnp.array([[[0, 3], [2, 3]]])
    length = jnp.array([4 * 64])
    base = listed(q[None, :1], k[None], v[None], ids, length)
    moved = v.copy()
    moved[0, 64:192] += 7
    moved[1, 0:128] += 7
    np.testing.assert_array_equal(listed(q[None, :1], k[None], moved[None], ids, length), base)
    moved[1, 128] += 7
    changed = np.asarray(listed(q[None, :1], k[None], moved[None], ids, length)) != np.asarray(base)
    assert not changed[:, :, 0].any()
    assert changed[:, :, 1].any()


def test_a_mask_takes_ids_in_any_order():
    ids = jnp.array([5, -1, 2, 5, -1, 0])
    assert np.flatnonzero(block_mask(ids, 8)).tolist() == [0, 2, 5]
    assert not block_mask(jnp.array([-1, -1]), 8).any()
