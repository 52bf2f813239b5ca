"""What the engine's benchmark measures, by the clocks of those who wait for tokens."""

import asyncio
import contextlib
import dataclasses
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.bench.subject import Subject
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.requests import TokenStream
from sparda_jax.telemetry import DecodeStats

Say = Callable[[str], None]
"""Takes a line on what happens."""

WARM_STEPS = 8
LEAST_ANSWER = WARM_STEPS + 2
"""Tokens of an answer of which a decode step can be timed."""
ROUNDS = 5
"""In which the bare lanes and the engine decode by turns."""
SAMPLES = 5
SETTLE_SECONDS = 0.1
"""Between two first tokens: the blocks of the request before go to the pool meanwhile."""
QUANTUM = 8
"""Tokens after which a request gives up its lane, where more requests than lanes take turns."""
PARKED_TOKENS = 48


class TooShort(Exception):
    """A prompt or an answer ended before what was to be measured beside it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """Decode of full lanes: tokens of all lanes per second, steps that were timed, and what the steps did."""

    tokens_per_second: float
    steps: int
    stats: DecodeStats

    def settings(self, kv_heads: int) -> dict[str, Any]:
        """What a row says of it."""
        stats = self.stats
        missed = float(stats.copied[1:].mean()) / stats.steps / kv_heads
        return {
            "steps": self.steps,
            "ms": round(1e3 * stats.copied.shape[1] / self.tokens_per_second, 3),
            "misses": round(missed, 2),
            "hit_rate": None if stats.hit_rate is None else round(stats.hit_rate, 4),
            "late": f"{stats.late}/{stats.launches}",
            "host_gap_ms": round(1e3 * (stats.host_gap or 0), 3),
        }


def bare_rate(subject: Subject) -> Rate:
    """The lanes alone, one step ahead of the host that reads the tokens."""
    executor, load = subject.executor, subject.load
    lanes, params = executor.lanes, SamplingParams(max_tokens=load.answer)
    sequences = []
    for lane in range(load.batch):
        sequence = executor.start(subject.prompt(lane), params)
        while executor.prefill(sequence) is None:
            pass
        executor.place(lane, sequence)
        sequences.append(sequence)

    def run(steps: int) -> float:
        began = time.perf_counter()
        unread = lanes.step()
        for _ in range(steps - 1):
            unread.copy_to_host_async()
            unread, read = lanes.step(), unread
            np.asarray(read)
        np.asarray(unread)
        return time.perf_counter() - began

    run(WARM_STEPS)
    before = lanes.return_stats()
    seconds = run(load.steps)
    stats = lanes.return_stats().since(before)
    for sequence in sequences:
        executor.release(sequence)
    return Rate(tokens_per_second=load.batch * load.steps / seconds, steps=load.steps, stats=stats)


async def engine_rate(engine: Engine, subject: Subject) -> Rate:
    """The engine with a request in every lane, from when all decode until the first one ends.

    Raises:
        TooShort: the first one ends before all decode.
    """
    load, lanes = subject.load, subject.executor.lanes
    params = SamplingParams(max_tokens=min(load.answer, load.steps + 4 * load.batch + WARM_STEPS))
    before = lanes.return_stats()
    streams = [await engine.submit(subject.prompt(number), params) for number in range(load.batch)]
    times = await asyncio.gather(*map(_arrivals, streams))
    began = max(own[WARM_STEPS] for own in times)
    ended = min(own[-1] for own in times)
    if ended <= began:
        raise TooShort("an answer ends before all lanes decode: give a longer --answer and more --steps")
    tokens = sum(began < at <= ended for own in times for at in own)
    return Rate(
        tokens_per_second=tokens / (ended - began),
        steps=tokens // load.batch,
        stats=lanes.return_stats().since(before),
    )


async def first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds from handing a request in to its first token."""
    began = time.perf_counter()
    async for _ in await engine.submit(prompt, SamplingParams(max_tokens=1)):
        return time.perf_counter() - began
    raise RuntimeError("an answer without a token")


async def first_tokens(engine: Engine, prompts: Callable[[int], list[int]]) -> list[float]:
    """Seconds to the first token of `SAMPLES` requests, one after the other; ``prompts`` makes the prompt of each."""
    found = []
    for sample in range(SAMPLES):
        await asyncio.sleep(SETTLE_SECONDS)
        found.append(await first_token(engine, prompts(sample)))
    return found


async def beside_a_long_prompt(
    engine: Engine, long: Callable[[], list[int]], short: Callable[[], list[int]], *, spread: float
) -> list[float]:
    """The same while a long prompt is being prefilled; a sample that outlasted it is taken again.

    The short prompts come at several moments of the first ``spread`` seconds, and so of a chunk.

    Raises:
        TooShort: most outlast it.
    """
    found: list[float] = []
    for attempt in range(4 * SAMPLES):
        stream = await engine.submit(long(), SamplingParams(max_tokens=1))
        while engine.stats().prefilling == 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(spread * (attempt % SAMPLES) / SAMPLES)
        seconds = await first_token(engine, short())
        if engine.stats().prefilling:
            found.append(seconds)
        stream.cancel()
        await _idle(engine)
        if len(found) == SAMPLES:
            return found
    raise TooShort("the long prompts end before the short ones beside them have their tokens: give a longer --long")


@contextlib.asynccontextmanager
async def busy(engine: Engine, subject: Subject) -> AsyncIterator[None]:
    """All lanes decode; who is done begins anew."""
    params = SamplingParams(max_tokens=subject.load.answer)

    async def client(number: int) -> None:
        while True:
            stream = await engine.submit(subject.prompt(number), params)
            try:
                async for _ in stream:
                    pass
            finally:
                stream.cancel()

    clients = [asyncio.create_task(client(number)) for number in range(subject.load.batch)]
    try:
        while engine.stats().decoding < subject.load.batch:
            await asyncio.sleep(0.01)
            for done in (one for one in clients if one.done()):
                done.result()
        yield
    finally:
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await _idle(engine)


async def answers(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    """`PARKED_TOKENS` tokens behind each of the prompts, all handed in at once."""
    params = SamplingParams(max_tokens=PARKED_TOKENS)
    streams = [await engine.submit(prompt, params) for prompt in prompts]

    async def tokens(stream: TokenStream) -> list[int]:
        return [event.token_id async for event in stream]

    return await asyncio.gather(*map(tokens, streams))


def with_engine[T](subject: Subject, run: Callable[[Engine], Awaitable[T]], *, quantum: int = 1 << 30) -> T:
    """Runs something with an engine of its own, and ends that."""

    async def whole() -> T:
        engine = Engine(subject.executor, eos_token_ids=[], max_queue=1 << 10, quantum=quantum, stuck_seconds=600)
        engine.start()
        try:
            while not (await engine.health()).ok:
                await asyncio.sleep(0.01)
            return await run(engine)
        finally:
            engine.close()

    return asyncio.run(whole())


def median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds)


async def _arrivals(stream: TokenStream) -> list[float]:
    return [time.perf_counter() async for _ in stream]


async def _idle(engine: Engine) -> None:
    while engine.stats().running or engine.stats().waiting:
        await asyncio.sleep(0.005)
