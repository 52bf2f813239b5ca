"""The engine: one thread that owns the model and advances the active sequences in turn.

What it promises to the HTTP layer is `Engine`'s public methods and `TokenEvent`; another engine (one that batches
the sequences of a turn into one program) can replace the inside without touching the outside.
"""

import asyncio
import collections
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, Protocol

from sparda_jax.sampling import SamplingParams

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length"]
# So many requests failing in a row, none succeeding in between, is the device's fault and not the requests'.
FAILURES_IN_A_ROW = 3
# An idle engine thread answers within milliseconds; this leaves room for a machine that is out of breath.
PING_SECONDS = 5.0


class StatsLike(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


class SequenceLike(Protocol):
    """One request in the runner; `sparda_jax.generate.Sequence`."""

    @property
    def stats(self) -> StatsLike: ...

    def advance(self) -> int | None: ...


class RunnerLike(Protocol):
    """What the engine needs of a model; `sparda_jax.generate.Runner`."""

    max_model_len: int

    def start(self, prompt: Sequence[int], params: SamplingParams) -> SequenceLike: ...


class EngineError(Exception):
    """A request that the engine could not finish; the message is for the client."""


class RequestRejected(EngineError):
    """The runner refuses this request's prompt or parameters: the client's mistake."""


class QueueFull(EngineError):
    """As many requests wait as are allowed to; try again later."""


class EngineUnavailable(EngineError):
    """The engine is starting, shutting down or dead."""


class FatalError(Exception):
    """Raised inside a step when the model itself can't go on (a lost device, a lost pool): it ends the engine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One new token.

    Attributes:
        token_id: the token.
        finish_reason: why this is the last one: ``stop`` for an end-of-sequence token, ``length``; else None.
        is_end: the token itself is an end-of-sequence token, whose text is not part of the answer.
        stats: what the sequence has read so far, where `Engine.submit` was asked for it.
    """

    token_id: int
    finish_reason: FinishReason | None = None
    is_end: bool = False
    stats: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    """``ok`` is what a load balancer wants to know; ``status`` and ``detail`` are for people."""

    ok: bool
    status: Literal["starting", "ready", "failing", "draining", "stuck", "dead"]
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts at one moment: sequences running and waiting, with their limits."""

    running: int
    waiting: int
    max_active: int
    max_queue: int


@dataclasses.dataclass(eq=False, kw_only=True)
class _Job:
    prompt: list[int]
    params: SamplingParams
    ignore_eos: bool
    with_stats: bool
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[TokenEvent | EngineError] = dataclasses.field(default_factory=asyncio.Queue)
    sequence: SequenceLike | None = None
    tokens: int = 0
    cancelled: bool = False

    def post(self, item: TokenEvent | EngineError) -> None:
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, item)
        except RuntimeError:  # the client's event loop has been closed
            self.cancelled = True


class TokenStream(AsyncIterator[TokenEvent]):
    """The tokens of one sequence; iterating raises the EngineError that ended it early."""

    def __init__(self, job: _Job) -> None:
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
        """The sequence makes no step after the one in progress. Harmless when it has ended."""
        self._job.cancelled = True


class Engine:
    """Runs sequences on one worker thread: first come, first served, one step of each active sequence per turn.

    Args:
        runner: the model.
        eos_token_ids: each of them ends a sequence.
        max_active: sequences that hold a KV cache at the same time.
        max_queue: sequences that may wait beyond those.
        stuck_seconds: a single step that takes longer makes `health` report a stuck engine.
        warm_up: called on the engine thread before the first request.
        on_ready: called on the engine thread when the warm-up is done and requests are taken.
        on_failure: called on the engine thread when it ends by an error.
    """

    def __init__(
        self,
        runner: RunnerLike,
        *,
        eos_token_ids: Sequence[int],
        max_active: int = 4,
        max_queue: int = 64,
        stuck_seconds: float = 300.0,
        warm_up: Callable[[], None] | None = None,
        on_ready: Callable[[], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        for name, value, least in (("max_active", max_active, 1), ("max_queue", max_queue, 0)):
            if value < least:
                raise ValueError(f"{name}={value} is not allowed: it must be at least {least}")
        self._runner = runner
        self._eos = frozenset(eos_token_ids)
        self._max_active, self._max_queue = max_active, max_queue
        self._stuck_seconds = stuck_seconds
        self._warm_up, self._on_ready, self._on_failure = warm_up, on_ready, on_failure
        self._wake = threading.Condition()
        self._waiting: collections.deque[_Job] = collections.deque()
        self._active: list[_Job] = []
        self._state: Literal["starting", "ready", "draining", "dead"] = "starting"
        self._error = "it was closed"
        self._closing = False
        self._pings = self._pongs = 0
        self._step_started: float | None = None
        self._failures_in_a_row = 0
        self._thread = threading.Thread(target=self._run, name="sparda-engine", daemon=True)

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def capacity(self) -> int:
        """Sequences that one request may ask for at most: a larger one could never be taken."""
        return self._max_active + self._max_queue

    @property
    def is_running(self) -> bool:
        """Whether the thread lives, possibly inside a step that can't be interrupted."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread; `health` says ``ready`` when the warm-up is done."""
        self._thread.start()

    async def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, ignore_eos: bool = False, with_stats: bool = False
    ) -> TokenStream:
        """Queues one sequence and returns its tokens as they come. Never suspends.

        Raises:
            QueueFull: too many wait already.
            EngineUnavailable: the engine is not ready, or takes nothing new.
        """
        job = _Job(
            prompt=list(prompt_ids),
            params=params,
            ignore_eos=ignore_eos,
            with_stats=with_stats,
            loop=asyncio.get_running_loop(),
        )
        with self._wake:
            if self._state != "ready":
                raise EngineUnavailable(self._unavailable())
            waiting = sum(not other.cancelled for other in self._waiting)
            if waiting - (self._max_active - len(self._active)) >= self._max_queue:
                raise QueueFull(f"{waiting} requests are waiting, {self._max_queue} may (--max-queue); try again later")
            self._waiting.append(job)
            self._wake.notify()
        return TokenStream(job)

    async def health(self) -> Health:
        """Asks the engine thread itself: an idle one must answer, a busy one must be within its step's time."""
        with self._wake:
            state = self._state
            self._pings += 1
            ping = self._pings
            self._wake.notify()
        if state == "dead" or not self._thread.is_alive():
            return Health(ok=False, status="dead", detail=self._unavailable())
        if state in ("starting", "draining"):
            return Health(ok=False, status=state, detail=self._unavailable())
        asked = time.monotonic()
        while self._pongs < ping and self._thread.is_alive():
            started, now = self._step_started, time.monotonic()
            if started is not None:
                if now - started > self._stuck_seconds:
                    return Health(ok=False, status="stuck", detail=f"one step has taken {now - started:.0f} s so far")
                break
            if now - asked > PING_SECONDS:
                return Health(ok=False, status="stuck", detail=f"the engine has not answered for {now - asked:.0f} s")
            await asyncio.sleep(0.005)
        if self._failures_in_a_row >= FAILURES_IN_A_ROW:
            return Health(ok=False, status="failing", detail=f"the last {self._failures_in_a_row} requests failed")
        return Health(ok=True, status="ready", detail="")

    def stats(self) -> EngineStats:
        with self._wake:
            waiting = sum(not job.cancelled for job in self._waiting)
            return EngineStats(
                running=len(self._active), waiting=waiting, max_active=self._max_active, max_queue=self._max_queue
            )

    def stop_accepting(self) -> None:
        """New requests are refused from now on; those in flight go on."""
        with self._wake:
            if self._state in ("starting", "ready"):
                self._state = "draining"

    async def drain(self, seconds: float) -> bool:
        """Waits until nothing is in flight; after ``seconds`` the rest ends with an error.

        Returns:
            True when nothing was cut off.
        """
        self.stop_accepting()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not (self._active or self._waiting):
                return True
            await asyncio.sleep(0.02)
        return not self._abort(EngineUnavailable(f"the server shut down before this request was done ({seconds:g} s)"))

    def close(self, timeout: float = 10.0) -> None:
        """Ends the thread after the step in progress, and every request that is left with an error."""
        with self._wake:
            self._closing = True
            if self._state != "dead":
                self._state = "draining"
            self._wake.notify()
        self._abort(EngineUnavailable("the server is shutting down"))
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _unavailable(self) -> str:
        return {
            "starting": "the server is still starting",
            "ready": "",
            "draining": "the server is shutting down",
            "dead": f"the engine has stopped: {self._error}",
        }[self._state]

    def _abort(self, error: EngineError) -> int:
        """Ends every request with ``error``; the number of requests that had not been cancelled by their clients."""
        with self._wake:
            jobs = [job for job in (*self._active, *self._waiting) if not job.cancelled]
            for job in jobs:
                job.cancelled = True
                job.post(error)
            self._wake.notify()
        return len(jobs)

    # --- the engine thread ---

    def _run(self) -> None:
        try:
            if self._warm_up is not None:
                self._warm_up()
            with self._wake:
                came_up = self._state == "starting"
                if came_up:
                    self._state = "ready"
            if came_up and self._on_ready is not None:
                self._on_ready()
            while (turn := self._next_turn()) is not None:
                for job in turn:
                    self._step(job)
        except BaseException as error:  # whatever it was, the clients that wait must hear of it
            logger.exception("the engine thread has stopped")
            self._error = _first_line(error)
            with self._wake:
                self._state = "dead"
            self._abort(EngineUnavailable(self._unavailable()))
            if self._on_failure is not None:
                self._on_failure(error)

    def _next_turn(self) -> list[_Job] | None:
        """Drops cancelled jobs, admits waiting ones, and waits for work if there is none; None: closing."""
        with self._wake:
            while True:
                self._pongs = self._pings
                for job in [job for job in self._active if job.cancelled]:
                    job.sequence = None  # and with it the KV cache
                    self._active.remove(job)
                for job in [job for job in self._waiting if job.cancelled]:
                    self._waiting.remove(job)
                while self._waiting and len(self._active) < self._max_active:
                    self._active.append(self._waiting.popleft())
                if self._closing:
                    return None
                if self._active:
                    return list(self._active)
                self._wake.wait()

    def _step(self, job: _Job) -> None:
        if job.cancelled:
            return
        self._step_started = time.monotonic()
        try:
            if job.sequence is None:
                try:
                    job.sequence = self._runner.start(job.prompt, job.params)
                except ValueError as error:
                    self._finish(job, RequestRejected(str(error)))
                    return
            token = job.sequence.advance()
            if token is not None:
                self._emit(job, job.sequence, token)
        except FatalError:
            raise
        except Exception as error:  # one request's failure; the others and the engine go on
            logger.exception("a request failed")
            self._failures_in_a_row += 1
            self._finish(job, EngineError(f"the request failed inside the engine: {_first_line(error)}"))
        finally:
            self._step_started = None

    def _emit(self, job: _Job, sequence: SequenceLike, token: int) -> None:
        job.tokens += 1
        self._failures_in_a_row = 0
        is_end = token in self._eos and not job.ignore_eos
        full = len(job.prompt) + job.tokens >= self._runner.max_model_len
        reason: FinishReason | None = (
            "stop" if is_end else "length" if job.tokens >= job.params.max_tokens or full else None
        )
        stats = sequence.stats.to_dict() if job.with_stats else None
        event = TokenEvent(token_id=token, finish_reason=reason, is_end=is_end, stats=stats)
        if reason is None:
            job.post(event)
        else:
            self._finish(job, event)

    def _finish(self, job: _Job, last: TokenEvent | EngineError) -> None:
        """Gives up the sequence, with its cache, before the client hears of the end."""
        job.sequence = None
        with self._wake:
            self._active = [other for other in self._active if other is not job]
        job.post(last)


def _first_line(error: BaseException) -> str:
    """XLA's messages run over pages; the log has all of it."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
