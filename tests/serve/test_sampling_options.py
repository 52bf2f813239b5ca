"""Penalties, biases and log probabilities through the engine: in company, waiting, and with prefixes in the cache.

What is right is what the library generates for the same prompt alone; of a prompt, one forward pass of all its tokens.
"""

import asyncio
import dataclasses
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.cache import KVCache
from sparda_jax.forward import forward
from sparda_jax.library import SparDA
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.executor import Executor
from sparda_jax.serve.requests import TokenEvent, TokenStream
from tests.serve.harness import MAX_MODEL_LEN, pool_of
from tests.serve.in_process import Alone, check, executor_of, ids, until, with_engine
from tests.serve.tiny_tokenizer import EOS, IM_END

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
NEUTRAL: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@pytest.fixture(scope="module")
def model(scored_checkpoint: Path) -> SparDA:
    return SparDA.from_pretrained(scored_checkpoint, mode="sparse", max_model_len=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def executor(model: SparDA) -> Executor:
    """Some of whose steps are taken twice, for a sample."""
    return executor_of(model, max_active=2, slots=5, host_pool_gib=pool_of(30), sample_every=5)


def random_options(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """Some of them, of which none is mostly without effect."""
    options: dict[str, Any] = dict(rng.sample(sorted(PENALTIES.items()), rng.randrange(3)))
    if rng.random() < 0.3:
        options["logit_bias"] = tuple((token, rng.uniform(-5, 5)) for token in rng.sample(range(320), 40))
    if rng.random() < 0.3:
        options |= {"min_tokens": rng.randint(1, max_tokens), "stop_token_ids": tuple(range(100, 150))}
    if rng.random() < 0.4:
        options |= {"temperature": 1.0, "seed": rng.randrange(2**32), "min_p": rng.choice([0.0, 0.2])}
    if rng.random() < 0.5:
        options["logprobs"] = rng.randrange(4)
    return options


async def events_of(stream: TokenStream) -> list[TokenEvent]:
    return [event async for event in stream]


def test_every_request_gets_what_it_gets_alone(model: SparDA, executor: Executor) -> None:
    """Side by side with requests that ask for nothing, given up and taken again every other token."""
    rng, alone, before = random.Random(3), Alone(model), executor.usage.parked
    prefixes = [ids(rng, length) for length in (64, 320)]
    requests = []
    for _ in range(10):
        most = rng.randint(2, 16)
        prompt = rng.choice([[], *prefixes]) + ids(rng, rng.choice([1, 20, 65]))
        requests.append((prompt, SamplingParams(max_tokens=most, **random_options(rng, most))))

    async def test(engine: Engine) -> None:
        await check(engine, alone, requests)

    with_engine(executor, test, quantum=2)
    assert executor.usage.parked > before + 10
    changed = [
        alone(*request) != alone(request[0], dataclasses.replace(request[1], **NEUTRAL))
        for request in requests
        if request[1].counts_tokens
    ]
    assert sum(changed) > 2


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: Any, weights: Any, cache: KVCache, *operands: Any) -> jax.Array:
    decoder = nnx.merge(graphdef, weights)
    x, _, _ = forward(decoder, cache, *operands, mode=Mode.SPARSE, decode=False, max_len=MAX_MODEL_LEN)
    return decoder.logits(x[0])


def one_pass(model: SparDA, tokens: Sequence[int]) -> np.ndarray:
    """The model's log_softmax behind each token, in float64: all tokens at once, whatever served them."""
    width = 640
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(tokens)] = tokens
    cache = KVCache.empty(model.config, 1, width, jnp.float32)
    sparse = len(tokens) >= model.config.sparse.dense_len
    operands = (cache, padded, jnp.array([len(tokens)]), jnp.array([sparse]))
    found = np.asarray(_logits(*nnx.split(model.runner.model), *operands), np.float64)
    shifted = found - found.max(axis=1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))[: len(tokens)]


@pytest.mark.parametrize("length", [3, 200, 400])
def test_log_probabilities_are_those_of_one_pass(model: SparDA, executor: Executor, length: int) -> None:
    """Of the prompt and the answer, in company, though the prompt lies in the cache; penalties don't show in them."""
    rng = random.Random(length)
    prompt = ids(rng, length)
    plain = SamplingParams(max_tokens=6)
    asking = SamplingParams(max_tokens=6, logprobs=5, prompt_logprobs=2, **PENALTIES)
    hits = executor.usage.prefix_tokens

    async def test(engine: Engine) -> None:
        first = await events_of(await engine.submit(prompt, asking))
        streams = [await engine.submit(prompt, params) for params in (plain, asking, plain)]
        before, again, _ = await asyncio.gather(*map(events_of, streams))
        assert [event.logprobs for event in before] == [None] * 6
        assert [event.token_id for event in again] == [event.token_id for event in first]
        for events in (first, again):
            answer = [event.token_id for event in events]
            exact = one_pass(model, prompt)
            of_prompt = events[0].prompt_logprobs
            assert of_prompt is not None
            assert [event.prompt_logprobs for event in events[1:]] == [None] * 5
            assert of_prompt.ids.shape == (length - 1, 3)
            assert of_prompt.ids[:, 0].tolist() == prompt[1:]
            np.testing.assert_allclose(
                of_prompt.values, np.take_along_axis(exact[:-1], of_prompt.ids, axis=1), atol=2e-3
            )
            for event, place in zip(events, range(length - 1, length + 5), strict=True):
                row = event.logprobs
                assert row is not None
                assert row.ids[0, 0] == event.token_id
                if place > length - 1:
                    exact = one_pass(model, [*prompt, *answer[: place - length + 1]])
                np.testing.assert_allclose(row.values[0], exact[place][row.ids[0]], atol=2e-3)
                assert row.values[0, 1] == pytest.approx(exact[place].max(), abs=2e-3)
                if event.token_id in row.ids[0, 1:]:
                    assert row.values[0, 0] in row.values[0, 1:]

    with_engine(executor, test)
    cached = (length - 1) // 64 * 64
    # The two that don't ask read the prompt from the cache; those that do compute it.
    assert executor.usage.prefix_tokens - hits == 2 * cached


def test_min_tokens_holds_back_every_end(model: SparDA, executor: Executor) -> None:
    """The model is pushed to its own ends and to the request's; at the first place that is free one of them comes."""
    pushed = tuple((token, 100.0) for token in (EOS, IM_END, 200))

    async def test() -> None:
        engine = Engine(executor, eos_token_ids=[EOS, IM_END], quantum=3)
        engine.start()
        await until(lambda: engine.stats().max_active > 0)
        while not (await engine.health()).ok:
            await asyncio.sleep(0.005)
        try:
            for least in (0, 1, 7):
                params = SamplingParams(
                    max_tokens=12, min_tokens=least, stop_token_ids=(200,), logit_bias=pushed, repetition_penalty=1.1
                )
                tokens = [e.token_id for e in await events_of(await engine.submit([70, 71], params))]
                first = next(place for place, token in enumerate(tokens) if token in (EOS, IM_END, 200))
                assert first == least
        finally:
            engine.close()

    asyncio.run(test())


def test_ids_outside_the_vocabulary_are_refused(model: SparDA) -> None:
    for name, params in (
        ("logit_bias", SamplingParams(logit_bias=((320, 1.0),))),
        ("stop_token_ids", SamplingParams(stop_token_ids=(-1,))),
    ):
        with pytest.raises(ValueError, match=f"^{name} holds"):
            model.runner.start([5], params)


def test_lanes_want_the_tokens_that_penalties_count(executor: Executor) -> None:
    cache = executor.runner.new_cache(1, 1024)
    with pytest.raises(ValueError, match=r"^seen is missing"):
        executor.lanes.enter(0, cache, 5, SamplingParams(presence_penalty=1.0))


def test_the_library_takes_the_same_options(model: SparDA) -> None:
    ways: list[dict[str, Any]] = [{}, {"logit_bias": {99: 100.0}, "frequency_penalty": 2.0, "min_tokens": 8}]
    plain, other = (model.generate([[70, 71, 72]], max_new_tokens=8, logprobs=2, **more)[0] for more in ways)
    assert plain.logprobs is not None
    assert plain.logprobs.ids[:, 0].tolist() == plain.tokens
    assert plain.logprobs.ids[:, 1].tolist() == plain.tokens
    assert other.tokens[0] == 99
    assert len(other.tokens) == 8
