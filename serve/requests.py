"""What passes between the HTTP layer and the engine: a request's job, its tokens, and the errors that end it."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import UInt32

from sparda_jax.logprobs import Logprobs
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.scheduler import Task

FinishReason = Literal["stop", "length"]


class EngineError(Exception):
    """A request that the engine could not finish; the message is for the client."""


class RequestRejected(EngineError):
    """The engine refuses this request's prompt or parameters: the client's mistake."""


class QueueFull(EngineError):
    """As many requests wait as are allowed to; try again later."""


class EngineUnavailable(EngineError):
    """The engine is starting, shutting down or dead."""


class FatalError(Exception):
    """Raised inside a step when the model itself can't go on (a lost device, a lost pool): it ends the engine."""


class GrammarLike(Protocol):
    """What one answer must look like; `sparda_jax.serve.grammar.Grammar`. Both raise EngineError."""

    def allowed(self) -> UInt32[np.ndarray, "words"]: ...
    def accept(self, token: int) -> bool: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One new token.

    Attributes:
        token_id: the token.
        finish_reason: why this is the last one: ``stop`` for an end-of-sequence token or a grammar that is
            complete, ``length``; else None.
        is_end: the token itself is an end-of-sequence token, whose text is not part of the answer.
        stats: what the sequence has read so far, where `Engine.submit` was asked for it.
        logprobs: of this token, a row, where its parameters ask for them.
        prompt_logprobs: of the prompt's tokens behind the first, likewise; with the first new token only.
    """

    token_id: int
    finish_reason: FinishReason | None = None
    is_end: bool = False
    stats: dict[str, Any] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


@dataclasses.dataclass(eq=False, kw_only=True)
class Job[S](Task):
    """A request inside the engine.

    Attributes:
        grammar: what the answer must look like; None: anything.
        sequence: the executor's, from admission to the end.
        tokens: how many have been sent. launched: decode steps that it took part in.
        settled: its prompt's blocks are in the pool.
        cancelled: nobody wants the rest.
    """

    prompt: list[int]
    params: SamplingParams
    ignore_eos: bool
    with_stats: bool
    loop: asyncio.AbstractEventLoop
    grammar: GrammarLike | None = None
    events: asyncio.Queue[TokenEvent | EngineError] = dataclasses.field(default_factory=asyncio.Queue)
    submitted: float = dataclasses.field(default_factory=time.monotonic)
    sequence: S | None = None
    tokens: int = 0
    launched: int = 0
    settled: bool = False
    cancelled: bool = False


Post = tuple[Job[Any], TokenEvent | EngineError]
"""A token for a request, or the error that ends it."""


def post(loop: asyncio.AbstractEventLoop, posts: Sequence[Post]) -> None:
    """Sends these to requests of one event loop; from any thread."""
    try:
        loop.call_soon_threadsafe(_deliver, posts)
    except RuntimeError:  # the clients' event loop has been closed
        for job, _ in posts:
            job.cancelled = True


def _deliver(posts: Sequence[Post]) -> None:
    for job, item in posts:
        job.events.put_nowait(item)


class TokenStream(AsyncIterator[TokenEvent]):
    """The tokens of one sequence; iterating raises the EngineError that ended it early."""

    def __init__(self, job: Job[Any]) -> None:
        self._job = job
        self._done = False

    async def __anext__(self) -> TokenEvent:
        if self._done:
            raise StopAsyncIteration
        item = await self._job.events.get()
        if isinstance(item, EngineError):
            self._done = True
            raise item
        self._done = item.finish_reason is not None
        return item

    def cancel(self) -> None:
        """The sequence takes part in no step launched from now on. Harmless when it has ended."""
        self._job.cancelled = True
