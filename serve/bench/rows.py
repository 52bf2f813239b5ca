"""The rows of the engine's benchmark, with their targets and floors."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from sparda_jax.bench._kernel_cases import COPY_ENGINE_BYTES_PER_SECOND
from sparda_jax.bench._report import Row
from sparda_jax.serve.bench import runs
from sparda_jax.serve.bench.runs import Say
from sparda_jax.serve.bench.subject import Subject
from sparda_jax.serve.engine import Engine

ENGINE_SHARE = 0.85
"""Of the bare lanes' tokens per second."""
FIRST_TOKEN_MS = 300
"""Behind a prefix of `TARGET_HIT` tokens or more that is in the cache, for the 8B shape."""
TARGET_HIT = 100_000
BESIDE_LONG = 3
"""Times as long as alone."""
METHOD = (
    "One process, one executor. Every request begins with one prefix of random keys and values, which the pool holds "
    "once and which was never prefilled; prompts are random tokens, weights too unless a model is named. Programs are "
    "compiled by earlier requests. decode: all lanes full, tokens counted where they are received, from when every "
    "lane decodes until the first answer ends (its hit rate and misses are of the whole answers); bare lanes: the same "
    f"lanes without the engine, one step ahead of the host; medians of {runs.ROUNDS} rounds in which they take turns. "
    f"First tokens: medians of {runs.SAMPLES} requests, from submit to the token; floor: the prefix over the link. "
    "beside: while a long prompt is prefilled, of which all but the given number of tokens was in the cache. "
    "forced parking: more requests than lanes, which give up their lane "
    f"after {runs.QUANTUM} tokens; {runs.PARKED_TOKENS} greedy tokens each are compared with those without a wait."
)


def measure(subject: Subject, say: Say, *, targets: bool) -> Iterator[Row]:
    """The rows of one subject, as they come.

    Args:
        subject: what is measured.
        say: takes a line on what happens.
        targets: give the rows their targets; they are for a GPU.
    """
    load, executor = subject.load, subject.executor
    config = executor.runner.config
    shape = executor.lanes.shape
    common = {"mode": executor.runner.mode.value, "layers": config.num_layers, "batch": load.batch}
    common |= {"context": load.context, "slots": shape.slots_per_lane}

    def row(name: str, backend: str, settings: dict[str, Any], target: float | None, **numbers: Any) -> Row:
        settings = common | settings
        return Row(name=name, backend=backend, settings=settings, target=target if targets else None, **numbers)

    began = time.perf_counter()
    runs.bare_rate(subject)
    say(f"compiled and run: prefill, admission and steps, {time.perf_counter() - began:.1f} s")

    async def warm_up(engine: Engine) -> None:
        for what, prompt in (
            ("a prefix in the cache", subject.prompt(0, hit=load.hit)),
            ("a short prompt", subject.tokens(load.short, -1)),
            *((f"a prompt of {length} tokens", _long(subject, length, -1)) for length in load.longs),
        ):
            began = time.perf_counter()
            await runs.first_token(engine, prompt)
            say(f"compiled and run: {what}, {time.perf_counter() - began:.1f} s")

    runs.with_engine(subject, warm_up)
    yield from _decode(subject, row)
    yield from _first_tokens(subject, row)
    yield _parking(subject, row)


def _decode(subject: Subject, row: Callable[..., Row]) -> Iterator[Row]:
    """The bare lanes and the engine by turns, since a host's speed changes from minute to minute."""
    heads = subject.executor.runner.config.num_kv_heads
    bare: list[runs.Rate] = []
    engine: list[runs.Rate] = []
    error: str | None = None
    for _ in range(runs.ROUNDS):
        bare.append(runs.bare_rate(subject))
        try:
            engine.append(runs.with_engine(subject, lambda engine: runs.engine_rate(engine, subject)))
        except runs.TooShort as short:
            error = str(short)
            break

    def settings(rates: list[runs.Rate]) -> dict[str, Any]:
        return _median(rates).settings(heads) | {"all": [round(rate.tokens_per_second) for rate in rates]}

    value = _median(bare).tokens_per_second
    yield row("decode", "bare lanes", settings(bare), None, value=value, unit="tokens/s")
    target = ENGINE_SHARE * value
    if error:
        yield row("decode", "engine", {}, target, unit="tokens/s", error=error)
        return
    rate = _median(engine).tokens_per_second
    of_bare = {"of_bare": round(rate / value, 3)}
    yield row("decode", "engine", settings(engine) | of_bare, target, value=rate, unit="tokens/s")


def _median(rates: list[runs.Rate]) -> runs.Rate:
    return sorted(rates, key=lambda rate: rate.tokens_per_second)[len(rates) // 2]


def _long(subject: Subject, length: int, number: int) -> list[int]:
    """A prompt of so many tokens, the last of which, `_computed`, are not in the cache."""
    fresh = _computed(subject, length)
    return [*subject.prefix[: length - fresh], *subject.tokens(fresh, number - 1000)]


def _computed(subject: Subject, length: int) -> int:
    size = subject.load.block_size
    known = max(length - subject.load.computed, 0)
    return length - min(known // size * size, len(subject.prefix))


def _first_tokens(subject: Subject, row: Callable[..., Row]) -> Iterator[Row]:
    load, usage = subject.load, subject.executor.usage

    def behind_prefix(sample: int) -> list[int]:
        return subject.prompt(sample, hit=load.hit)

    def short(number: int) -> list[int]:
        return subject.tokens(load.short, 100 + number)

    before = usage.prefix_tokens
    idle = runs.with_engine(subject, lambda engine: runs.first_tokens(engine, behind_prefix))
    found = (usage.prefix_tokens - before) // runs.SAMPLES

    async def while_busy(engine: Engine) -> list[float]:
        async with runs.busy(engine, subject):
            return await runs.first_tokens(engine, behind_prefix)

    full = runs.with_engine(subject, while_busy)
    floor = found // load.block_size * subject.block_bytes / COPY_ENGINE_BYTES_PER_SECOND
    for name, times in (("idle", idle), ("all lanes decode", full)):
        yield row(
            f"first token behind a prefix, {name}",
            "engine",
            {"hit": found, "all_ms": _ms(times)},
            FIRST_TOKEN_MS if found >= TARGET_HIT else None,
            value=runs.median_ms(times),
            unit="ms",
            floor=1e3 * floor,
        )
    alone = runs.with_engine(subject, lambda engine: runs.first_tokens(engine, short))
    yield row(
        "first token of a short prompt, alone",
        "engine",
        {"prompt": load.short, "all_ms": _ms(alone)},
        None,
        value=runs.median_ms(alone),
        unit="ms",
    )
    fresh = itertools.count(runs.SAMPLES)  # a prompt that was there before would be found in the cache
    for length in load.longs:

        async def beside(engine: Engine, length: int = length) -> list[float]:
            return await runs.beside_a_long_prompt(
                engine,
                lambda: _long(subject, length, next(fresh)),
                lambda: short(next(fresh)),
                spread=statistics.median(alone),
            )

        name = "first token of a short prompt, beside a long one"
        settings = {"prompt": load.short, "long": length, "computed": _computed(subject, length)}
        target = BESIDE_LONG * runs.median_ms(alone)
        try:
            times = runs.with_engine(subject, beside)
        except runs.TooShort as error:
            yield row(name, "engine", settings, target, unit="ms", error=str(error))
            continue
        settings |= {"times_alone": round(runs.median_ms(times) / runs.median_ms(alone), 2), "all_ms": _ms(times)}
        yield row(name, "engine", settings, target, value=runs.median_ms(times), unit="ms")


def _parking(subject: Subject, row: Callable[..., Row]) -> Row:
    load, usage = subject.load, subject.executor.usage
    prompts = [subject.prompt(number) for number in range(load.batch + load.extra)]
    undisturbed: list[list[int]] = []
    for start in range(0, len(prompts), load.batch):
        part = prompts[start : start + load.batch]
        undisturbed += runs.with_engine(subject, lambda engine, part=part: runs.answers(engine, part))
    before = usage.parked
    parked = runs.with_engine(subject, lambda engine: runs.answers(engine, prompts), quantum=runs.QUANTUM)
    differ = sum(one != other for one, other in zip(parked, undisturbed, strict=True))
    settings = {"requests": len(prompts), "parks": usage.parked - before, "tokens": runs.PARKED_TOKENS}
    return row("forced parking", "engine", settings, 0, value=differ, unit="answers that differ")


def _ms(seconds: list[float]) -> list[float]:
    return [round(1e3 * one, 1) for one in seconds]
