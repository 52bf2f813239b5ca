"""The real server in a process of its own over the tiny checkpoint, with little of everything, and its clients."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.serve.fakes import wait_until

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 640
BLOCK_SIZE = 64
# 2 layers of 2 heads of 64 keys and values of 16 channels, in float32
BLOCK_BYTES = 2 * 2 * 128 * 16 * 4
TIMEOUT = httpx.Timeout(300)

Answer = list[tuple[str, str]]
"""Text and finish reason of each choice."""


def pool_of(num_blocks: int) -> float:
    """What --host-pool-gib must be for so many blocks of the tiny checkpoint."""
    return num_blocks * BLOCK_BYTES / 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """A server that is ready."""

    process: subprocess.Popen[str]
    url: str
    printed: list[str]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def metrics(self) -> dict[str, float]:
        """The gauges and counters without labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT).text
        return {name: float(value) for name, value in re.findall(r"^sparda_(\w+) (\S+)$", text, re.MULTILINE)}

    def wait_until_idle(self) -> dict[str, float]:
        """Polls until no sequence is left; then every gauge must be back where it was before the first request."""
        wait_until(lambda: idle(self.metrics()), seconds=60)
        metrics = self.metrics()
        assert metrics["cache_unreserved_blocks"] == metrics["cache_blocks"]
        assert metrics["cache_free_blocks"] + metrics["cache_prefix_blocks"] == metrics["cache_blocks"]
        return metrics

    def output(self) -> str:
        return "".join(self.printed)


def idle(metrics: dict[str, float]) -> bool:
    return not any(value for name, value in metrics.items() if name.startswith("sequences_"))


@contextlib.contextmanager
def server_process(checkpoint: Path, programs: Path, **options: Any) -> Iterator[ServerProcess]:
    """Starts ``python -m sparda_jax.serve`` and waits until it is ready; the process is killed in the end.

    Args:
        checkpoint: the tiny one.
        programs: a folder for JAX's compilation cache, so that only the first start compiles.
        options: of the command line, with underscores; True stands for a flag.
    """
    options = {"port": 0, "max_model_len": MAX_MODEL_LEN, "model_name": "tiny"} | options
    arguments = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        arguments += [option] if value is True else [option, str(value)]
    process = subprocess.Popen(
        [sys.executable, "-m", "sparda_jax.serve", "--model", str(checkpoint), *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "COLUMNS": "200",
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed: list[str] = []
    reader = threading.Thread(target=lambda: printed.extend(process.stdout or []))
    reader.start()
    try:
        wait_until(lambda: process.poll() is not None or any(line.startswith("curl ") for line in printed), seconds=300)
        url = re.search(r"ready after .*: (http://127\.0\.0\.1:\d+)/v1", "".join(printed))
        assert process.poll() is None, "".join(printed)
        assert url is not None, "".join(printed)
        yield ServerProcess(process=process, url=url[1], printed=printed)
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        if process.stdout is not None:
            process.stdout.close()


def mixed_requests(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Bodies of completions: short and long ones, some alike at the beginning, greedy and sampled, one or two answers,
    streamed and whole. Each has one right answer."""
    prefixes = [_ids(rng, length) for length in (64, 150, 256, 500)]
    bodies = []
    for _ in range(count):
        match rng.randrange(3):
            case 0:
                prompt = _ids(rng, rng.randint(1, 60))
            case 1:
                prompt = [*rng.choice(prefixes), *_ids(rng, rng.randint(1, 80))]
            case _:
                prompt = _ids(rng, rng.randint(200, 580))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.choice([1, 2, 7, 15, 30])}
        if rng.random() < 0.4:
            body |= {"temperature": rng.choice([0.7, 1.2]), "top_p": 0.9, "seed": rng.randrange(2**32)}
        bodies.append(body | {"n": rng.choice([1, 1, 1, 2]), "stream": rng.random() < 0.5})
    return bodies


def _ids(rng: random.Random, length: int) -> list[int]:
    """Token ids of the tiny tokenizer, without the four special ones."""
    return [rng.randrange(4, 320) for _ in range(length)]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], *, leave_after: int | None = None) -> Answer:
    """One completion.

    Args:
        client: its base URL is the server's.
        body: of the request.
        leave_after: a streaming client closes the connection after so many events.
    """
    if not body.get("stream"):
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return [(choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]]
    texts = [""] * body.get("n", 1)
    reasons = [""] * len(texts)
    events = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            events += 1
            if events == leave_after:
                return []
            if not line.startswith("data: {"):
                continue
            data = json.loads(line.removeprefix("data: "))
            assert "error" not in data, data
            for choice in data["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"] or ""
    return list(zip(texts, reasons, strict=True))


async def ask_alone(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """The answers of an idle server: one answer at a time, also of those that a request asks for together."""
    answers = []
    for body in bodies:
        choices: Answer = []
        for i in range(body["n"]):
            seed = {"seed": body["seed"] + i} if "seed" in body else {}
            choices += await ask(client, body | {"n": 1, "stream": False} | seed)
        answers.append(choices)
    return answers


async def ask_together(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """The answers to requests that all arrive at once."""
    return await asyncio.gather(*(ask(client, body) for body in bodies))


def client_of(server: ServerProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits)


async def until_async(condition: Any, seconds: float = 60.0) -> None:
    """Polls an awaitable condition until it holds."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.01)
