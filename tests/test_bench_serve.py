"""The load generator against servers that answer, refuse, stall, lie and die."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sparda_jax.bench import _report, serve
from sparda_jax.bench.__main__ import app
from sparda_jax.bench._load_client import OK, Outcome, TargetError
from sparda_jax.bench._load_plan import Span, Workload, plan
from sparda_jax.bench._load_rows import Limits, Measured, rows
from sparda_jax.serve.access import Access
from tests.serve.fakes import FakeRunner
from tests.serve.fakes import serve as serve_fake

WORKLOAD = Workload(
    rate=100.0, duration=0.5, prompt=Span(least=3, most=9), output=Span(least=2, most=5), shared_prefix=4, seed=1
)
Send = Callable[[bytes], Awaitable[None]]


class Scripted:
    """A server of a few lines; ``behave(number, body, send)`` answers completion number ``number``."""

    def __init__(self, behave: Callable[["Scripted", int, dict[str, Any], Send], Awaitable[None]]) -> None:
        self.behave, self.bodies, self.models = behave, list[dict[str, Any]](), json.dumps({"data": [{"id": "it"}]})
        self.tokens = json.dumps({"tokens": [5, 6, 7, 8, 9]})

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as listener:
            yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0]) if "content-length: " in head else 0
        body = await reader.readexactly(length)

        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        if head.startswith("get /v1/models"):
            await send(whole(200, self.models))
        elif head.startswith("post /tokenize"):
            await send(whole(200, self.tokens))
        elif head.startswith("get"):
            await send(whole(404, "{}"))
        else:
            self.bodies.append(json.loads(body))
            await self.behave(self, len(self.bodies) - 1, self.bodies[-1], send)


def whole(status: int, content: str) -> bytes:
    return f"HTTP/1.1 {status} x\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n{content}".encode()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(data: Any) -> bytes:
    line = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


def text(words: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": words, "finish_reason": reason}], "usage": None})


def ending(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"completion_tokens": tokens}}) + event("[DONE]") + b"0\r\n\r\n"


async def answer(_: Scripted, __: int, body: dict[str, Any], send: Send) -> None:
    await send(HEAD + text("a") + text("", "length") + ending(body["max_tokens"]))


def measure(server: Scripted, workload: Workload = WORKLOAD, timeout: float = 10.0) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with server.run() as url:
            _, (measured,) = await serve._measure(url, [workload], timeout)
        return list(measured.outcomes)

    return asyncio.run(run())


def statuses(outcomes: list[Outcome]) -> dict[str, int]:
    return dict(collections.Counter(outcome.status for outcome in outcomes))


def test_requests_are_what_was_planned() -> None:
    server = Scripted(answer)
    outcomes = measure(server)
    planned = plan(WORKLOAD, [5, 6, 7, 8, 9])
    assert statuses(outcomes) == {OK: len(planned)}
    wanted = {(tuple(request.prompt), request.max_tokens) for request in planned}
    assert {(tuple(body["prompt"]), body["max_tokens"]) for body in server.bodies} == wanted
    for body in server.bodies:
        assert body["prompt"][:4] == planned[0].prompt[:4]
        assert 7 <= len(body["prompt"]) <= 13
        assert 2 <= body["max_tokens"] <= 5
        assert (body["ignore_eos"], body["stream"], body["temperature"], body["model"]) == (True, True, 0, "it")
    assert [outcome.prompt_tokens for outcome in outcomes] == [len(request.prompt) for request in planned]


def test_arrivals_are_those_of_the_seed_and_the_rate() -> None:
    long = Workload(rate=50.0, duration=200.0, prompt=WORKLOAD.prompt, output=WORKLOAD.output, shared_prefix=0, seed=3)
    planned = plan(long, range(100))
    assert planned == plan(long, range(100))
    gaps = np.diff([0.0, *(request.due for request in planned)])
    # 10,000 exponential gaps: mean and deviation are one and the same, to a few percent.
    assert len(planned) == pytest.approx(10_000, rel=0.05)
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps.std() == pytest.approx(0.02, rel=0.05)
    assert {len(request.prompt) for request in planned} == set(range(3, 10))
    assert {request.max_tokens for request in planned} == set(range(2, 6))


def test_no_request_waits_for_the_answer_to_another_one() -> None:
    """The server answers nobody before all have asked."""
    few = dataclasses.replace(WORKLOAD, duration=0.15)
    count = len(plan(few, [5]))
    everybody = asyncio.Event()

    async def behave(server: Scripted, number: int, body: dict[str, Any], send: Send) -> None:
        if number == count - 1:
            everybody.set()
        await everybody.wait()
        await answer(server, number, body, send)

    outcomes = measure(Scripted(behave), few, timeout=2.0)
    assert statuses(outcomes) == {OK: count}
    # So the first has waited for as long as the last was due after it.
    assert outcomes[0].first is not None
    assert outcomes[0].first > outcomes[-1].due - outcomes[0].due
    assert max(outcome.late for outcome in outcomes) < 0.2


def test_times_are_those_of_the_events() -> None:
    async def behave(_: Scripted, __: int, body: dict[str, Any], send: Send) -> None:
        await asyncio.sleep(0.1)
        await send(HEAD + text("") + b"e\r\n: keep-alive\n\n\r\n")
        await asyncio.sleep(0.1)
        await send(text("first"))
        await asyncio.sleep(0.3)
        await send(text("last", "length"))
        await asyncio.sleep(0.1)
        await send(ending(body["max_tokens"]))

    outcomes = measure(Scripted(behave))
    first, between, end = [], [], []
    for outcome in outcomes:
        assert (outcome.status, outcome.tokens) == (OK, outcome.max_tokens)
        assert outcome.first is not None
        assert outcome.per_token is not None
        assert outcome.end is not None
        first.append(outcome.first - outcome.late)
        between.append(outcome.per_token * (outcome.max_tokens - 1))
        end.append(outcome.end - outcome.late)
    # One of them is not late by much, however busy the machine is.
    for times, right in ((first, 0.2), (between, 0.3), (end, 0.6)):
        assert right - 0.02 <= min(times) < right + 0.15


def test_failures_are_told_apart() -> None:
    kinds = ["429", "503", "cut", "error", "half a line", "short", "hangs", "no answer", "fine"]

    async def behave(server: Scripted, number: int, body: dict[str, Any], send: Send) -> None:
        match kinds[number % len(kinds)]:
            case "429" | "503" as status:
                await send(whole(int(status), '{"error": {"message": "no"}}'))
            case "cut":
                await send(HEAD + text("a"))
            case "error":
                await send(HEAD + text("a") + event({"error": {"message": "no"}}) + b"0\r\n\r\n")
            case "half a line":
                await send(HEAD + event('{"choices": [') + b"0\r\n\r\n")
            case "short":
                await send(HEAD + text("a", "stop") + ending(body["max_tokens"] - 1))
            case "hangs":
                await send(HEAD)
                await asyncio.sleep(3)
            case "fine":
                await answer(server, number, body, send)

    outcomes = measure(Scripted(behave), timeout=1.5)
    expected: collections.Counter[str] = collections.Counter()
    told = ["429", "503", "cut short", "cut short", "cut short", "wrong length", "timeout", "no connection", OK]
    for number in range(len(outcomes)):
        expected[told[number % len(kinds)]] += 1
    assert statuses(outcomes) == expected


ODD_EVENTS = [
    "[]",
    "null",
    "5",
    '"x"',
    "[" * 100_000,
    *map(
        json.dumps,
        [
            {"choices": 5},
            {"choices": None},
            {"choices": [5]},
            {"choices": [{"delta": {"content": "a"}}]},
            {"choices": [], "usage": {"other": 1}},
            {"choices": [], "usage": 5},
            {"choices": [], "usage": {"completion_tokens": "5"}},
            {"choices": [], "usage": {"completion_tokens": math.inf}},
        ],
    ),
]


def test_events_of_another_shape_end_their_request_alone() -> None:
    """Such as those of a chat; the other requests are measured."""

    async def behave(server: Scripted, number: int, body: dict[str, Any], send: Send) -> None:
        if number < len(ODD_EVENTS):
            await send(HEAD + text("a") + event(ODD_EVENTS[number]) + ending(body["max_tokens"]))
        else:
            await answer(server, number, body, send)

    outcomes = measure(Scripted(behave))
    assert statuses(outcomes) == {"cut short": len(ODD_EVENTS), OK: len(outcomes) - len(ODD_EVENTS)}


# Answers ten completions, and is gone in the middle of the next one.
MORTAL = r"""
import http.server, itertools, json, os, threading

numbers, lock = itertools.count(), threading.Lock()

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content.encode())

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "it"}], "server": {}}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self.answer(json.dumps({"tokens": [5, 6, 7]}))
        text = 'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
        with lock:
            if next(numbers) == 10:
                self.answer(text)
                os._exit(1)
            usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
            self.answer(text + f"data: {usage}\n\ndata: [DONE]\n\n")

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def test_a_server_that_dies_half_way() -> None:
    with subprocess.Popen([sys.executable, "-c", MORTAL], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        _, (measured,) = asyncio.run(serve._measure(url, [WORKLOAD], 10.0))
        process.kill()
    found = statuses(list(measured.outcomes))
    assert found[OK] == 10
    assert found["cut short"] >= 1
    assert found["no connection"] >= len(measured.outcomes) // 2
    assert sum(found.values()) == len(measured.outcomes)
    numbers = {row.name: row for row in rows(dataclasses.replace(measured, seconds=2.0), Limits())}
    assert numbers["answered"].value == 5.0


def outcome(status: str = OK, **times: float) -> Outcome:
    return Outcome(due=0.0, late=0.001, prompt_tokens=10, max_tokens=5, status=status, tokens=5, **times)


def test_rows() -> None:
    outcomes = [
        *(outcome(first=i / 100, end=i / 10, per_token=i / 1000) for i in range(1, 101)),
        outcome(first=0.01, end=0.01),  # an answer of one token
        *(outcome("429") for _ in range(7)),
    ]
    limits = Limits(first=500, per_token=40)
    found = list(rows(Measured(workload=WORKLOAD, outcomes=outcomes, seconds=10.0), limits))
    values = {(row.name, *map(str, row.settings.values())): row.value for row in found}
    ttft = [10.0, *(10.0 * i for i in range(1, 101))]
    for percentile in (50, 90, 99):
        key = ("time to first token", "100.0", str(percentile), "101")
        assert values[key] == pytest.approx(np.percentile(ttft, percentile))
        key = ("time per output token", "100.0", str(percentile), "100")
        assert values[key] == pytest.approx(np.percentile(range(1, 101), percentile))
    by_name = {row.name: row for row in found}
    assert by_name["output"].value == 5 * 101 / 10
    assert by_name["prompts"].value == 10 * 101 / 10
    assert by_name["answered"].value == 10.1
    assert by_name["goodput"].value == 4.1
    assert by_name["goodput"].settings["share"] == round(41 / 108, 4)
    assert (by_name["failed"].settings["status"], by_name["failed"].value) == ("429", 7)
    assert by_name["sent late"].value == pytest.approx(1.0)
    nothing = list(rows(Measured(workload=WORKLOAD, outcomes=[outcome("429")], seconds=1.0), limits))
    assert [row.error is None for row in nothing[:9]] == [False] * 9


def test_the_command_and_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engine over a fake model; the key is nowhere in the output, and no device is touched."""
    monkeypatch.setattr(_report, "_device", None)
    files = ["--json", str(tmp_path / "load.json"), "--plot", str(tmp_path / "load.png")]
    runner = FakeRunner()
    with serve_fake(runner, access=Access(api_key="sk-secret")) as served:
        command = (
            f"serve --url {served.url} --rate 30,60 --duration 0.5 --prompt-tokens 20:40 --output-tokens 4:8 "
            "--shared-prefix 16 --ttft-slo 5000 --commit abc"
        )
        refused = CliRunner().invoke(app, command.split(), env={"COLUMNS": "300"})
        assert refused.exit_code == 2
        assert "it wants an API key: set SPARDA_API_KEY" in refused.output
        done = CliRunner().invoke(app, [*command.split(), *files], env={"SPARDA_API_KEY": "sk-secret"})
        assert done.exit_code == 0, done.output
    written = (tmp_path / "load.json").read_text()
    assert "sk-secret" not in written + done.output
    record = json.loads(written)
    assert (record["commit"], record["server"]["model"], record["server"]["mode"]) == ("abc", "tiny", "sparse")
    assert record["machine"]["device"] == "a device that the server does not name"
    assert [workload["seed"] for workload in record["workloads"]] == [0, 1]
    values = {(row["name"], row["settings"]["rate"]): row["value"] for row in record["rows"]}
    for requests, rate in zip(record["requests"], (30.0, 60.0), strict=True):
        assert requests
        assert {request["status"] for request in requests} == {OK}
        assert values["goodput", rate] == values["answered", rate] > 0
        assert all(36 <= request["prompt_tokens"] <= 56 for request in requests)
        assert all(math.isfinite(request["first"]) for request in requests)
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_a_full_queue_is_429(tmp_path: Path) -> None:
    runner = FakeRunner(num_blocks=1)
    runner.step_seconds = 0.02
    with serve_fake(runner, max_active=1, max_queue=1) as served:
        command = (
            f"serve --url {served.url} --rate 60 --duration 0.5 --prompt-tokens 20 --output-tokens 20 "
            f"--json {tmp_path / 'load.json'}"
        )
        assert CliRunner().invoke(app, command.split()).exit_code == 0
    (requests,) = json.loads((tmp_path / "load.json").read_text())["requests"]
    found = collections.Counter(request["status"] for request in requests)
    assert set(found) == {OK, "429"}
    assert found["429"] > found[OK] > 0


def test_a_server_that_answers_nobody_is_an_error() -> None:
    with serve_fake() as served:
        served.engine.stop_accepting()
        command = f"serve --url {served.url} --rate 40 --duration 0.2 --prompt-tokens 9 --output-tokens 2"
        done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 1, done.output
    assert "status=503" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompt-tokens 9:3", "--prompt-tokens '9:3': give a number of tokens, or two as in 64:256"),
        ("--output-tokens 0", "--output-tokens '0': give a number"),
        ("--output-tokens 5:", "--output-tokens '5:': give a number"),
        ("--rate 0", "--rate 0: it must be a finite number above 0"),
        ("--rate fast", "--rate 'fast': give numbers, separated by commas"),
        ("--duration nan", "--duration nan: it must be a finite number above 0"),
        ("--ttft-slo -1", "--ttft-slo -1: it must be a finite number above 0"),
        ("--shared-prefix -1", "--shared-prefix -1: it must be at least 0"),
        ("--seed -1", "--seed -1: it must be at least 0"),
        ("--plot load.pdf", "load.pdf has to end in .png or .svg"),
        ("--json /dev/null/load.json", "--json /dev/null/load.json can't be written"),
        ("--url http://127.0.0.1:9", "--url http://127.0.0.1:9: /v1/models and /tokenize have to answer"),
        ("--url nonsense", "--url nonsense: /v1/models and /tokenize have to answer"),
    ],
)
def test_what_can_not_be_run_is_told(options: str, message: str) -> None:
    done = CliRunner().invoke(app, ["serve", *options.split()], env={"COLUMNS": "300"})
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_requests_that_the_server_could_not_take_are_told() -> None:
    server = Scripted(answer)
    server.models = json.dumps({"data": [{"id": "it", "max_model_len": 17}]})
    with pytest.raises(TargetError, match="it takes 17 tokens, and the longest request has 18"):
        measure(server)
    server.models = json.dumps({"data": []})
    with pytest.raises(TargetError, match=r"/v1/models and /tokenize have to answer"):
        measure(server)
    for models in ("[]", "5", '{"data": 5}', '{"data": ["it"]}', '{"data": [{"id": "it", "max_model_len": "17"}]}'):
        server.models = models
        with pytest.raises(TargetError, match=r"/v1/models and /tokenize have to answer"):
            measure(server)
    server.models = json.dumps({"data": [{"id": "it"}]})
    for tokens in ("[]", '{"tokens": 5}', '{"tokens": []}', '{"tokens": ["a"]}', '{"tokens": [{}]}', "[" * 100_000):
        server.tokens = tokens
        with pytest.raises(TargetError, match=r"/v1/models and /tokenize have to answer"):
            measure(server)
