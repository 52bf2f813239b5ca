"""Two servers behind vllm-router, as docs/scaling-out.md has them: ``python -m tests.serve.two_replicas VLLM_ROUTER``.

Conversations must stay with the server that has their beginning, both servers must get some, answers must be those of
one server alone, and when a server drains, or is killed, the other one must answer.
"""

import contextlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import openai

from tests.serve.fakes import wait_until
from tests.serve.harness import TIMEOUT, ServerProcess, server_process
from tests.serve.tiny_checkpoint import write_checkpoint

CONVERSATIONS, TURNS = 16, 3
NEW_TOKENS = 8
KEY = "of-both"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def router(program: str, servers: Sequence[ServerProcess], log: Path) -> Iterator[str]:
    """The router as docs/scaling-out.md starts it, on any free port; yields its address."""
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *(s.url for s in servers)]
    command += ["--policy", "consistent_hash", "--health-check-interval-secs", "2", "--health-failure-threshold", "2"]
    command += ["--prometheus-port", str(free_port())]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), seconds=60)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def prompt_tokens(servers: Sequence[ServerProcess]) -> list[float]:
    return [server.metrics()["prompt_tokens_total"] for server in servers]


def ask(client: openai.OpenAI, prompt: str, **headers: str) -> str:
    """The streamed answer."""
    chunks = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=NEW_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers=headers,
    )
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def converse(client: openai.OpenAI, number: int, conversation: list[str], rng: random.Random) -> str:
    """One more turn: the prompt grows by the answer and a few words, as a chat does."""
    text = ask(client, "".join(conversation), **{"x-session-id": f"conversation-{number}"})
    conversation += [text, " " + " ".join(str(rng.randrange(100)) for _ in range(5))]
    return text


def main(program: str) -> None:
    """Raises AssertionError at the first thing that isn't as it should be."""
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        checkpoint = write_checkpoint(folder)
        servers = [stack.enter_context(server_process(checkpoint, folder / "programs", api_key=KEY)) for _ in range(2)]
        url = stack.enter_context(router(program, servers, folder / "router.log"))
        client = stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", timeout=300, max_retries=0, api_key=KEY))
        assert [model.id for model in client.models.list()] == ["tiny"]

        conversations = [[" ".join(str(rng.randrange(1000)) for _ in range(40))] for _ in range(CONVERSATIONS)]
        homes: list[set[int]] = [set() for _ in conversations]
        asked: list[tuple[str, str]] = []
        for _ in range(TURNS):
            for i, conversation in enumerate(conversations):
                before = prompt_tokens(servers)
                asked.append(("".join(conversation), converse(client, i, conversation, rng)))
                after = prompt_tokens(servers)
                homes[i].update(number for number in range(2) if after[number] > before[number])
        print(f"{CONVERSATIONS} conversations of {TURNS} turns; asked at replica: {[sorted(home) for home in homes]}")
        assert all(len(home) == 1 for home in homes), "a conversation has changed its server"
        assert {i for home in homes for i in home} == {0, 1}, "one server got nothing"

        hits = [server.metrics()["prefix_hit_tokens_total"] for server in servers]
        print(f"prompt tokens found in the prefix caches: {hits}")
        assert all(hits)

        direct = stack.enter_context(openai.OpenAI(base_url=f"{servers[1].url}/v1", timeout=300, api_key=KEY))
        for prompt, text in asked:
            assert text == ask(direct, prompt), prompt
        print(f"{len(asked)} of {len(asked)} answers are those of one server alone")

        worker = {"url": servers[0].url}
        httpx.post(f"{url}/remove_worker", params=worker, timeout=TIMEOUT).raise_for_status()
        before = prompt_tokens(servers)
        for i, conversation in enumerate(conversations):
            converse(client, i, conversation, rng)
        assert prompt_tokens(servers)[0] == before[0]
        print("replica 0 removed from the router: replica 1 answered the next turn of every conversation")
        httpx.post(f"{url}/add_worker", params=worker, timeout=TIMEOUT).raise_for_status()
        for i, conversation in enumerate(conversations):
            converse(client, i, conversation, rng)
        assert prompt_tokens(servers)[0] > before[0]
        print("replica 0 added again: it answers")

        servers[0].process.send_signal(signal.SIGTERM)
        # Until the router has noticed that a server has left, what would go there fails: clients try again.
        patient = client.with_options(max_retries=6)
        for i, conversation in enumerate(conversations):
            converse(patient, i, conversation, rng)
        assert servers[0].process.wait(60) == 0
        print("replica 0 drained and left: the next turn of every conversation was answered")


if __name__ == "__main__":
    main(sys.argv[1])
