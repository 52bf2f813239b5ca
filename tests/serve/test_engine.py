"""The engine thread: turns, limits, cancelling, failures, health, draining."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.requests import (
    EngineError,
    EngineUnavailable,
    FatalError,
    QueueFull,
    RequestRejected,
    TokenEvent,
    TokenStream,
)
from tests.serve.fakes import ANSWERS, CHUNK, TOKENIZER, FakeRunner, FakeSequence, running_engine

HELLO = TOKENIZER.encode("hello")


def with_engine(test: Callable[[Engine], Awaitable[None]], runner: FakeRunner, **options: Any) -> None:
    async def run() -> None:
        with running_engine(runner, **options) as engine:
            await ready(engine)
            await test(engine)

    asyncio.run(run())


async def ready(engine: Engine) -> None:
    await until_status(engine, "ready")


async def until_status(engine: Engine, status: str) -> None:
    for _ in range(2000):
        if (await engine.health()).status == status:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {status}: {await engine.health()}")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition never came true")


async def collect(stream: TokenStream) -> list[TokenEvent]:
    return [event async for event in stream]


def params(max_tokens: int = 20) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def test_events_of_one_sequence() -> None:
    async def test(engine: Engine) -> None:
        events = await collect(await engine.submit(HELLO, params()))
        assert TOKENIZER.decode([event.token_id for event in events]) == "hello there"
        assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
        assert events[-1].is_end
        events = await collect(await engine.submit(HELLO, params(2), with_stats=True))
        assert [event.finish_reason for event in events] == [None, "length"]
        assert not events[-1].is_end
        assert [event.stats["decode"]["tokens"] for event in events if event.stats] == [1, 2]
        events = await collect(await engine.submit(HELLO, params(50), ignore_eos=True))
        assert len(events) == 50

    with_engine(test, FakeRunner())


def test_a_sequence_ends_where_the_context_ends() -> None:
    async def test(engine: Engine) -> None:
        events = await collect(await engine.submit(HELLO, params(1000), ignore_eos=True))
        assert len(events) == 30 - len(HELLO)
        assert events[-1].finish_reason == "length"

    with_engine(test, FakeRunner(max_model_len=30))


def test_a_short_request_overtakes_a_long_prefill() -> None:
    runner = FakeRunner(max_model_len=10_000)

    async def test(engine: Engine) -> None:
        runner.hold = threading.Event()
        long = await engine.submit([70] * (CHUNK * 100), params(1))
        short = await engine.submit(HELLO, params(3))
        runner.hold.set()
        assert len(await collect(short)) == 3
        assert len(await collect(long)) == 1
        turns = [i for i, sequence in enumerate(runner.log) if len(sequence.prompt) <= CHUNK]
        # Its one chunk and two steps, and one more that was on its way, with a chunk of the long one beside each.
        assert len(turns) in (3, 4)
        assert turns[-1] <= 8
        assert len(runner.log) > 100

    with_engine(test, runner)


def test_a_turn_launches_a_step_before_it_reads_the_last_one_and_sends_before_it_waits_for_a_chunk() -> None:
    """So the device has work while tokens are looked at, and no token waits for a chunk of another request."""
    turns: list[list[str]] = []
    received: list[int] = []

    class Noting(FakeRunner):
        def step(self) -> None:
            turns.append(["step"])
            super().step()

        def read(self, unread: int = 0) -> Any:
            if turns:
                turns[-1].append(f"read all but {unread}")
            return super().read(unread)

        def prefill(self, sequence: FakeSequence) -> int | None:
            if turns and sequence.prefilled:
                turns[-1].append("chunk")
                due = len(turns)  # the first token, and one of each step but the last
                turns[-1].append("sent" if came_true(lambda: len(received) >= due) else "kept back")
            return super().prefill(sequence)

    def came_true(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 10
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.001)
        return condition()

    async def test(engine: Engine) -> None:
        decoding = await engine.submit(HELLO, SamplingParams(max_tokens=2000), ignore_eos=True)
        received.append((await anext(decoding)).token_id)
        long = await engine.submit([70] * (CHUNK * 20), params(1))
        rest = asyncio.create_task(collect(long))
        while not rest.done():
            received.append((await anext(decoding)).token_id)
        decoding.cancel()

    runner = Noting(max_model_len=10_000)
    with_engine(test, runner)
    beside = [turn for turn in turns if "chunk" in turn]
    assert len(beside) == 19
    assert all(turn == ["step", "read all but 1", "chunk", "sent"] for turn in beside)


def test_admission_is_first_come_first_served_and_limited() -> None:
    runner = FakeRunner(num_blocks=2)

    async def test(engine: Engine) -> None:
        runner.hold = threading.Event()
        streams = [await engine.submit(HELLO, params(2)) for _ in range(4)]
        await until(lambda: engine.stats().running == 2)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.max_active, stats.max_queue) == (2, 2, 4, 2)
        assert stats.free_blocks == 0
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            await engine.submit(HELLO, params(2))
        streams[3].cancel()  # a place in the queue is free again
        streams[3] = await engine.submit(HELLO, params(2))
        runner.hold.set()
        assert [len(await collect(stream)) for stream in streams] == [2] * 4
        order = list(dict.fromkeys(map(id, runner.log)))
        assert len(order) == 4
        await until(lambda: not runner.live)
        assert engine.stats().free_blocks == 2

    with_engine(test, runner, max_queue=2)


def test_more_requests_than_lanes_take_turns() -> None:
    """Each gives its lane up after the quantum, so all get on, and all get their own tokens."""
    runner = FakeRunner(num_lanes=2)

    async def test(engine: Engine) -> None:
        texts = ["hello", "emoji", "number", "hello there", "number two"]
        streams = [await engine.submit(TOKENIZER.encode(text), params(40)) for text in texts]
        for text, stream in zip(texts, streams, strict=True):
            events = await collect(stream)
            want = next(answer for word, answer in ANSWERS.items() if word in text)
            assert TOKENIZER.decode([event.token_id for event in events]) == want
        await until(lambda: not runner.live)
        assert not runner.lanes

    with_engine(test, runner, quantum=3)


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    async def test(engine: Engine) -> None:
        with pytest.raises(RequestRejected, match="needs 3 blocks of 64 tokens, and the cache has 2"):
            await engine.submit(HELLO, params(150))

    with_engine(test, FakeRunner(num_blocks=2))


def test_a_request_that_takes_too_long_fails_alone() -> None:
    runner = FakeRunner(max_model_len=100_000)

    async def test(engine: Engine) -> None:
        runner.step_seconds = 0.01
        slow = await engine.submit(HELLO, SamplingParams(max_tokens=90_000), ignore_eos=True)
        with pytest.raises(EngineError, match=r"longer than 0\.5 s"):
            await collect(slow)
        assert (await collect(await engine.submit(HELLO, params())))[-1].finish_reason == "stop"
        await until(lambda: not runner.live)

    with_engine(test, runner, request_seconds=0.5)


def test_a_cancelled_sequence_makes_no_further_step() -> None:
    runner = FakeRunner(max_model_len=10_000)

    async def test(engine: Engine) -> None:
        runner.hold = threading.Event()
        stream = await engine.submit(HELLO, SamplingParams(max_tokens=5000), ignore_eos=True)
        await until(lambda: len(runner.log) == 1)
        stream.cancel()
        runner.hold.set()
        assert len(await collect(await engine.submit(HELLO, params(3)))) == 3
        # The step in progress, and one that may have been launched before the cancellation was seen.
        assert sum(sequence is runner.log[0] for sequence in runner.log) <= 2
        assert engine.stats().running == 0
        await until(lambda: not runner.live)

    with_engine(test, runner)


def test_failures_end_only_their_own_sequence() -> None:
    async def test(engine: Engine) -> None:
        bad = await engine.submit(TOKENIZER.encode("this fails"), params())
        good = await engine.submit(HELLO, params())
        with pytest.raises(EngineError, match="RuntimeError: a device said no"):
            await collect(bad)
        assert (await collect(good))[-1].finish_reason == "stop"
        with pytest.raises(RequestRejected, match="prompt is one"):
            await collect(await engine.submit(TOKENIZER.encode("refused"), params()))
        with pytest.raises(EngineError, match="ValueError: an array had the wrong shape") as raised:
            await collect(await engine.submit(TOKENIZER.encode("turned away"), params()))
        assert not isinstance(raised.value, RequestRejected)
        assert (await engine.health()).ok

    with_engine(test, FakeRunner())


def test_requests_that_all_fail_make_the_engine_unhealthy_until_one_works() -> None:
    runner = FakeRunner()

    async def test(engine: Engine) -> None:
        for _ in range(3):
            with pytest.raises(EngineError):
                await collect(await engine.submit(TOKENIZER.encode("fatal"), params()))
        assert (await engine.health()).status == "failing"
        await collect(await engine.submit(HELLO, params()))
        assert (await engine.health()).status == "ready"

    with_engine(test, runner)


def test_a_fatal_error_ends_the_engine_and_every_request() -> None:
    runner = FakeRunner()
    runner.fatal = lambda: FatalError("the pool is gone")
    seen: list[BaseException] = []

    async def test(engine: Engine) -> None:
        runner.hold = threading.Event()
        streams = [await engine.submit(ids, params()) for ids in (HELLO, TOKENIZER.encode("fatal"), HELLO)]
        runner.hold.set()
        for stream in streams:
            with pytest.raises(EngineUnavailable, match="the pool is gone"):
                await collect(stream)
        health = await engine.health()
        assert (health.ok, health.status) == (False, "dead")
        assert "the pool is gone" in health.detail
        with pytest.raises(EngineUnavailable, match="the pool is gone"):
            await engine.submit(HELLO, params())
        await until(lambda: bool(seen))
        assert isinstance(seen[0], FatalError)

    with_engine(test, runner, on_failure=seen.append)


def test_a_step_without_end_is_a_stuck_engine() -> None:
    runner = FakeRunner()

    async def test(engine: Engine) -> None:
        runner.hold = threading.Event()
        stream = await engine.submit(HELLO, params())
        await until(lambda: len(runner.log) == 1)
        assert (await engine.health()).status == "ready"  # busy, but not for long yet
        await until_status(engine, "stuck")
        runner.hold.set()
        await until_status(engine, "ready")
        await collect(stream)

    with_engine(test, runner, stuck_seconds=1.0)


def test_nothing_is_taken_before_the_warm_up_is_done() -> None:
    async def run() -> None:
        warm = threading.Event()

        def warm_up() -> None:
            assert warm.wait(30)

        with running_engine(FakeRunner(), warm_up=warm_up) as engine:
            assert (await engine.health()).status == "starting"
            with pytest.raises(EngineUnavailable, match="starting"):
                await engine.submit(HELLO, params())
            warm.set()
            await ready(engine)

    asyncio.run(run())


def test_a_failed_warm_up_is_a_dead_engine() -> None:
    def fails() -> None:
        raise MemoryError("no room")

    async def run() -> None:
        with running_engine(FakeRunner(), warm_up=fails) as engine:
            await until_status(engine, "dead")
            assert "no room" in (await engine.health()).detail

    asyncio.run(run())


def test_draining_lets_requests_finish() -> None:
    runner = FakeRunner()

    async def test(engine: Engine) -> None:
        runner.step_seconds = 0.01
        streams = [await engine.submit(HELLO, params()) for _ in range(3)]
        draining = asyncio.create_task(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await engine.submit(HELLO, params())
        assert (await engine.health()).status == "draining"
        for stream in streams:
            assert (await collect(stream))[-1].finish_reason == "stop"
        assert await draining

    with_engine(test, runner)


def test_draining_has_a_limit() -> None:
    runner = FakeRunner(max_model_len=10_000)

    async def test(engine: Engine) -> None:
        runner.step_seconds = 0.01
        stream = await engine.submit(HELLO, SamplingParams(max_tokens=5000), ignore_eos=True)
        assert not await engine.drain(0.1)
        with pytest.raises(EngineUnavailable, match=r"shut down before this request was done \(0.1 s\)"):
            await collect(stream)

    with_engine(test, runner)


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="lanes=0"):
        Engine(FakeRunner(num_lanes=0), eos_token_ids=[])
    with pytest.raises(ValueError, match="max_queue=-1"):
        Engine(FakeRunner(), eos_token_ids=[], max_queue=-1)
    with pytest.raises(ValueError, match="quantum=0"):
        Engine(FakeRunner(), eos_token_ids=[], quantum=0)
