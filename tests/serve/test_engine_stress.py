"""The engine over the real device code, in this process: slow copies, poison in whatever is free, failures, and order.

What is right is what the library generates for the same prompt alone.
"""

import asyncio
import collections
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from sparda_jax.library import SparDA
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.executor import Executor
from sparda_jax.serve.requests import TokenStream
from tests.serve.harness import MAX_MODEL_LEN, pool_of
from tests.serve.test_real_model import executor_of

NUM_BLOCKS = 20
SPEED = {"store": 0.002, "write_tail": 0.004, "write_back": 0.002, "load": 0.004}


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


@pytest.fixture(scope="module")
def alone(model: SparDA) -> Alone:
    return Alone(model)


def with_engine(executor: Executor, test: Callable[[Engine], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        engine = Engine(executor, eos_token_ids=[], **options)
        engine.start()
        try:
            while not (await engine.health()).ok:
                await asyncio.sleep(0.005)
            await test(engine)
            await until(lambda: engine.stats().running == engine.stats().waiting == 0)
            assert engine.stats().free_blocks == NUM_BLOCKS
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

    for name, seconds in SPEED.items():
        slowed(pool, name, seconds)
    slowed(executor, "step", 0.003)
    slowed(executor, "read", 0.003)
    return counts


@pytest.mark.parametrize("quantum", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_sequences_that_wait_again_and_again_go_on_as_if_they_never_had(
    executor: Executor, alone: Alone, monkeypatch: pytest.MonkeyPatch, quantum: int, rounds: int
) -> None:
    rng = random.Random(10 * rounds + quantum)
    counts = slow_copies(executor, monkeypatch, rng)
    before = executor.usage.parked

    async def test(engine: Engine) -> None:
        for _ in range(rounds):
            while (executor.usage.parked - before) < 20 * rounds or not counts["load"]:
                await check(engine, alone, requests_of(rng, 8))

    with_engine(executor, test, quantum=quantum)
    assert min(counts[name] for name in SPEED) > 0


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
        layers.append(layer.__class__(**{**vars(layer), "slots": layer.slots.at[rows].set(jnp.nan)}))
    lanes._state = lanes._state.__class__(**{**vars(lanes._state), "layers": tuple(layers)})
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
        layer.__class__(**{**vars(layer), "pages": layer.pages.at[where].set(jnp.nan)}) for layer in lanes._state.layers
    )
    lanes._state = lanes._state.__class__(**{**vars(lanes._state), "layers": layers})


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
