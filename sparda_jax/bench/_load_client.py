"""The HTTP side of the load generator: asks what the server is, sends requests when they are due, times answers."""

import asyncio
import dataclasses
import json
import operator
import string
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from sparda_jax.bench._load_plan import Planned

# Its tokens are what prompts are made of: words, pieces of words and signs, and no control token.
SAMPLE = (
    "A load generator asks for as much as it was told to, whether the server keeps up or not. Prompts are made of the "
    "tokens of this text in any order, since their number matters here and their meaning does not. "
    + " ".join(string.digits + string.ascii_letters + string.punctuation)
)
OK = "ok"
# What JSON of another shape than expected leads to.
ODD = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)


class TargetError(Exception):
    """The server can't be measured; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A server that answers.

    Attributes:
        model: the first that it lists.
        max_model_len: tokens of a sequence; None if it does not say.
        vocabulary: ids for prompts.
        about: what it says of itself on ``/stats``; empty if it does not.
    """

    model: str
    max_model_len: int | None
    vocabulary: list[int]
    about: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one request; times in seconds.

    Attributes:
        due: when it was planned, from the start. late: how much later it was sent.
        prompt_tokens, max_tokens: what was asked for.
        status: ``ok``; an HTTP status other than 200; or ``no connection``, ``cut short`` (no end, or an error in it),
            ``timeout``, ``wrong length``.
        tokens: of the answer, as the server counts them.
        first, end: from when it was due until the first token's text and the end.
        per_token: between the tokens behind the first, on average.
    """

    due: float
    late: float
    prompt_tokens: int
    max_tokens: int
    status: str
    tokens: int = 0
    first: float | None = None
    end: float | None = None
    per_token: float | None = None


def client(url: str, api_key: str | None) -> httpx2.AsyncClient:
    """As many connections as are needed; nothing waits for another request."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None)


async def find_target(http: httpx2.AsyncClient) -> Target:
    """Asks the server for its model, its limits and some token ids.

    Raises:
        TargetError: it does not answer, or not as it has to.
    """
    try:
        models = await http.get("/v1/models", timeout=10)
        if models.status_code == 401:
            raise TargetError("it wants an API key: set SPARDA_API_KEY")
        card = models.raise_for_status().json()["data"][0]
        asked = {"model": card["id"], "prompt": SAMPLE, "add_special_tokens": False}
        tokens = (await http.post("/tokenize", json=asked, timeout=10)).raise_for_status().json()["tokens"]
        vocabulary = sorted(set(map(operator.index, tokens)))
        limit = card.get("max_model_len")
        if not vocabulary:
            raise ValueError("the sample text has no tokens")
        stats = await http.get("/stats", timeout=10)
        return Target(
            model=card["id"],
            max_model_len=None if limit is None else operator.index(limit),
            vocabulary=vocabulary,
            about=dict(stats.json()["server"]) if stats.status_code == 200 else {},
        )
    except (httpx2.HTTPError, httpx2.InvalidURL, *ODD) as error:
        raise TargetError(f"/v1/models and /tokenize have to answer: {error or type(error).__name__}") from error


async def send_all(
    http: httpx2.AsyncClient, planned: Sequence[Planned], *, model: str, timeout: float
) -> tuple[list[Outcome], float]:
    """Sends each request when it is due, whatever has become of the others; ends when all are over.

    Args:
        http: of the server.
        planned: in the order of their times.
        model: name for the requests.
        timeout: seconds that a request may take.

    Returns:
        What became of each, and the seconds from the start to the end of the last one.
    """
    bodies = [request.body(model) for request in planned]  # now, since that takes time
    began = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request, body in zip(planned, bodies, strict=True):
            await asyncio.sleep(max(began + request.due - time.perf_counter(), 0))
            tasks.append(group.create_task(_send(http, request, body, began, timeout)))
    return [task.result() for task in tasks], time.perf_counter() - began


async def _send(http: httpx2.AsyncClient, request: Planned, body: bytes, began: float, timeout: float) -> Outcome:
    due = began + request.due
    reader = _Reader()
    outcome = Outcome(
        due=request.due,
        late=time.perf_counter() - due,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        status=OK,
    )
    try:
        async with (
            asyncio.timeout(timeout),
            http.stream(
                "POST", "/v1/completions", content=body, headers={"Content-Type": "application/json"}
            ) as response,
        ):
            if response.status_code != 200:
                return dataclasses.replace(outcome, status=str(response.status_code))
            reader.began = True
            async for line in response.aiter_lines():
                reader.take(line)
    except TimeoutError:
        return dataclasses.replace(outcome, status="timeout")
    except (httpx2.HTTPError, *ODD):  # no answer, half a line of one, or another one
        return dataclasses.replace(outcome, status="cut short" if reader.began else "no connection")
    if not reader.done or reader.first is None or reader.last is None:
        return dataclasses.replace(outcome, status="cut short")
    gaps = reader.tokens - 1
    return dataclasses.replace(
        outcome,
        status=OK if reader.tokens == request.max_tokens else "wrong length",
        tokens=reader.tokens,
        first=reader.first - due,
        end=time.perf_counter() - due,
        per_token=(reader.last - reader.first) / gaps if gaps > 0 else None,
    )


class _Reader:
    """Takes the lines of a stream.

    Attributes:
        began: the server has answered with 200. done: it said that this was all.
        first, last: when the first and the last event with text came, or the end of an answer without any.
        tokens: what the usage says.
    """

    def __init__(self) -> None:
        self.began = self.done = False
        self.first: float | None = None
        self.last: float | None = None
        self.tokens = 0

    def take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if event.get("usage"):
            self.tokens = operator.index(event["usage"]["completion_tokens"])
        if any(choice["text"] or choice["finish_reason"] for choice in event.get("choices", ())):
            self.last = time.perf_counter()
            self.first = self.first or self.last
