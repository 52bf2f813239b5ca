"""The engine over the real device code, in this process: slow copies, poison in whatever is free, failures, and order.

What is right is what the library generates for the same prompt alone.
"""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparda_jax.generate import PREFILL_CHUNKS
from sparda_jax.library import SparDA
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.executor import Executor, LaneSequence
from sparda_jax.serve.requests import EngineError, Job
from sparda_jax.telemetry import DecodeStats
from tests.serve.harness import MAX_MODEL_LEN, pool_of
from tests.serve.in_process import (
    DELAYS,
    Alone,
    check,
    collect,
    executor_of,
    ids,
    poison,
    poison_blocks,
    requests_of,
    slow_copies,
    until,
    with_engine,
)

NUM_BLOCKS = 20
LONG = 620
CHUNK = PREFILL_CHUNKS["cpu"][0]


@pytest.fixture(scope="module")
def model(scored_checkpoint: Path) -> SparDA:
    return SparDA.from_pretrained(scored_checkpoint, mode="sparse", max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def shared_executor(model: SparDA) -> Executor:
    """Compiled once; every test leaves it without sequences."""
    return executor_of(model, max_active=2, slots=5, host_pool_gib=pool_of(NUM_BLOCKS))


@pytest.fixture
def executor(shared_executor: Executor) -> Iterator[Executor]:
    shared_executor.blocks.forget()
    yield shared_executor
    assert shared_executor.blocks.num_free == NUM_BLOCKS
    assert not shared_executor._in_lane
    assert not shared_executor.lanes._parked


@pytest.fixture(scope="module")
def alone(model: SparDA) -> Alone:
    return Alone(model)


@pytest.mark.parametrize("quantum", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_sequences_that_wait_again_and_again_go_on_as_if_they_never_had(
    executor: Executor, alone: Alone, monkeypatch: pytest.MonkeyPatch, quantum: int, rounds: int
) -> None:
    rng = random.Random(10 * rounds + quantum)
    counts = slow_copies(executor, monkeypatch, rng)
    before = executor.usage.parked

    async def test(engine: Engine) -> None:
        while executor.usage.parked - before < 20 * rounds or not all(counts[name] for name in DELAYS):
            await check(engine, alone, requests_of(rng, 8))

    with_engine(executor, test, quantum=quantum)


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_nothing_reads_what_is_free(
    executor: Executor, alone: Alone, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """Everything free is poisoned before steps and prompts, and a cached block the moment its place is needed."""
    rng = random.Random(rounds)
    evicted: list[int] = []
    poisoned = 0
    step, start, empty_oldest = executor.step, executor.start, executor.blocks._empty_oldest

    def poisoned_step() -> None:
        nonlocal poisoned
        if rng.random() < 0.2:
            poisoned += poison(executor)
        step()

    def poisoned_start(*args: Any) -> Any:
        nonlocal poisoned
        poisoned += poison(executor)
        return start(*args)

    def poisoned_eviction() -> int:
        block = empty_oldest()
        evicted.append(block)
        poison_blocks(executor, [block])
        return block

    monkeypatch.setattr(executor, "step", poisoned_step)
    monkeypatch.setattr(executor, "start", poisoned_start)
    monkeypatch.setattr(executor.blocks, "_empty_oldest", poisoned_eviction)
    hits = executor.usage.prefix_tokens

    async def test(engine: Engine) -> None:
        for _ in range(rounds):
            await check(engine, alone, requests_of(rng, 12, max_tokens=20))

    with_engine(executor, test, quantum=4)
    assert evicted
    assert poisoned
    assert executor.usage.prefix_tokens > hits


def test_a_prompt_may_begin_with_an_answer_that_goes_on(executor: Executor, alone: Alone) -> None:
    """At every token around the end of a block: only blocks whose last token is stored can be found."""
    params, one = SamplingParams(max_tokens=100), SamplingParams(max_tokens=1)
    prompt = ids(random.Random(8), 309)
    answer = alone(prompt, params)
    sequence = executor.start(prompt, params)
    while (token := executor.prefill(sequence)) is None:
        pass
    executor.fed(sequence, token)
    executor.place(0, sequence)
    for known in range(2, 20):
        executor.step()
        ((_, token),) = executor.read()
        assert token == answer[known - 1]
        executor.fed(sequence, token)
        longer = [*prompt, *answer[:known], 5]
        other = executor.start(longer, one)
        while (token := executor.prefill(other)) is None:
            pass
        assert token == alone(longer, one)[0], known
        executor.release(other)
    executor.release(sequence)


def test_one_chunk_at_a_time_is_under_way(executor: Executor, alone: Alone) -> None:
    """A chunk without a token is only launched: what it read is counted, and waited for, with the next one."""
    rng = random.Random(12)
    params = SamplingParams(max_tokens=1)
    one, other = (executor.start(ids(rng, 3 * CHUNK - 5), params) for _ in range(2))
    assert executor.prefill(one) is None
    assert (one.prefilled, one.stats.prefill.tokens) == (CHUNK, 0)
    chunk: Any = executor._chunk
    assert executor.prefill(other) is None
    assert chunk.is_ready()
    assert executor.prefill(one) is None
    assert (one.prefilled, one.stats.prefill.tokens) == (2 * CHUNK, CHUNK)
    assert executor.prefill(one) is not None
    assert (one.prefilled, one.stats.prefill.tokens) == (3 * CHUNK - 5,) * 2
    executor.release(other)
    executor.release(one)


def test_what_sampled_steps_found_is_shown(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = np.ones((2, 2), np.int64)
    stats = DecodeStats(
        record_bytes=10, steps=9, sampled_steps=2, attended=8 * ones, copied=3 * ones, picked=4 * ones, found=3 * ones,
        sampled_copies=5 * ones, wasted=ones, launches=7, late=2, gap=0.5, timed=2, wait=0.25,
    )  # fmt: skip
    monkeypatch.setattr(executor, "_noted", lambda: stats)
    found = {name: value for name, (value, _) in executor.cache_stats().items()}
    assert (found["prefetch_recall"], found["wasted_copies_ratio"], found["exposed_wait_seconds"]) == (0.75, 0.2, 0.125)
    assert (found["blocks_attended_total"], found["blocks_fetched_total"], found["fetched_bytes_total"]) == (
        32,
        12,
        120,
    )
    assert (found["step_launches_total"], found["late_launches_total"], found["device_idle_seconds_total"]) == (
        7,
        2,
        0.5,
    )


def test_who_waited_for_the_same_prompt_reads_it_back(
    executor: Executor, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room to prefill one at a time, so the second one begins when the first one is done."""
    monkeypatch.setattr(executor, "staging_tokens", 512)
    prompt = ids(random.Random(9), 500)
    params = SamplingParams(max_tokens=5)
    alone(prompt, params)
    before = executor.usage.prefix_tokens

    async def test(engine: Engine) -> None:
        await check(engine, alone, [(prompt, params)] * 2)

    with_engine(executor, test)
    assert executor.usage.prefix_tokens - before == 448


@pytest.mark.parametrize(
    ("phase", "at_least", "count", "prompt", "max_tokens"),
    [
        ("decoding", 2, 1, 100, 500),
        ("without_lane", 1, 3, 100, 200),
        ("prefilling", 1, 1, 600, 30),
        ("waiting", 2, 3, 500, 100),
    ],
)
def test_who_leaves_is_gone_within_two_steps(
    executor: Executor,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    at_least: int,
    count: int,
    prompt: int,
    max_tokens: int,
) -> None:
    """Wherever it is; the one that stays is not disturbed."""
    rng = random.Random(3)
    stays = (ids(rng, 20), SamplingParams(max_tokens=230))

    async def test(engine: Engine) -> None:
        ended: list[int] = []
        end = engine._end

        def noted(job: Job[Any]) -> None:
            end(job)
            ended.append(executor.usage.steps)

        monkeypatch.setattr(engine, "_end", noted)
        staying = asyncio.create_task(collect(await engine.submit(*stays)))
        await until(lambda: executor.usage.steps > before)
        leaving = [await engine.submit(ids(rng, prompt), SamplingParams(max_tokens=max_tokens)) for _ in range(count)]
        await until(lambda: getattr(engine.stats(), phase) >= at_least)
        for stream in leaving:
            stream.cancel()
        steps = executor.usage.steps
        await until(lambda: len(ended) == count)
        assert max(ended) <= steps + 2
        assert (engine.stats().running, engine.stats().free_blocks) == (1, NUM_BLOCKS - 4)
        assert await staying == alone(*stays)

    before = executor.usage.steps
    with_engine(executor, test, quantum=4)


def test_a_prompt_that_fails_fails_alone(executor: Executor, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its last chunk, with a prefix that others use; whether the failing one comes first or in between."""
    rng = random.Random(4)
    beginning = ids(rng, 320)
    good = [(beginning + ids(rng, 20), SamplingParams(max_tokens=20)) for _ in range(3)]
    bad = beginning + ids(rng, 200)
    prefill = executor.prefill

    def fails(sequence: LaneSequence) -> int | None:
        token = prefill(sequence)
        if token is not None and sequence.known == len(bad):
            raise RuntimeError("a chunk has failed")
        return token

    monkeypatch.setattr(executor, "prefill", fails)

    async def failing(engine: Engine) -> None:
        with pytest.raises(EngineError, match="a chunk has failed"):
            await collect(await engine.submit(bad, SamplingParams(max_tokens=20)))

    async def test(engine: Engine) -> None:
        for _ in range(3):
            await failing(engine)
        assert (await engine.health()).status == "failing"
        await asyncio.gather(failing(engine), check(engine, alone, good), failing(engine))
        await check(engine, alone, good[:1])
        assert (await engine.health()).status == "ready"

    with_engine(executor, test)


def test_a_request_that_gets_nowhere_ends_alone(
    executor: Executor, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    stuck, good = ids(rng, 333), (ids(rng, 200), SamplingParams(max_tokens=20))
    prefill = executor.prefill

    def gets_nowhere(sequence: LaneSequence) -> int | None:
        if sequence.known == len(stuck):
            time.sleep(0.001)
            return None
        return prefill(sequence)

    monkeypatch.setattr(executor, "prefill", gets_nowhere)

    async def test(engine: Engine) -> None:
        waiting = asyncio.create_task(collect(await engine.submit(stuck, SamplingParams(max_tokens=5))))
        await check(engine, alone, [good])
        with pytest.raises(EngineError, match=r"longer than 3 s \(--request-seconds\)"):
            await waiting

    with_engine(executor, test, request_seconds=3)


def test_a_short_prompt_waits_for_few_chunks_of_a_long_one(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its first token the device does at most three times what it does for the short one alone.

    Counted in chunks and steps, the one under way included: on a CPU every chunk is the same program, and a clock would
    measure the machine's load.
    """
    rng = random.Random(6)
    gate = threading.Event()
    work: list[str] = []
    held_at, first_token_at = 0, 0
    prefill, step = executor.prefill, executor.step

    def counted_prefill(sequence: LaneSequence) -> int | None:
        nonlocal first_token_at
        if len(work) == held_at:
            assert gate.wait(60)
        work.append("chunk")
        token = prefill(sequence)
        if token is not None and sequence.known < LONG:
            first_token_at = len(work)
        return token

    def counted_step() -> None:
        work.append("step")
        step()

    monkeypatch.setattr(executor, "prefill", counted_prefill)
    monkeypatch.setattr(executor, "step", counted_step)

    async def test(engine: Engine) -> None:
        nonlocal held_at
        for short in (10, 200):
            for begun in range(4):  # chunks of the long one before the short one comes
                held_at = len(work) + begun
                gate.clear()
                long = await engine.submit(ids(rng, LONG), SamplingParams(max_tokens=1))
                await until(lambda at=held_at: len(work) == at)
                stream = await engine.submit(ids(rng, short), SamplingParams(max_tokens=1))
                gate.set()
                await asyncio.gather(collect(stream), collect(long))
                assert first_token_at - held_at <= 3 * -(-short // CHUNK)

    with_engine(executor, test)
