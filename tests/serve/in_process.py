"""The engine over the real device code in this process: requests and their right answers, slow copies, poison."""

import asyncio
import collections
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.library import SparDA
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.executor import Executor
from sparda_jax.serve.memory import make_executor, plan_server, settle_chunks
from sparda_jax.serve.requests import TokenStream
from sparda_jax.serve.settings import Settings

# At most so many seconds before each copy, and as many behind it.
DELAYS = {"store": 0.002, "write_tail": 0.004, "write_back": 0.002, "load": 0.004}


class Alone:
    """What the library gives for a prompt and its parameters, end-of-sequence tokens left out of the question."""

    def __init__(self, model: SparDA) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = {}

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        key = (tuple(prompt), params)
        if key not in self._known:
            sequence = self._model.runner.start(list(prompt), params)
            tokens: list[int] = []
            while len(tokens) < params.max_tokens:
                if (token := sequence.advance()) is not None:
                    tokens.append(token)
            self._known[key] = tokens
        return self._known[key]


def executor_of(model: SparDA, **options: Any) -> Executor:
    """The device's part of a server with these options."""
    settings = Settings(**options)
    settle_chunks(model.runner, settings)
    plan, limits = plan_server(model.runner, settings)
    return make_executor(model.runner, plan, limits, settings, b"tiny")


def prefilled(executor: Executor, prompt: list[int]) -> tuple[list[np.ndarray], int]:
    """Keys, values and compressed keys of a prompt's tokens, and how many of them were in the cache."""
    sequence = executor.start(prompt, SamplingParams(max_tokens=1))
    while executor.prefill(sequence) is None:
        pass
    assert sequence.prefill is not None
    cache = sequence.prefill._lanes._cache
    assert cache is not None
    windows = (len(prompt) - 32) // 16 + 1
    found = []
    for layer in cache.layers:
        found += [np.asarray(x)[:, :, : len(prompt)].copy() for x in (layer.k, layer.v)]
        found.append(np.asarray(layer.compressed_k)[:, :, :windows].copy())
    executor.release(sequence)
    return found, sequence.hit


def same_bits(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(one.tobytes() == other.tobytes() for one, other in zip(some, others, strict=True))


def with_engine(executor: Executor, test: Callable[[Engine], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        engine = Engine(executor, eos_token_ids=[], **options)
        engine.start()
        try:
            while not (await engine.health()).ok:
                await asyncio.sleep(0.005)
            await test(engine)
            await until(lambda: engine.stats().running == engine.stats().waiting == 0)
            assert engine.stats().free_blocks == executor.num_blocks
        finally:
            engine.close()

    asyncio.run(run())


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.002)


async def collect(stream: TokenStream) -> list[int]:
    return [event.token_id async for event in stream]


async def check(engine: Engine, alone: Alone, requests: Sequence[tuple[list[int], SamplingParams]]) -> None:
    """All at once; each answer must be that of the request alone."""
    streams = [await engine.submit(prompt, params) for prompt, params in requests]
    answers = await asyncio.gather(*map(collect, streams))
    for (prompt, params), answer in zip(requests, answers, strict=True):
        assert answer == alone(prompt, params), f"a prompt of {len(prompt)} tokens, {params}"


def ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(4, 320) for _ in range(length)]


def requests_of(rng: random.Random, count: int, *, max_tokens: int = 30) -> list[tuple[list[int], SamplingParams]]:
    """Some alike at the beginning, some sampled; lengths below and above dense_len, and at the end of a block."""
    prefixes = [ids(rng, length) for length in (64, 130, 320, 448)]
    found = []
    for _ in range(count):
        prompt = rng.choice([[], *prefixes]) + ids(rng, rng.choice([1, 20, 63, 64, 65, 128]))
        sampled = {"temperature": 1.0, "seed": rng.randrange(2**32)} if rng.random() < 0.4 else {}
        found.append((prompt, SamplingParams(max_tokens=rng.randint(1, max_tokens), **sampled)))
    return found


def slow_copies(executor: Executor, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> collections.Counter[str]:
    """Every copy takes a random while, and so does every turn; counts the copies by kind."""
    counts: collections.Counter[str] = collections.Counter()
    pool = executor.lanes._pool

    def slowed(owner: object, name: str, seconds: float) -> None:
        original = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            time.sleep(rng.random() * seconds)
            result = original(*args, **kwargs)
            time.sleep(rng.random() * seconds)
            return result

        monkeypatch.setattr(owner, name, slow)

    for name, seconds in DELAYS.items():
        slowed(pool, name, seconds)
    slowed(executor, "step", 0.003)
    slowed(executor, "read", 0.003)
    return counts


def poison(executor: Executor) -> int:
    """NaN wherever no sequence and no cached block lies: records, pages, and the slots of empty lanes; how many."""
    lanes, blocks = executor.lanes, executor.blocks
    heads = executor.runner.config.num_kv_heads
    free = [block for block in range(blocks.num_blocks) if not blocks._users[block] and block not in blocks._cached]
    empty = [lane for lane, entry in enumerate(lanes._lanes) if entry is None]
    poison_blocks(executor, free)
    layers = []
    for layer in lanes._state.layers:
        tables = layer.residency
        owned = [
            slot
            for lane in empty
            for slot in range(int(tables.base[lane]), int(tables.base[lane] + tables.count[lane]))
        ]
        rows = jnp.asarray([slot * heads + head for slot in owned for head in range(heads)], jnp.int32)
        layers.append(dataclasses.replace(layer, slots=layer.slots.at[rows].set(jnp.nan)))
    lanes._state = dataclasses.replace(lanes._state, layers=tuple(layers))
    return len(free) + len(empty)


def poison_blocks(executor: Executor, blocks: Sequence[int]) -> None:
    """NaN in the records and pages of these blocks."""
    lanes, heads = executor.lanes, executor.runner.config.num_kv_heads
    rows = jnp.asarray([block * heads + head for block in blocks for head in range(heads)], jnp.int32)
    pool = lanes._pool
    # By way of the device: the sharding of its default memory, and back to where the pool lies.
    device = jax.sharding.SingleDeviceSharding(lanes._device)
    pool._pools = tuple(
        jax.device_put(jax.device_put(records, device).at[rows].set(jnp.nan), records.sharding)
        for records in pool._pools
    )
    where = jnp.asarray(blocks, jnp.int32)
    layers = tuple(
        dataclasses.replace(layer, pages=layer.pages.at[where].set(jnp.nan)) for layer in lanes._state.layers
    )
    lanes._state = dataclasses.replace(lanes._state, layers=layers)
