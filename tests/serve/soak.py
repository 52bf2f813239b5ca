"""A server under random clients for as long as it is told to: ``python -m tests.serve.soak --minutes 30``.

Small memory, so that requests queue, wait and lose their lane all the time. Clients ask known questions and compare the
answers, break off, send nonsense, read `/health`, `/stats` and `/metrics`, and start conversations that grow. In the
end every gauge must be back, and the process must not have grown.
"""

import asyncio
import collections
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from tests.serve.harness import MAX_MODEL_LEN, Answer, ServerProcess, ask, ask_alone, client_of, mixed_requests, pool_of
from tests.serve.harness import server_process as running_server
from tests.serve.tiny_checkpoint import write_checkpoint

OPTIONS: dict[str, Any] = {"max_active": 4, "slots": 6, "max_queue": 200, "warm_up_len": 640}
NONSENSE: tuple[dict[str, Any] | str, ...] = (
    "{",
    {"prompt": []},
    {"prompt": [10**9]},
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "logit_bias": {"many": 1}},
    {"prompt": "x", "logprobs": 99},
    {"prompt": [5] * 2000},
    {"prompt": "x", "stop": ["" for _ in range(9)]},
)
GROWTH_MIB = 150
"""What a process may have grown by after its first tenth: allocators keep some."""
console = Console(width=160)


def resident_mib(server: ServerProcess) -> float:
    """Memory of the server's process."""
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("this system does not say how much memory a process has")


class Clients:
    """Many clients, each busy with one thing after the other until the time is over."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.server, self.seed = server, seed
        self.done: collections.Counter[str] = collections.Counter()
        self.known: list[tuple[dict[str, Any], Answer]] = []

    async def run(self, clients: int, until: float) -> None:
        async with client_of(self.server) as http:
            rng = random.Random(self.seed)
            bodies = mixed_requests(rng, 40)
            # Longer than a lane is kept while others wait.
            bodies += [body | {"n": 1, "max_tokens": 560, "ignore_eos": True} for body in mixed_requests(rng, 60)]
            bodies = [body for body in bodies if len(body["prompt"]) + body["max_tokens"] <= MAX_MODEL_LEN][:44]
            self.known = list(zip(bodies, await ask_alone(http, bodies), strict=True))
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(self._client(http, random.Random((self.seed << 16) + number), until))

    async def _client(self, http: httpx.AsyncClient, rng: random.Random, until: float) -> None:
        doing = (self._known, self._known, self._known, self._leaves, self._leaves, self._nonsense, self._looks)
        while time.monotonic() < until:
            await rng.choice((*doing, self._talks))(http, rng)
            await asyncio.sleep(rng.expovariate(4))

    async def _known(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        body, answer = rng.choice(self.known)
        found = await ask(http, body | {"stream": rng.random() < 0.5})
        assert found == answer, f"{body}: {found}, and alone {answer}"
        self.done["right answers"] += 1

    async def _leaves(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        body, _ = rng.choice(self.known)
        await ask(http, body | {"stream": True}, leave_after=rng.randint(1, 12))
        self.done["clients that left"] += 1

    async def _nonsense(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        body = rng.choice(NONSENSE)
        content = body if isinstance(body, str) else json.dumps(body)
        response = await http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert 400 <= response.status_code < 500, f"{content[:80]}: {response.status_code} {response.text[:200]}"
        self.done["refused"] += 1

    async def _looks(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        path = rng.choice(["/health", "/stats", "/metrics", "/v1/models", "/"])
        response = await http.get(path)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text[:200]}"
        self.done["looks"] += 1

    async def _talks(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        messages = [{"role": "user", "content": f"Begin {rng.randrange(1000)}."}]
        for turn in range(rng.randint(1, 4)):
            body = {"messages": messages, "max_tokens": 12, "temperature": 0.8, "seed": turn, "logprobs": True}
            body |= {"frequency_penalty": rng.choice([0, 0.5]), "top_logprobs": 3}
            response = await http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            choice = response.json()["choices"][0]
            assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
            messages += [choice["message"], {"role": "user", "content": f"And {turn}?"}]
            self.done["turns of a chat"] += 1


async def watch(server: ServerProcess, clients: Clients, began: float, until: float) -> tuple[float, float]:
    """Prints a line a minute; the memory after a tenth of the time, and the largest afterwards."""
    early, largest, printed = 0.0, 0.0, began
    while (now := time.monotonic()) < until:
        await asyncio.sleep(min(5.0, max(until - now, 0.1)))
        memory = resident_mib(server)
        if now < began + (until - began) / 10:
            early = max(early, memory)
        largest = max(largest, memory)
        if now - printed >= 60:
            printed = now
            metrics = await asyncio.to_thread(server.metrics)
            parks, hits = metrics["preemptions_total"], metrics["prefix_hit_tokens_total"]
            console.print(
                f"{(now - began) / 60:.0f} min: {dict(clients.done)}, {parks:.0f} parks, {hits:.0f} tokens found, "
                f"{memory:.0f} MiB",
                highlight=False,
            )
    return early, largest


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 30.0,
    clients: Annotated[int, typer.Option(help="How many at once.")] = 24,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 1,
) -> None:
    """Fails at the first wrong answer, status or gauge."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(Path(folder))
        options = OPTIONS | {"host_pool_gib": pool_of(48)}
        with running_server(checkpoint, Path(folder) / "programs", **options) as server:
            crowd = Clients(server, seed)

            async def run() -> tuple[float, float]:
                began = time.monotonic()
                until = began + 60 * minutes
                _, memory = await asyncio.gather(crowd.run(clients, until), watch(server, crowd, began, until))
                return memory

            early, largest = asyncio.run(run())
            metrics = server.wait_until_idle()
            assert largest < early + GROWTH_MIB, f"the process has grown from {early:.0f} to {largest:.0f} MiB"
            assert "Traceback" not in server.output(), server.output()[-5000:]
    console.print(
        f"{minutes:g} minutes, {clients} clients: {dict(crowd.done)}; {metrics['preemptions_total']:.0f} parks, "
        f"{metrics['prefix_hit_tokens_total']:.0f} prompt tokens found; memory {early:.0f} MiB after a tenth of the "
        f"time, {largest:.0f} at most; every gauge is back",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
