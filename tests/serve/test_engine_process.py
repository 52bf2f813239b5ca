"""The engine over HTTP: a real server process with a few lanes and a dozen blocks, and more clients than fit."""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from sparda_jax.library import SparDA
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.server import Server
from sparda_jax.serve.settings import Settings
from tests.serve.fakes import FakeRunner
from tests.serve.harness import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    TIMEOUT,
    ServerProcess,
    ask,
    ask_alone,
    ask_together,
    client_of,
    idle,
    mixed_requests,
    pool_of,
    server_process,
)

NUM_BLOCKS = 20
MAX_QUEUE = 160
# Nobody stops reading this one early, so it holds its lane, or its place in the line, until its client leaves.
ENDLESS = {"prompt": [70] * 100, "max_tokens": MAX_MODEL_LEN - 100, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def server(scored_checkpoint: Path, programs: Path) -> Iterator[ServerProcess]:
    with server_process(
        scored_checkpoint,
        programs,
        max_active=3,
        slots=5,
        host_pool_gib=pool_of(NUM_BLOCKS),
        park_after=5,
        max_queue=MAX_QUEUE,
        drain_seconds=60,
    ) as running:
        yield running


def drive(server: ServerProcess, clients: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with client_of(server) as client:
            await clients(client)

    asyncio.run(run())


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_64_requests_at_once_are_answered_as_each_alone(
    server: ServerProcess, scored_checkpoint: Path, rounds: int
) -> None:
    rng = random.Random(rounds)
    model = SparDA.from_pretrained(scored_checkpoint, mode="sparse", max_model_len=MAX_MODEL_LEN)
    before = server.metrics()

    async def clients(client: httpx.AsyncClient) -> None:
        for _ in range(rounds):
            bodies = mixed_requests(rng, 64)
            alone = await ask_alone(client, bodies)
            assert await ask_together(client, bodies) == alone
            greedy = [(body, answer) for body, answer in zip(bodies, alone, strict=True) if "seed" not in body]
            for body, answer in greedy[:12]:
                told = model.generate(body["prompt"], max_new_tokens=body["max_tokens"])[0]
                assert answer == [(told.text, told.finish_reason)] * body["n"]

    drive(server, clients)
    after = server.wait_until_idle()
    for name in ("preemptions_total", "prefix_hit_tokens_total", "blocks_fetched_total"):
        assert after[name] > before[name], name


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_clients_that_leave_change_nothing_for_the_others(server: ServerProcess, rounds: int) -> None:
    rng = random.Random(100 + rounds)

    async def leave(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        await asyncio.sleep(rng.random())
        if rng.random() < 0.5:
            await ask(client, body | {"stream": True}, leave_after=rng.randint(1, 10))
        else:  # wherever it is: in the queue, in prefill, in a lane, between two turns
            with contextlib.suppress(httpx.TimeoutException):
                await client.post(
                    "/v1/completions", json=body | {"stream": False}, timeout=httpx.Timeout(60, read=rng.random() / 2)
                )

    async def clients(client: httpx.AsyncClient) -> None:
        for _ in range(rounds):
            bodies = mixed_requests(rng, 16)
            leaving = [body | {"max_tokens": 60, "ignore_eos": True} for body in mixed_requests(rng, 24)]
            alone = await ask_alone(client, bodies)
            staying = asyncio.create_task(ask_together(client, bodies))
            await asyncio.gather(*(leave(client, body) for body in leaving))
            assert await staying == alone

    drive(server, clients)
    server.wait_until_idle()


def test_a_client_that_leaves_in_the_middle_frees_everything(server: ServerProcess) -> None:
    """Soon: the endless answer had a few hundred steps to go."""
    before = server.metrics()["decode_steps_total"]

    async def clients(client: httpx.AsyncClient) -> None:
        await ask(client, ENDLESS, leave_after=4)

    drive(server, clients)
    steps = server.wait_until_idle()["decode_steps_total"] - before
    assert steps < ENDLESS["max_tokens"] - 100


def test_more_work_than_blocks_waits_and_beyond_the_queue_is_refused(server: ServerProcess) -> None:
    """Full-length sequences: two fill the pool, and each of the others waits for one of them."""
    body = {"prompt": [70] * (MAX_MODEL_LEN - 40), "max_tokens": 40, "ignore_eos": True}

    async def clients(client: httpx.AsyncClient) -> None:
        answers = await ask_together(client, [body] * 7)
        assert answers == [answers[0]] * 7
        flood = [asyncio.create_task(ask(client, body | {"n": 40})) for _ in range(4)]  # all that may wait
        await asyncio.sleep(0)
        while server.metrics()["sequences_queued"] < MAX_QUEUE - 40:
            await asyncio.sleep(0.01)
        refused = await client.post("/v1/completions", json=body | {"n": 60})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "may (--max-queue); try again later" in refused.json()["error"]["message"]
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    drive(server, clients)
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        ({"prompt": [70] * 600, "max_tokens": 100}, ("600", "100", "700", "640", "40")),
        ({"prompt": [70] * 640}, ("640",)),
        ({"prompt": [[70]] * (MAX_QUEUE + 4)}, (str(MAX_QUEUE + 4), str(MAX_QUEUE + 3))),
    ],
)
def test_what_can_never_fit_is_refused_at_once(
    server: ServerProcess, body: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT)
    assert refused.status_code == 400
    for number in numbers:
        assert number in refused.json()["error"]["message"]


def test_a_prompt_that_was_there_before_is_read_back(server: ServerProcess) -> None:
    rng = random.Random(7)
    prompt = [rng.randrange(4, 320) for _ in range(5 * BLOCK_SIZE + 10)]
    body = {"prompt": prompt, "max_tokens": 12}
    hits: list[float] = []

    async def clients(client: httpx.AsyncClient) -> None:
        answers = []
        for _ in range(2):
            before = server.metrics()["prefix_hit_tokens_total"]
            answers.append(await ask(client, body))
            hits.append(server.metrics()["prefix_hit_tokens_total"] - before)
        answers += await ask_together(client, [body, body | {"stream": True}, body])
        assert answers == [answers[0]] * 5
        # A new beginning, asked for three times at once.
        prompt[0] = 4
        together = await ask_together(client, [body] * 3)
        assert together == [await ask(client, body)] * 3

    drive(server, clients)
    assert hits == [0, 5 * BLOCK_SIZE]
    server.wait_until_idle()


def test_a_conversation_reads_its_own_history_back(server: ServerProcess, scored_checkpoint: Path) -> None:
    """Question and answer of the turns before are blocks of the pool, as far as they are whole."""
    model = SparDA.from_pretrained(scored_checkpoint, mode="sparse", max_model_len=MAX_MODEL_LEN)
    messages = [{"role": "user", "content": "the quick brown fox is yellow. " * 9}]
    used = 0
    for turn in range(3):
        before = server.metrics()["prefix_hit_tokens_total"]
        body = {"messages": messages, "max_tokens": 20}
        data = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=TIMEOUT).json()
        told = model.generate(messages, max_new_tokens=20)[0]
        text = data["choices"][0]["message"]["content"]
        assert text == told.text
        hit = server.metrics()["prefix_hit_tokens_total"] - before
        if turn:
            # Sparse prompts, since dense ones end at dense_len: all whole blocks of the turn before are there.
            assert hit >= used // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
            assert hit > 0
        used = data["usage"]["prompt_tokens"]
        messages = [
            *messages,
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "the sky is blue"},
        ]
    server.wait_until_idle()


async def statuses(url: str) -> tuple[int, int]:
    """Of a new request and of /health, over connections of their own."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
        posted = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
        return posted.status_code, (await client.get("/health")).status_code


def taken_in(metrics: dict[str, float]) -> float:
    return metrics["sequences_running"] + metrics["sequences_queued"]


def test_killed_it_starts_again_and_sigterm_lets_it_finish(scored_checkpoint: Path, programs: Path) -> None:
    body = {"prompt": "hello there", "max_tokens": 5}

    @contextlib.asynccontextmanager
    async def busy(client: httpx.AsyncClient, count: int) -> AsyncIterator[list[asyncio.Task[Any]]]:
        tasks = [asyncio.create_task(ask(client, ENDLESS)) for _ in range(count)]
        # All of them: one that came after the signal would be refused.
        while taken_in(server.metrics()) < count:
            await asyncio.sleep(0.01)
        yield tasks
        await asyncio.gather(*tasks, return_exceptions=True)

    with server_process(scored_checkpoint, programs, max_active=2, drain_seconds=60) as server:
        port = server.port

        async def first(client: httpx.AsyncClient) -> None:
            answers.append(await ask(client, body))
            answers.append(await ask(client, ENDLESS))
            async with busy(client, 3) as tasks:
                server.process.kill()
            assert all(isinstance(task.exception(), httpx.TransportError) for task in tasks)

        answers: list[Any] = []
        drive(server, first)
    with server_process(scored_checkpoint, programs, max_active=2, drain_seconds=60, port=port) as server:

        async def second(client: httpx.AsyncClient) -> None:
            assert await ask(client, body) == answers[0]
            async with busy(client, 6) as tasks:
                server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
                assert await statuses(server.url) == (503, 503)
            assert [task.result() for task in tasks] == [answers[1]] * 6

        drive(server, second)
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.output()


def test_a_second_signal_quits_at_once(scored_checkpoint: Path, programs: Path) -> None:
    with server_process(scored_checkpoint, programs, max_active=1, drain_seconds=600) as server:
        body = ENDLESS | {"stream": False, "n": 64}

        async def clients(client: httpx.AsyncClient) -> None:
            task = asyncio.create_task(ask(client, body))
            while idle(server.metrics()):
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait, 5) == 128 + signal.SIGTERM
            with pytest.raises(httpx.TransportError):
                await task

        drive(server, clients)


def test_idle_connections_are_closed_by_the_other_side(scored_checkpoint: Path) -> None:
    """A request may come on a connection as long as the client keeps it; httpx keeps it for 5 s, proxies for 60 s."""
    server = Server(FastAPI(), Engine(FakeRunner(), eos_token_ids=[]), Settings(model=scored_checkpoint))
    assert server.config.timeout_keep_alive > 60
