"""The engine on a GPU, with the bundled model in bfloat16: waiting again and again changes no token, nor do prefixes.

Lanes have slots for half of a sequence, so that steps fetch.
"""

import asyncio
import random
from collections.abc import Sequence

import pytest

from sparda_jax.library import SparDA
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.executor import Executor
from tests.serve.in_process import collect, executor_of, prefilled, same_bits, with_engine

pytestmark = pytest.mark.gpu

MAX_MODEL_LEN, LANES, SLOTS, BLOCKS = 4096, 2, 32, 300
PARAMS = SamplingParams(max_tokens=60)


def make(*, deterministic: bool) -> Executor:
    model = SparDA.from_pretrained(mode="sparda", max_model_len=MAX_MODEL_LEN)
    config = model.config
    rows = config.num_layers * config.num_kv_heads * 2 * config.sparse.block_size
    pool = BLOCKS * rows * config.head_dim * model.runner.dtype.itemsize / 2**30
    return executor_of(model, max_active=LANES, slots=SLOTS, host_pool_gib=pool, deterministic=deterministic)


def ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(16, 4096) for _ in range(length)]


async def answers(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    return await asyncio.gather(*[collect(await engine.submit(prompt, PARAMS)) for prompt in prompts])


def test_20_forced_parks_change_no_token() -> None:
    executor = make(deterministic=False)
    rng = random.Random(1)
    prompts = [ids(rng, length) for length in (3000, 2500, 1700, 300, 3900)]
    alone: list[list[int]] = []

    async def one_by_one(engine: Engine) -> None:
        for prompt in prompts:
            alone.extend(await answers(engine, [prompt]))

    async def together(engine: Engine) -> None:
        assert await answers(engine, prompts) == alone

    with_engine(executor, one_by_one)
    # What is computed again and not read back has the same bits.
    executor.blocks.forget()
    with_engine(executor, together, quantum=4)
    assert executor.usage.parked >= 20
    assert executor.lanes.return_stats().copied[1:].sum() > 0


def test_behind_a_prefix_all_bits_and_tokens_are_those_of_a_cold_run() -> None:
    executor = make(deterministic=True)
    rng = random.Random(2)
    document = ids(rng, 3500)
    prompts = [
        [*document[:length], *ids(rng, own)] for length, own in ((3500, 40), (2600, 700), (2112, 64), (1100, 10))
    ]
    cold_bits, cold = [], []

    async def one_by_one(engine: Engine) -> None:
        for prompt in prompts:
            executor.blocks.forget()
            cold.extend(await answers(engine, [prompt]))

    for prompt in prompts:
        executor.blocks.forget()
        cold_bits.append(prefilled(executor, prompt)[0])
    with_engine(executor, one_by_one)
    hits = []
    for _ in range(2):
        for prompt, expected in zip(prompts, cold_bits, strict=True):
            found, hit = prefilled(executor, prompt)
            assert same_bits(found, expected)
            hits.append(hit)
    assert min(hits[4:7]) >= 2048

    async def together(engine: Engine) -> None:
        assert await answers(engine, prompts) == cold

    with_engine(executor, together, quantum=4)
