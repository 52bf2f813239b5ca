"""Answers being generated: tokens in, text out, stop strings applied, several answers merged into one stream."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool

from sparda_jax.detokenizer import IncrementalDetokenizer
from sparda_jax.serve.metrics import TokenClock
from sparda_jax.serve.requests import FinishReason, TokenEvent, TokenStream
from sparda_jax.serve.scored_tokens import ScoredToken, TokenScorer
from sparda_jax.serve.stop import StopChecker


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """New text of answer ``index``; the last piece carries the finish reason.

    ``tokens`` are those since the piece before, where their log probabilities are asked for.
    """

    index: int
    text: str
    finish_reason: FinishReason | None = None
    tokens: tuple[ScoredToken, ...] = ()


SILENCE = Piece(index=0, text="")
"""What `merge` gives when there has been nothing for a while."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What an answer consists of besides new text, and where it ends.

    Attributes:
        echo: text of the prompt that it begins with, outside of the search for stop strings.
        stops: stop strings. stop_ids: tokens that end it.
        min_tokens: so many tokens come without a search for stop strings.
        empty: no new token is part of it.
    """

    echo: str = ""
    stops: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    min_tokens: int = 0
    empty: bool = False


class Answer:
    """One choice of a response.

    Attributes:
        index: its place among the choices.
        completion_tokens: tokens generated so far, the token or the stop string that ended it included.
        stats: what the sequence has read, where asked for.
    """

    def __init__(
        self,
        index: int,
        tokens: TokenStream,
        detokenizer: IncrementalDetokenizer,
        limits: Limits,
        clock: TokenClock,
        *,
        prompt: Sequence[int] = (),
        scorer: TokenScorer,
    ) -> None:
        """
        Args:
            index: its place among the choices.
            tokens: what the engine sends.
            detokenizer: a new one.
            limits: where it ends.
            clock: measures its tokens.
            prompt: the tokens of ``limits.echo``, whose log probabilities come with the first new token.
            scorer: makes texts of the tokens whose log probabilities are asked for.
        """
        self.index = index
        self.completion_tokens = 0
        self.stats: dict[str, Any] | None = None
        self._tokens = tokens
        self._detokenizer = detokenizer
        self._stop = StopChecker(limits.stops)
        self._stop_ids = frozenset(limits.stop_ids)
        self._limits, self._clock = limits, clock
        self._prompt, self._scorer = prompt, scorer
        self._scored: list[ScoredToken] = []
        self._length = len(limits.echo)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The text as it becomes certain; the last piece has a finish reason.

        Raises:
            EngineError: the sequence could not be finished.
        """
        try:
            # A prompt whose tokens are scored waits for that.
            if self._limits.echo and not self._prompt:
                yield self._piece(self._limits.echo)
            async for event in self._tokens:
                if event.prompt_logprobs is not None:
                    await run_in_threadpool(self._score_prompt, event)
                    yield self._piece(self._limits.echo)
                self.stats = event.stats
                if self._limits.empty:
                    yield self._piece("", "length")
                    return
                self._clock.tick()
                self.completion_tokens += 1
                is_end = event.is_end or event.token_id in self._stop_ids
                reason = "stop" if is_end else event.finish_reason
                text = "" if is_end else self._detokenizer.push(event.token_id)
                if reason is not None:
                    text += self._detokenizer.flush()
                if event.logprobs is not None:
                    self._scored.append(self._scorer.token(event.token_id, text, self._length, event.logprobs))
                self._length += len(text)
                searched = self.completion_tokens > self._limits.min_tokens
                shown, stopped = self._stop.push(text) if searched else (text, False)
                if stopped:
                    yield self._piece(shown, "stop")
                    return
                if reason is not None:
                    yield self._piece(shown + self._stop.flush(), reason)
                    return
                if shown:
                    yield self._piece(shown)
        finally:
            self.cancel()
            self._clock.stop()

    def _piece(self, text: str, reason: FinishReason | None = None) -> Piece:
        tokens, self._scored = tuple(self._scored), []
        return Piece(index=self.index, text=text, finish_reason=reason, tokens=tokens)

    def _score_prompt(self, event: TokenEvent) -> None:
        assert event.prompt_logprobs is not None
        self._scored = self._scorer.prompt(self._prompt, event.prompt_logprobs, len(self._limits.echo))

    def cancel(self) -> None:
        """Gives up the sequence; harmless when it has ended."""
        self._tokens.cancel()


async def merge(answers: Sequence[Answer], *, silence_seconds: float | None = None) -> AsyncGenerator[Piece]:
    """The pieces of several answers as they come. However it is left, every sequence is given up.

    Args:
        answers: numbered from 0.
        silence_seconds: after so long without a piece comes `SILENCE`, again and again; None: never.

    Raises:
        EngineError: of the first answer that failed.
    """
    pieces: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def pump(answer: Answer) -> None:
        try:
            async for piece in answer.pieces():
                pieces.put_nowait(piece)
            pieces.put_nowait(None)
        except Exception as error:  # handed to the reader, who raises it
            pieces.put_nowait(error)

    pumps = [asyncio.create_task(pump(answer)) for answer in answers]
    try:
        running = len(pumps)
        while running:
            try:
                async with asyncio.timeout(silence_seconds):
                    item = await pieces.get()
            except TimeoutError:
                yield SILENCE
                continue
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for answer, task in zip(answers, pumps, strict=True):
            answer.cancel()
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
