"""Blocks that a chunk finishes are in the host pool before the next chunk; the end of a prompt leaves only its tail."""

import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from sparda_jax import generate
from sparda_jax.cache.pool import Pools
from sparda_jax.cache.records import to_records
from sparda_jax.library import SparDA
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.executor import Executor, LaneSequence
from sparda_jax.serve.requests import FatalError
from tests.serve.harness import pool_of
from tests.serve.in_process import executor_of, ids

ONE = SamplingParams(max_tokens=1)
BLOCK = 64


@pytest.fixture(scope="module")
def executor(scored_checkpoint: Path) -> Executor:
    model = SparDA.from_pretrained(scored_checkpoint, mode="sparse", max_model_len=1024, dtype="float32")
    return executor_of(model, max_active=1, slots=5, host_pool_gib=pool_of(40))


def records(sequence: LaneSequence, layer: int) -> np.ndarray:
    """Of the blocks of a prompt in prefill, ``[blocks, kv_heads, rows, head_dim]``."""
    assert sequence.prefill is not None
    cache = sequence.prefill._lanes._cache
    assert cache is not None
    return np.asarray(to_records(cache.layers[layer].k, cache.layers[layer].v, BLOCK)[0])


def in_pool(executor: Executor, blocks: list[int], layer: int) -> np.ndarray:
    pool = executor.lanes._pool.snapshot(layer)
    return pool.reshape(executor.num_blocks, -1, *pool.shape[1:])[blocks]


def test_each_chunk_leaves_its_blocks_in_the_pool(executor: Executor) -> None:
    executor.blocks.forget()
    prompt = ids(random.Random(1), 405)
    first = executor.start(prompt, ONE)
    token = None
    while token is None:
        token = executor.prefill(first)
        done = first.prefilled // BLOCK
        assert len(first.written) == done
        for layer in range(executor.runner.config.num_layers):
            np.testing.assert_array_equal(in_pool(executor, first.written, layer), records(first, layer)[:done])
    executor.release(first)
    # Behind a prefix that was found, a prompt writes its own blocks and leaves the others alone.
    second = executor.start([*prompt[:330], *ids(random.Random(2), 70)], ONE)
    found = list(second.shared)
    assert len(found) == 5
    before = in_pool(executor, found, 0)
    while executor.prefill(second) is None:
        pass
    assert len(second.written) == 400 // BLOCK - 5
    np.testing.assert_array_equal(in_pool(executor, found, 0), before)
    np.testing.assert_array_equal(in_pool(executor, [*found, *second.written], 1), records(second, 1)[: 400 // BLOCK])
    executor.release(second)


@pytest.mark.parametrize("in_lane", [True, False])
def test_the_end_of_a_prompt_writes_only_its_tail(
    executor: Executor, in_lane: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.blocks.forget()
    stored: list[tuple[int, int]] = []
    store = executor.lanes._pool.store

    def noted(cache, block_ids, first, end) -> None:
        stored.append((first, end))
        store(cache, block_ids, first, end)

    monkeypatch.setattr(executor.lanes._pool, "store", noted)
    sequence = executor.start(ids(random.Random(3), 405), ONE)
    while executor.prefill(sequence) is None:
        pass
    if in_lane:
        executor.place(0, sequence)
    else:
        executor.park(sequence)
    assert stored == [(6, 7)]
    executor.release(sequence)
    assert executor.blocks.num_free == executor.num_blocks


def test_a_prompt_that_is_given_up_gives_its_blocks_back(executor: Executor) -> None:
    sequence = executor.start(ids(random.Random(4), 405), ONE)
    executor.prefill(sequence)
    assert executor.blocks.num_free == executor.num_blocks - len(sequence.written) < executor.num_blocks
    executor.release(sequence)
    assert executor.blocks.num_free == executor.num_blocks


@pytest.mark.parametrize("launched", [False, True])
def test_a_chunk_that_fails_leaves_the_pool_or_ends_the_engine(
    executor: Executor, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, say, before it has taken the pool, or with the pool in its hands."""
    executor.blocks.forget()
    prompt, pools = ids(random.Random(5), 300), executor.lanes._pool._pools
    storing = generate.storing

    def failing(host: Any) -> Any:
        def program(*operands: Any, pools: Pools, **more: Any) -> Any:
            if launched:
                storing(host)(*operands, pools=pools, **more)
            raise RuntimeError("RESOURCE_EXHAUSTED")

        return program

    sequence = executor.start(prompt, ONE)
    with monkeypatch.context() as patch:
        patch.setattr(generate, "storing", failing)
        # A pool of its own to lose.
        patch.setattr(executor.lanes._pool, "_pools", tuple(_copied(pool) for pool in pools) if launched else pools)
        with pytest.raises(FatalError if launched else RuntimeError, match="RESOURCE_EXHAUSTED"):
            executor.prefill(sequence)
        assert executor.lanes.pool_is_lost == launched
    executor.release(sequence)
    sequence = executor.start(prompt, ONE)
    while executor.prefill(sequence) is None:
        pass
    np.testing.assert_array_equal(in_pool(executor, sequence.written, 0), records(sequence, 0)[:4])
    executor.release(sequence)
    assert executor.blocks.num_free == executor.num_blocks


def test_a_chunk_that_fails_on_the_device_has_taken_the_pool_with_it(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later than it was launched: its results are there, and raise when they are waited for."""

    class Broken:
        def block_until_ready(self) -> None:
            raise RuntimeError("RESOURCE_EXHAUSTED")

    assert not executor.lanes.pool_is_lost
    monkeypatch.setattr(executor.lanes._pool, "_pools", (*executor.lanes._pool._pools[1:], Broken()))
    assert executor.lanes.pool_is_lost


def _copied(pool: jax.Array) -> jax.Array:
    """In host memory, too."""
    return jax.device_put(np.array(pool), pool.sharding)
