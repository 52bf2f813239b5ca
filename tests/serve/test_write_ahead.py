"""Blocks that a chunk finishes are in the host pool before the next chunk; the end of a prompt leaves only its tail."""

import random
from pathlib import Path

import numpy as np
import pytest

from sparda_jax.cache.records import to_records
from sparda_jax.library import SparDA
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.executor import Executor, LaneSequence
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
