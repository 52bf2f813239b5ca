"""The operations in bf16 against outputs of the reference's GPU kernels, each fed with the golden input of its step."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

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
from tests.oracle.golden import Golden, allowed_by_ties, load_golden, tie_rows

KINDS = ("g16", "sparda")
TOTAL, INIT, LOCAL = 6, 1, 2
# The prompt has 1000 tokens in 16 blocks; the decode step is at position 2048, whose block is the 33rd.
T, N1, BLOCKS = 1000, 61, 16
ROWS = np.arange(T)
KEYS, KEYS_N1, KEYS_BLOCKS = 2048, 127, 33
CONFIG = ModelConfig.from_hf(oracle.toy_config())


@pytest.fixture(scope="module")
def prefill() -> Golden:
    return load_golden("prefill_T1000")


@pytest.fixture(scope="module")
def step() -> Golden:
    return load_golden("decode")


def heads_first(x: np.ndarray, rows: int) -> jnp.ndarray:
    """bf16 [rows, heads, head_dim] -> [heads, rows, head_dim], filled up with NaN: what is unused may hold anything."""
    filled = np.full((rows, *x.shape[1:]), np.nan, np.float32)
    filled[: len(x)] = x
    return jnp.asarray(filled.swapaxes(0, 1), jnp.bfloat16)


def grouped(q: np.ndarray) -> jnp.ndarray:
    """[rows, 32, 128] -> bf16 [rows, 2, 16, 128]."""
    return jnp.asarray(q.reshape(len(q), 2, 16, 128), jnp.bfloat16)


def as_bf16(x) -> np.ndarray:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def pooled_as_golden(scores: np.ndarray, query_block: np.ndarray, blocks: int) -> np.ndarray:
    """Our block scores with the forced blocks set to +inf, as the golden files hold them."""
    filled = np.full((*scores.shape[:-1], 4 * blocks), -np.inf, np.float32)
    filled[..., : scores.shape[-1]] = scores
    pooled = np.asarray(pool_to_blocks(jnp.asarray(filled), 4))
    distance = query_block[:, None] - np.arange(blocks)
    forced = (np.arange(blocks) < INIT) | ((distance >= 0) & (distance <= LOCAL))
    return np.where(forced, np.inf, pooled)


def selected(pooled: np.ndarray, query_block: np.ndarray) -> np.ndarray:
    scores = jnp.asarray(np.where(np.isposinf(pooled), 0, pooled))[None]
    ids = select_blocks(
        scores, jnp.asarray(query_block)[None], init_blocks=INIT, local_blocks=LOCAL, num_selected=TOTAL
    )
    return np.asarray(ids)[0]


def test_compressed_keys_are_equal(prefill: Golden, step: Golden):
    assert int(num_windows(jnp.array(T))) == N1
    k = heads_first(prefill["k"], 64 * BLOCKS)[None]
    found = compress_windows(k, jnp.arange(N1)[None])[0]
    np.testing.assert_array_equal(np.asarray(found, np.float32).swapaxes(0, 1), prefill["compressed_k"])
    for b in range(2):
        found = compress_windows(heads_first(step["k"][b], KEYS)[None], jnp.arange(KEYS_N1)[None])[0]
        expected = step["compressed_k"][KEYS_N1 * b : KEYS_N1 * (b + 1)]
        np.testing.assert_array_equal(np.asarray(found, np.float32).swapaxes(0, 1), expected)


def test_prefill_infllm_scores(prefill: Golden):
    rows = prefill["q_rows"]
    k1 = heads_first(prefill["compressed_k"], 4 * BLOCKS)[None]
    visible = visible_windows(jnp.asarray(rows)[None], CONFIG)
    found = np.asarray(infllm_scores(grouped(prefill["q"])[None], k1, visible))[0, :, :, :N1]
    expected = prefill["stage1_g16"][:, rows]
    np.testing.assert_array_equal(np.isfinite(found), expected > 0)
    np.testing.assert_allclose(np.where(np.isfinite(found), found, 0), expected, rtol=2**-8, atol=1e-30)
    assert np.mean(as_bf16(np.where(np.isfinite(found), found, 0)) == expected) > 0.999


def test_prefill_forecast_scores(prefill: Golden):
    """Equal where our rule sees a window; the reference also sees later ones, of blocks qb - 1 to qb + 1."""
    k1 = heads_first(prefill["compressed_k"], 4 * BLOCKS)[None]
    visible = visible_windows(jnp.asarray(ROWS)[None], CONFIG)
    f = jnp.asarray(prefill["q_forecast"], jnp.bfloat16)[None]
    found = np.asarray(forecast_scores(f, k1, visible))[0, :, :, :N1]
    expected = prefill["stage1_sparda"]
    seen = np.isfinite(found)
    assert np.all(np.isfinite(expected[seen]))
    np.testing.assert_allclose(found[seen], expected[seen], rtol=2**-7, atol=1e-5)
    assert np.mean(as_bf16(found)[seen] == expected[seen]) > 0.99
    block = np.argwhere(np.isfinite(expected) & ~seen)
    assert len(block) > 1000
    assert np.all(block[:, 2] // 4 >= block[:, 1] // 64 - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_block_scores_are_equal(prefill: Golden, kind: str):
    found = pooled_as_golden(prefill[f"stage1_{kind}"], ROWS // 64, BLOCKS)
    np.testing.assert_array_equal(found, prefill[f"pooled_{kind}"])


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_selection(prefill: Golden, kind: str):
    """Our choice is one that the scores permit, and the reference's wherever it neither ties nor spends a place on a
    block after the query (quirk Q2, Forecast only).
    """
    query_block = ROWS // 64
    future = np.arange(BLOCKS) > query_block[:, None]
    pooled = np.where(future, -np.inf, prefill[f"pooled_{kind}"])
    ids, expected = selected(prefill[f"pooled_{kind}"], query_block), prefill[f"topk_{kind}"]
    assert allowed_by_ties(pooled, ids, query_block, TOTAL).all()
    lost = (expected >= 0).sum(axis=-1) < np.minimum(query_block + 1, TOTAL)
    assert np.all((ids >= 0).sum(axis=-1) == np.minimum(query_block + 1, TOTAL))
    assert np.all(ROWS[lost.any(axis=0)] % 64 >= 48)
    assert lost.any() == (kind == "sparda")
    # Where no more blocks exist than are selected there is nothing to tie.
    settled = ~(tie_rows(pooled, TOTAL) & (query_block >= TOTAL)) & ~lost
    assert settled.mean() > 0.8
    np.testing.assert_array_equal(ids[settled], expected[settled])


@pytest.mark.parametrize("kind", KINDS)
def test_own_scores_choose_as_the_reference(prefill: Golden, kind: str):
    """All steps in a row on the golden q, k and Forecast: float32 scores, so a bf16 tie may go either way."""
    rows = prefill["q_rows"]
    k = heads_first(prefill["k"], 64 * BLOCKS)[None]
    k1 = compress_windows(k, jnp.arange(4 * BLOCKS)[None])
    visible = visible_windows(jnp.asarray(rows)[None], CONFIG)
    if kind == "g16":
        scores = infllm_scores(grouped(prefill["q"])[None], k1, visible)
    else:
        scores = forecast_scores(jnp.asarray(prefill["q_forecast"][rows], jnp.bfloat16)[None], k1, visible)
    ids = selected(np.asarray(pool_to_blocks(scores, 4))[0], rows // 64)
    future = np.arange(BLOCKS) > (rows // 64)[:, None]
    pooled = np.where(future, -np.inf, prefill[f"pooled_{kind}"][:, rows])
    assert allowed_by_ties(pooled, ids, rows // 64, TOTAL).mean() > 0.999


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_attention(prefill: Golden, kind: str):
    rows = prefill["attn_rows"]
    q = grouped(prefill["q"][np.isin(prefill["q_rows"], rows)])[None]
    k, v = (heads_first(prefill[name], 64 * BLOCKS)[None] for name in ("k", "v"))
    keys = np.asarray(block_mask(jnp.asarray(prefill[f"topk_{kind}"][:, rows]), BLOCKS)).repeat(64, axis=-1)
    allowed = (keys & (np.arange(64 * BLOCKS) <= rows[:, None]))[None]
    stored = np.broadcast_to(np.arange(64 * BLOCKS) < T, (1, 2, 64 * BLOCKS))
    found = masked_attention(q, k, v, jnp.asarray(allowed), jnp.asarray(stored))
    assert found.dtype == jnp.bfloat16
    found, expected = np.asarray(found[0], np.float32).reshape(len(rows), 32, 128), prefill[f"attn_{kind}"]
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=0.002)


def decode_scores(step: Golden, kind: str) -> np.ndarray:
    """[kv_heads, sequences, n1], float32."""
    k1 = jnp.stack(
        [heads_first(step["compressed_k"][KEYS_N1 * b : KEYS_N1 * (b + 1)], 4 * KEYS_BLOCKS) for b in range(2)]
    )
    visible = jnp.full((2, 1), KEYS_N1)
    if kind == "g16":
        found = infllm_scores(grouped(step["q"])[:, None], k1, visible)
    else:
        found = forecast_scores(jnp.asarray(step["q_forecast"], jnp.bfloat16)[:, None], k1, visible)
    return np.asarray(found)[:, :, 0, :KEYS_N1].swapaxes(0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_scores(step: Golden, kind: str):
    found, expected = decode_scores(step, kind), step[f"stage1_{kind}"][..., :KEYS_N1]
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-5)
    assert np.mean(as_bf16(found) == expected) > 0.98


@pytest.mark.parametrize("kind", KINDS)
def test_decode_selection(step: Golden, kind: str):
    query_block = np.full(2, KEYS // 64)
    pooled, expected = step[f"pooled_{kind}"], np.sort(step[f"topk_{kind}"], axis=-1)
    found = pooled_as_golden(step[f"stage1_{kind}"][..., :KEYS_N1], query_block, KEYS_BLOCKS)
    np.testing.assert_array_equal(found, pooled)
    settled = ~tie_rows(pooled, TOTAL)
    assert settled.any()
    for scores in (found, pooled_as_golden(decode_scores(step, kind), query_block, KEYS_BLOCKS)):
        ids = selected(scores, query_block)
        assert allowed_by_ties(pooled, ids, query_block, TOTAL).all()
        np.testing.assert_array_equal(ids[settled], expected[settled])


def test_decode_attention(step: Golden):
    """Dense over the first 2043 of 2048 keys, by a list of all blocks and by a mask."""
    q = grouped(step["q"])[:, None]
    k, v = (jnp.stack([heads_first(step[name][b, :2043], KEYS) for b in range(2)]) for name in ("k", "v"))
    ids = jnp.broadcast_to(jnp.arange(KEYS // 64), (2, 2, KEYS // 64))
    stored = jnp.broadcast_to(jnp.arange(KEYS) < 2043, (2, 2, KEYS))
    for found in (
        list_attention(q, k, v, ids, jnp.full(2, 2043), 64),
        masked_attention(q, k, v, stored[:, :, None], stored),
    ):
        found = np.asarray(found, np.float32).reshape(2, 1, 32, 128)
        np.testing.assert_allclose(found, step["fa_kvcache"], rtol=2**-7, atol=0.001)
