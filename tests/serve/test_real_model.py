"""The server's engine over the real runner: what comes out over HTTP is what the library generates."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.monitoring
import pytest
from fastapi import FastAPI
from rich.console import Console

from sparda_jax import generate
from sparda_jax.library import SparDA
from sparda_jax.serve import warm_up as warm_ups
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.memory import plan_server, settle_chunks
from sparda_jax.serve.metrics import Metrics
from sparda_jax.serve.settings import Settings
from sparda_jax.serve.warm_up import buckets, programs
from tests.serve.fakes import wait_until
from tests.serve.in_process import executor_of

LONG = "the quick brown fox is yellow. " * 40
GPU_CHUNKS = generate.PREFILL_CHUNKS["gpu"]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the programs compiled since the list was last cleared."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> SparDA:
    return SparDA.from_pretrained(checkpoint, mode="sparse")


@pytest.fixture(scope="module")
def app(model: SparDA) -> Iterator[FastAPI]:
    engine = Engine(executor_of(model, max_active=2), eos_token_ids=model.config.eos_token_ids)
    engine.start()
    info = ServerInfo(model="tiny", mode="sparse", vocab_size=model.config.vocab_size, temperature=0.0)
    yield create_app(engine, model.tokenizer, info)
    engine.close()


def ask(app: FastAPI, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    return [response.json() for response in asyncio.run(send())]


def test_answers_at_the_same_time_are_those_of_the_library(app: FastAPI, model: SparDA) -> None:
    prompts = ["hello there", LONG, "what is the magic number?"]
    answers = ask(app, *({"prompt": prompt, "max_tokens": 5, "return_stats": True} for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = model.generate(prompt, max_new_tokens=5, return_stats=True)[0]
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (alone.text, alone.finish_reason)
        assert answer["usage"]["prompt_tokens"] == alone.prompt_tokens
        assert alone.stats is not None
        assert answer["sparda"]["mode"] == "sparse"
        assert {"mode": "sparse"} | answer["sparda"]["choices"][0] == {"index": 0} | alone.stats.to_dict()
    reads = [answer["sparda"]["choices"][0]["decode"]["read_fraction"] for answer in answers]
    assert reads[0] == reads[2] == 1.0  # below dense_len
    assert reads[1] < 0.5


def test_a_seed_gives_the_same_answer_again(app: FastAPI) -> None:
    body = {"prompt": "hello", "max_tokens": 12, "temperature": 1.0, "seed": 3}
    first, again, other = ask(app, body, body, body | {"seed": 2**64 - 1})
    assert first["choices"][0]["text"] == again["choices"][0]["text"] != other["choices"][0]["text"]


def test_buckets_and_programs(model: SparDA, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = model.runner
    assert programs(runner, 8192) == [(1024, 128)]
    monkeypatch.setattr(runner, "prefill_chunks", (256, 1024))
    assert programs(runner, 8192) == [(1024, 256), (1024, 1024)]
    monkeypatch.setattr(runner, "prefill_chunks", (256, 1024, 4096))
    sizes = {1024: (256, 1024), 2048: (256, 1024, 4096), 4096: (256, 1024, 4096), 8192: (256, 1024, 4096)}
    monkeypatch.setattr(runner, "max_model_len", 8192)
    assert programs(runner, 8192) == [(capacity, size) for capacity, some in sizes.items() for size in some]
    monkeypatch.setattr(runner, "max_model_len", 3000)
    assert buckets(runner, 8192) == [1024, 2048, 3008]
    assert buckets(runner, 2000) == [1024, 2048]


@pytest.mark.parametrize(
    ("asked", "chunks"), [(None, GPU_CHUNKS), (128, (128,)), (512, (256, 512)), (1024, (256, 1024)), (64, (64,))]
)
def test_the_prefill_budget_is_the_largest_chunk(
    model: SparDA, monkeypatch: pytest.MonkeyPatch, asked: int | None, chunks: tuple[int, ...]
) -> None:
    monkeypatch.setattr(model.runner, "prefill_chunks", GPU_CHUNKS)
    settings = Settings(prefill_tokens=asked)
    settle_chunks(model.runner, settings)
    assert model.runner.prefill_chunks == chunks
    plan, _ = plan_server(model.runner, settings)
    assert plan.demand.prefill_chunks == chunks


def test_after_the_warm_up_nothing_is_compiled(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    """Two small buckets; then requests that stay in the first, grow in prefill, cross blocks, wait, and share."""
    monkeypatch.setattr(generate, "MIN_CAPACITY", 128)
    monkeypatch.setitem(generate.PREFILL_CHUNKS, "cpu", (64,))
    model = SparDA.from_pretrained(checkpoint, mode="sparse", max_model_len=256)
    pool = 24 * 2 * 2 * 128 * 16 * 4 / 2**30  # 24 blocks
    executor = executor_of(model, max_active=2, host_pool_gib=pool, sample_every=10)
    compiled.clear()
    warm_ups.warm_up(executor, 0, Console(quiet=True))
    assert compiled == []
    warm_ups.warm_up(executor, 256, Console(quiet=True))
    assert compiled.count("jit(advance_and_store)") == len(programs(model.runner, 256)) == 2
    assert executor.blocks.num_free == executor.num_blocks
    assert executor.lanes.return_stats().sampled_steps == 1
    executor.note_cache()
    assert executor.cache_stats()["sampled_steps_total"][0] == 0, "what the warm-up did does not count"
    compiled.clear()
    engine = Engine(executor, eos_token_ids=[], quantum=10)
    engine.start()
    info = ServerInfo(model="tiny", mode="sparse", vocab_size=model.config.vocab_size, temperature=0.0)
    app = create_app(engine, model.tokenizer, info)
    try:
        wait_until(lambda: asyncio.run(engine.health()).ok)
        sizes = ((5, 3), (200, 30), (120, 70), (90, 12))
        bodies = [{"prompt": [70] * prompt, "max_tokens": new, "ignore_eos": True} for prompt, new in sizes]
        bodies[0] |= {"logit_bias": {"5": 1}, "min_tokens": 2, "temperature": 1, "min_p": 0.1, "logprobs": 2}
        bodies[1] |= {"repetition_penalty": 1.5, "echo": True, "logprobs": 1}
        bodies[2] |= {"presence_penalty": 1, "frequency_penalty": -1}
        numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 100}
        asked = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": numbers}}
        bodies[3] |= {"response_format": asked, "temperature": 1}
        for _ in range(2):  # the second time their prefixes are there
            answers = ask(app, *bodies)
            assert [answer["usage"]["completion_tokens"] for answer in answers] == [new for _, new in sizes]
    finally:
        engine.close()
    assert executor.usage.parked > 0
    assert executor.usage.prefix_tokens > 0
    assert compiled == []
    stats = executor.lanes.return_stats()
    assert stats.sampled_steps > 5
    text = Metrics(engine).text().decode()
    shown = dict(re.findall(r"^sparda_(\w+) (\S+)$", text, re.MULTILINE))
    assert int(float(shown["sampled_steps_total"])) == stats.sampled_steps - 1
    assert "exposed_wait_seconds" in shown
    assert "prefetch_recall" not in shown, "four blocks are too few to choose among"
    helped, typed = (re.findall(rf"^# {kind} (sparda_\w+) \S", text, re.MULTILINE) for kind in ("HELP", "TYPE"))
    assert helped == typed
