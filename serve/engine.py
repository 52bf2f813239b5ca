"""The engine: one thread that owns the device. It shares lanes, blocks and steps among the requests.

What it promises to the HTTP layer is `Engine`'s public methods and `TokenEvent`. What it asks of the device is
`ExecutorLike`; who gets what is the `Scheduler`'s decision. A turn is: park and place, admit, launch a decode step of
all lanes, only then read the tokens of the step before and send them, and launch one prefill chunk as soon as the
chunk before is done. So the device has its next step before anybody has looked at the last one; a sequence that has
ended takes part in one step more, and that token is dropped. While an answer in a lane has a grammar, the tokens are
read before the next step is launched, since that needs to know which tokens may come.
"""

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from sparda_jax.sampling import SamplingParams
from sparda_jax.serve import scheduler
from sparda_jax.serve.engine_parts import EngineStats, ExecutorLike, Health
from sparda_jax.serve.requests import (
    EngineError,
    EngineUnavailable,
    FatalError,
    FinishReason,
    GrammarLike,
    Job,
    Post,
    QueueFull,
    RequestRejected,
    TokenEvent,
    TokenStream,
    post,
)
from sparda_jax.serve.scheduler import NeverFits, Phase, Scheduler, Turn

logger = logging.getLogger(__name__)

# So long another thread keeps the engine's waiting at most, in place of Python's 5 ms: a step hardly takes longer.
# For `sys.setswitchinterval`, in the processes that run an engine.
SWITCH_SECONDS = 0.0005
# So many requests failing in a row, none succeeding in between, is the device's fault and not the requests'.
FAILURES_IN_A_ROW = 3
# An idle engine thread answers within milliseconds; this leaves room for a machine that is out of breath.
PING_SECONDS = 5.0
# The device's counts are asked for this often at most, and read in a later turn, when they are there.
CACHE_STATS_SECONDS = 1.0


class Engine:
    """Runs requests on one worker thread.

    Args:
        executor: the device.
        eos_token_ids: each of them ends a sequence.
        max_queue: requests that may wait beyond those that the cache has room for.
        quantum: tokens that a request decodes before it may have to give its lane to one that waits.
        stuck_seconds: a single turn that takes longer makes `health` report a stuck engine.
        request_seconds: a request that takes longer in all ends with an error.
        warm_up: called on the engine thread before the first request.
        on_ready: called on the engine thread when the warm-up is done and requests are taken.
        on_failure: called on the engine thread when it ends by an error.

    Raises:
        ValueError: a number is too small.
    """

    def __init__(
        self,
        executor: ExecutorLike[Any],
        *,
        eos_token_ids: Sequence[int],
        max_queue: int = 64,
        quantum: int = 256,
        stuck_seconds: float = 300.0,
        request_seconds: float = 3600.0,
        warm_up: Callable[[], None] | None = None,
        on_ready: Callable[[], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._executor = executor
        self._eos = frozenset(eos_token_ids)
        self._max_queue = max_queue
        self._stuck_seconds, self._request_seconds = stuck_seconds, request_seconds
        self._warm_up, self._on_ready, self._on_failure = warm_up, on_ready, on_failure
        self._wake = threading.Condition()
        self._scheduler: Scheduler[Job[Any]] = Scheduler(
            lanes=executor.num_lanes,
            num_blocks=executor.num_blocks,
            block_size=executor.block_size,
            staging_tokens=executor.staging_tokens,
            max_queue=max_queue,
            quantum=quantum,
        )
        self._jobs: dict[Job[Any], None] = {}  # an ordered set
        self._of_sequence: dict[Any, Job[Any]] = {}
        self._state: Literal["starting", "ready", "draining", "dead"] = "starting"
        self._error = "it was closed"
        self._closing = False
        self._pings = self._pongs = 0
        self._turn_started: float | None = None
        self._failures_in_a_row = 0
        self._cache_stats: dict[str, tuple[float, str]] = {}
        self._cache_noted_at = 0.0
        self._cache_noted = False
        self._cache_stats_due = True
        self._outbox: list[Post] = []
        self._thread = threading.Thread(target=self._run, name="sparda-engine", daemon=True)

    @property
    def max_model_len(self) -> int:
        return self._executor.max_model_len

    @property
    def capacity(self) -> int:
        """Sequences that one request may ask for at most: a larger one could never be taken."""
        return self._executor.num_lanes + self._max_queue

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Each of them ends a sequence."""
        return self._eos

    @property
    def is_running(self) -> bool:
        """Whether the thread lives, possibly inside a step that can't be interrupted."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread; `health` says ``ready`` when the warm-up is done."""
        self._thread.start()

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        ignore_eos: bool = False,
        with_stats: bool = False,
        grammar: GrammarLike | None = None,
    ) -> TokenStream:
        """Queues one sequence and returns its tokens as they come. Never suspends.

        ``grammar``: what the answer must look like, for this sequence alone; it ends with it.

        Raises:
            QueueFull: too many wait already.
            RequestRejected: it could never fit into the cache, or ``min_tokens`` has too many stop tokens to hold back.
            EngineUnavailable: the engine is not ready, or takes nothing new.
        """
        if params.min_tokens:
            try:
                params = dataclasses.replace(params, stop_token_ids=(*self._eos, *params.stop_token_ids))
            except ValueError as error:
                raise RequestRejected(str(error)) from error
        if grammar is not None:
            params = dataclasses.replace(params, masked=True)
        room = max(self.max_model_len - len(prompt_ids), 1)
        job: Job[Any] = Job(
            prompt_tokens=len(prompt_ids),
            max_tokens=min(params.max_tokens, room),
            prompt=list(prompt_ids),
            params=params,
            ignore_eos=ignore_eos,
            with_stats=with_stats,
            grammar=grammar,
            loop=asyncio.get_running_loop(),
        )
        with self._wake:
            if self._state != "ready":
                raise EngineUnavailable(self._unavailable())
            self._forget_cancelled_waiting()
            try:
                self._scheduler.submit(job)
            except scheduler.QueueFull as error:
                raise QueueFull(str(error)) from error
            except (NeverFits, ValueError) as error:
                raise RequestRejected(str(error)) from error
            self._jobs[job] = None
            self._wake.notify()
        return TokenStream(job)

    async def health(self) -> Health:
        """Asks the engine thread itself: an idle one must answer, a busy one must be within its turn's time."""
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
            started, now = self._turn_started, time.monotonic()
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
            waiting = sum(job.phase is Phase.WAITING and not job.cancelled for job in self._jobs)
            phases = self._scheduler
            return EngineStats(
                running=phases.running + phases.prefilling + phases.ready + phases.parked,
                waiting=waiting,
                prefilling=phases.prefilling,
                decoding=phases.running,
                without_lane=phases.ready + phases.parked,
                free_blocks=phases.free_blocks,
                max_active=self._executor.num_lanes,
                max_queue=self._max_queue,
            )

    def cache_stats(self) -> dict[str, tuple[float, str]]:
        """What the executor says of its cache, at most `CACHE_STATS_SECONDS` old while it works."""
        return self._cache_stats

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
            if not self._jobs:
                return True
            await asyncio.sleep(0.02)
        return not self._abort(EngineUnavailable(f"the server shut down before this request was done ({seconds:g} s)"))

    def close(self, timeout: float = 10.0) -> None:
        """Ends the thread after the turn in progress, and every request that is left with an error."""
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
            jobs = [job for job in self._jobs if not job.cancelled]
            for job in jobs:
                job.cancelled = True
                post(job.loop, [(job, error)])
            self._wake.notify()
        return len(jobs)

    def _forget_cancelled_waiting(self) -> None:
        """Gives the places of cancelled requests in the queue to others at once; call it with the lock."""
        for job in [job for job in self._jobs if job.cancelled and job.phase is Phase.WAITING]:
            self._scheduler.cancel(job)
            del self._jobs[job]

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
                self._take(turn)
        except BaseException as error:  # whatever it was, the clients that wait must hear of it
            logger.exception("the engine thread has stopped")
            self._error = _first_line(error)
            with self._wake:
                self._state = "dead"
            self._abort(EngineUnavailable(self._unavailable()))
            if self._on_failure is not None:
                self._on_failure(error)

    def _next_turn(self) -> Turn[Job[Any]] | None:
        """Ends what was cancelled or takes too long, and waits for work if there is none; None: closing."""
        while True:
            now = time.monotonic()
            with self._wake:
                self._pongs = self._pings
                late = [job for job in self._jobs if now - job.submitted > self._request_seconds and not job.cancelled]
                over = [*(job for job in self._jobs if job.cancelled), *late]
            for job in late:
                late_error = EngineError(
                    f"the request took longer than {self._request_seconds:g} s (--request-seconds)"
                )
                post(job.loop, [(job, late_error)])
            for job in over:
                self._end(job)
            if not self._jobs and self._cache_stats_due:
                # So that an idle engine's numbers are the last ones.
                self._executor.note_cache()
                self._cache_stats, self._cache_stats_due = self._executor.cache_stats(), False
            with self._wake:
                if self._closing:
                    return None
                turn = self._scheduler.turn()
                if turn.prefill or turn.placed or self._scheduler.running:
                    return turn
                if self._pongs == self._pings:
                    self._wake.wait()

    def _take(self, turn: Turn[Job[Any]]) -> None:
        executor = self._executor
        self._turn_started = time.monotonic()
        try:
            for _, job in turn.parked:
                executor.park(job.sequence)
            for lane, job in turn.placed:
                executor.place(lane, job.sequence)
            with self._wake:
                jobs = list(self._jobs)
            for job in jobs:
                if job.phase is Phase.READY and not job.settled:
                    executor.park(job.sequence)  # its blocks go to the pool, and staging is free for the next
                    job.settled = True
            # Only now: who waited for the prompt before it finds that prompt's blocks.
            for job in turn.admitted:
                self._guard(job, self._begin)
            if any(job.grammar is not None and job.phase is Phase.RUNNING for job in jobs):
                self._read(unread=0)
            running = [job for job in jobs if job.phase is Phase.RUNNING]
            # A step more would be for tokens that nobody asked for, if all have theirs on the way.
            stepping = any(job.launched + 1 < job.max_tokens for job in running)
            if stepping:
                executor.step()
                for job in running:
                    job.launched += 1
                with self._wake:
                    self._scheduler.stepped(running)
            self._read(unread=int(stepping))
            self._send()  # before the chunk, which may have to wait for the one before it
            if turn.prefill is not None and turn.prefill.phase is Phase.PREFILLING:
                self._guard(turn.prefill, self._prefill)
            self._look_at_cache()
        finally:
            self._send()
            self._turn_started = None

    def _read(self, unread: int) -> None:
        for sequence, token in self._executor.read(unread=unread):
            if (job := self._of_sequence.get(sequence)) is not None:
                self._emit(job, token)

    def _look_at_cache(self) -> None:
        self._cache_stats_due = True
        if self._cache_noted:
            self._cache_stats, self._cache_noted = self._executor.cache_stats(), False
        elif time.monotonic() - self._cache_noted_at > CACHE_STATS_SECONDS:
            self._executor.note_cache()
            self._cache_noted, self._cache_noted_at = True, time.monotonic()

    def _send(self) -> None:
        """Hands the clients what they got in this turn, all at once: each handing over wakes their thread."""
        outbox, self._outbox = self._outbox, []
        for loop in {id(job.loop): job.loop for job, _ in outbox}.values():
            post(loop, [(job, item) for job, item in outbox if job.loop is loop])

    def _guard(self, job: Job[Any], action: Callable[[Job[Any]], None]) -> None:
        """A failure of this request's own; the others and the engine go on."""
        if job.cancelled:
            return
        try:
            action(job)
        except FatalError:
            raise
        except Exception as error:
            logger.exception("a request failed")
            self._failures_in_a_row += 1
            self._outbox.append((job, EngineError(f"the request failed inside the engine: {_first_line(error)}")))
            self._end(job)

    def _begin(self, job: Job[Any]) -> None:
        try:
            self._executor.check(job.prompt, job.params)
        except ValueError as error:
            self._outbox.append((job, RequestRejected(str(error))))
            self._end(job)
            return
        # From here on a ValueError is not the client's fault: JAX raises them, too.
        job.sequence = self._executor.start(job.prompt, job.params)
        self._of_sequence[job.sequence] = job
        if job.grammar is not None:
            self._executor.allow(job.sequence, job.grammar.allowed())
        self._report_prefill(job)

    def _prefill(self, job: Job[Any]) -> None:
        token = self._executor.prefill(job.sequence)
        self._report_prefill(job)
        if token is not None:
            self._emit(job, token)

    def _report_prefill(self, job: Job[Any]) -> None:
        assert job.sequence is not None
        if done := job.sequence.prefilled - job.prefilled:
            with self._wake:
                self._scheduler.prefilled(job, done)

    def _emit(self, job: Job[Any], token: int) -> None:
        assert job.sequence is not None
        job.tokens += 1
        self._failures_in_a_row = 0
        self._executor.fed(job.sequence, token)
        is_end = token in self._eos and not job.ignore_eos
        try:
            is_complete = job.grammar is not None and job.grammar.accept(token)
            ends = is_end or is_complete
            reason: FinishReason | None = "stop" if ends else "length" if job.tokens >= job.max_tokens else None
            if job.grammar is not None and reason is None:
                self._executor.allow(job.sequence, job.grammar.allowed())
        except EngineError as error:
            self._outbox.append((job, error))
            self._end(job)
            return
        stats = job.sequence.stats.to_dict() if job.with_stats else None
        logprobs, of_prompt = job.sequence.take_logprobs()
        event = TokenEvent(
            token_id=token,
            finish_reason=reason,
            is_end=is_end,
            stats=stats,
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
        )
        if reason is not None:
            self._end(job)
        # Sent after its lane and blocks are free: who has seen the end finds them so.
        self._outbox.append((job, event))

    def _end(self, job: Job[Any]) -> None:
        """Gives up all that a request holds; harmless when it has ended."""
        if job.sequence is not None:
            del self._of_sequence[job.sequence]
            self._executor.release(job.sequence)
            job.sequence = None
        with self._wake:
            self._scheduler.cancel(job)
            self._jobs.pop(job, None)


def _first_line(error: BaseException) -> str:
    """XLA's messages run over pages; the log has all of it."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
