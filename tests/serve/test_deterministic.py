"""``--deterministic``: a request's bits depend on nothing that ran before or beside it. Without it they may."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparda_jax import generate
from sparda_jax.library import SparDA
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.executor import Executor
from sparda_jax.serve.memory import settle_chunks
from sparda_jax.serve.settings import Settings, SettingsError
from tests.serve.harness import pool_of
from tests.serve.in_process import collect, executor_of, ids, prefilled, same_bits, with_engine

# Caches of 256 and 448 tokens, chunks of 128.
MAX_MODEL_LEN, MIN_CAPACITY = 448, 256


@pytest.fixture(scope="module", autouse=True)
def small_caches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "MIN_CAPACITY", MIN_CAPACITY)
        yield


def make(folder: Path, dtype: str, *, deterministic: bool) -> Executor:
    model = SparDA.from_pretrained(folder, mode="sparse", max_model_len=MAX_MODEL_LEN, dtype=dtype)
    return executor_of(model, max_active=2, slots=5, host_pool_gib=pool_of(40), deterministic=deterministic)


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def executor(request: pytest.FixtureRequest, scored_checkpoint: Path) -> Executor:
    return make(scored_checkpoint, request.param, deterministic=True)


def prompts_of(rng: random.Random) -> list[list[int]]:
    """Alike at the beginning, so that hits end within a chunk, at its end, and on either side of dense_len (256)."""
    long = ids(rng, 400)
    return [long[:n] + ids(rng, own) for n, own in ((400, 5), (330, 70), (192, 120), (192, 30), (128, 20), (70, 290))]


def test_a_prompt_behind_a_prefix_has_the_bits_of_one_that_is_computed_whole(executor: Executor) -> None:
    prompts = prompts_of(random.Random(1))
    executor.blocks.forget()
    alone = []
    for prompt in prompts:
        alone.append(prefilled(executor, prompt)[0])
        executor.blocks.forget()
    hits = []
    for prompt, expected in zip(prompts + prompts, alone + alone, strict=True):
        found, hit = prefilled(executor, prompt)
        assert same_bits(found, expected)
        hits.append(hit)
    # Whole chunks only, and nothing of a request that attends to everything for one that selects.
    assert hits == [0, 256, 128, 0, 128, 0, 384, 384, 256, 128, 128, 256]


def test_without_it_they_need_not_have(scored_checkpoint: Path) -> None:
    """So the option does something: a block that decode has written is found again."""
    executor = make(scored_checkpoint, "float32", deterministic=False)
    prompt = prompts_of(random.Random(1))[4]

    async def answer(engine: Engine) -> None:
        prompt.extend(await collect(await engine.submit(prompt, SamplingParams(max_tokens=100))))

    with_engine(executor, answer)
    read, hit = prefilled(executor, [*prompt, 5])
    executor.blocks.forget()
    computed, _ = prefilled(executor, [*prompt, 5])
    assert hit == 192
    assert not same_bits(read, computed)


def test_answers_are_the_same_alone_in_company_and_again(executor: Executor) -> None:
    rng = random.Random(2)
    prompts = prompts_of(rng)
    params = [SamplingParams(max_tokens=25 + place) for place in range(len(prompts))]
    params[3] = SamplingParams(max_tokens=30, temperature=1.0, seed=7)
    alone: list[list[int]] = []

    async def one_by_one(engine: Engine) -> None:
        for prompt, param in zip(prompts, params, strict=True):
            executor.blocks.forget()
            alone.append(await collect(await engine.submit(prompt, param)))

    async def together(engine: Engine) -> None:
        for _ in range(2):
            streams = [await engine.submit(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
            assert await asyncio.gather(*map(collect, streams)) == alone
        # The next turn of a chat does not read back what decode has written.
        follow_up = [*prompts[4], *alone[4], 5, 6]
        assert prefilled(executor, follow_up)[1] == 128

    with_engine(executor, one_by_one)
    executor.blocks.forget()
    before = executor.usage.parked
    with_engine(executor, together, quantum=3)
    assert executor.usage.parked > before


def test_what_it_can_not_be_combined_with() -> None:
    with pytest.raises(SettingsError, match="--sample-every 100 is not allowed with --deterministic"):
        Settings(deterministic=True, sample_every=100)


@pytest.mark.parametrize(
    ("asked", "most", "chunk"),
    [(None, 1 << 20, 1024), (None, 300, 256), (128, 1 << 20, 128), (512, 300, 256), (192, 0, None), (2048, 0, None)],
)
def test_chunks_are_of_one_size(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, asked: int | None, most: int, chunk: int | None
) -> None:
    """The largest that the smallest cache is a multiple of, and that fits into memory in the longest cache."""
    runner = executor.runner
    monkeypatch.setattr(runner, "prefill_chunks", (256, 1024, 4096))
    monkeypatch.setattr(
        runner, "chunk_for", lambda batch, rest, _: max(n for n in (128, 256, 1024) if n <= min(rest, most))
    )
    settings = Settings(deterministic=True, prefill_tokens=asked)
    if chunk is None:
        with pytest.raises(SettingsError, match=f"--prefill-tokens {asked} is not allowed with --deterministic"):
            settle_chunks(runner, settings)
    else:
        settle_chunks(runner, settings)
        assert runner.prefill_chunks == (chunk,)
