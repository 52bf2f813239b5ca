"""The modes that are there for comparisons: StreamingLLM and Quest, against slow definitions; who refuses them."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.cache import LayerCache
from sparda_jax.config import ConfigError
from sparda_jax.decode_plan import Backends, DecodePlan, Fetch
from sparda_jax.lane_checks import check_lanes
from sparda_jax.model import Projections
from sparda_jax.pallas_kernels.block_selection import bits_to_ids
from sparda_jax.prefill import Chunk
from sparda_jax.selection import Mode, QueryContext, block_scores
from sparda_jax.serve.launch import load as load_server
from sparda_jax.serve.settings import Settings, SettingsError
from tests.core.support import Session, alone, tokens, toy, whole

PROMPT, STEPS = 620, 30


def test_streaming_llm_reads_the_first_block_and_the_newest() -> None:
    """6 blocks: the first, and 5 up to the query's own; in the prompt and behind it."""
    found = alone(Mode.STREAMING_LLM, PROMPT, STEPS)
    for ids in found.selected:
        assert ids is not None
        for position in range(PROMPT + STEPS):
            own = position // 64
            expected = sorted({0, *range(max(0, own - 4), own + 1)})
            for of_head in ids[:, position]:
                assert of_head[of_head >= 0].tolist() == expected


def test_streaming_llm_by_bits_is_the_same() -> None:
    config = toy().decoder.config.sparse
    num_new = jnp.asarray([700, 3])
    chunk = Chunk(
        start=jnp.zeros(2, int), num_new=num_new, sparse=jnp.ones(2, bool), config=config, backends=Backends()
    )
    query_block = jnp.broadcast_to(jnp.arange(700) // 64, (2, 700))
    found = np.asarray(bits_to_ids(chunk.newest(query_block, 16, 2), 6))
    expected = whole(Mode.STREAMING_LLM, 700).selected[0]
    assert expected is not None
    np.testing.assert_array_equal(found[0], expected[:, :700])
    np.testing.assert_array_equal(found[1, :, :3], expected[:, :3])
    assert (found[1, :, 3:] == -1).all()


def test_quest_scores_are_the_bound() -> None:
    """Channel by channel; rows that nothing has written are NaN, and blocks without a key score 0."""
    config = toy("wide").decoder.config
    rng = np.random.default_rng(17)
    heads, kv_heads, dim, blocks, positions = config.num_heads, config.num_kv_heads, config.head_dim, 5, (200, 63, 64)
    q = rng.standard_normal((3, 1, heads, dim))
    k = rng.standard_normal((3, kv_heads, blocks * 64, dim))
    want = np.zeros((3, kv_heads, blocks))
    for lane, position in enumerate(positions):
        k[lane, :, position + 1 :] = np.nan
        for head in range(heads):
            m = head // (heads // kv_heads)
            for b in range(position // 64 + 1):
                keys = k[lane, m, 64 * b : min(64 * b + 64, position + 1)]
                products = q[lane, 0, head] * keys
                want[lane, m, b] += products.max(axis=0).sum()
    query = {"layer_index": 0, "layer": None, "previous": None, "cos": None, "sin": None, "decode": True, "skew": None}
    current = Projections(
        **{name: cast(Any, None) for name in ("normed", "k", "v", "q_future", "q_curr")}, q=jnp.asarray(q, jnp.float32)
    )
    context = QueryContext(current=current, positions=jnp.asarray(positions)[:, None], **cast(Any, query))
    cache = LayerCache(k=jnp.asarray(k, jnp.float32), v=cast(Any, None), compressed_k=cast(Any, None))
    found = block_scores(Mode.QUEST, config, context, cache)
    np.testing.assert_allclose(np.asarray(found)[:, :, 0], want, rtol=1e-4, atol=1e-4)


def test_quest_is_dense_in_the_prompt_and_sparse_behind_it() -> None:
    session = Session(toy(), Mode.QUEST, 1, poison=True)
    (prompt,) = session.feed([tokens()[:PROMPT]])
    np.testing.assert_allclose(prompt.logits, whole(Mode.DENSE, PROMPT).logits, rtol=0, atol=1e-4)
    assert prompt.selected == (None, None)
    np.testing.assert_array_equal(prompt.blocks_read, prompt.blocks_visible)
    (answer,) = session.decode(tokens()[None, PROMPT : PROMPT + STEPS])
    own = np.arange(PROMPT, PROMPT + STEPS) // 64
    for ids in answer.selected:
        assert ids is not None
        assert (ids >= 0).sum(axis=-1).tolist() == [[6] * STEPS] * 2
        assert (ids == own[:, None]).any(axis=-1).all()
        assert (ids == 0).any(axis=-1).all()
    assert np.isfinite(answer.logits).all()
    newest = alone(Mode.STREAMING_LLM, PROMPT, STEPS).selected[0]
    assert newest is not None
    assert any(np.any(ids != newest[:, -STEPS:]) for ids in answer.selected)


@pytest.mark.parametrize("mode", [Mode.STREAMING_LLM, Mode.QUEST])
def test_lanes_and_server_refuse_them_by_name(mode: Mode) -> None:
    plan = DecodePlan(mode=mode, fetch=Fetch.IN_TURN)
    with pytest.raises(ConfigError, match=f"mode={mode.value} .*decode lanes take dense, sparse, sparda"):
        check_lanes(toy().decoder, cast(Any, None), plan, None, None, None)
    with pytest.raises(SettingsError, match=rf"--mode {mode.value} is not served; use one of dense, .*random$"):
        load_server(Settings(mode=mode.value))
