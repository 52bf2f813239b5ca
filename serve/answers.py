"""Answers being generated: tokens in, text out, stop strings applied, several answers merged into one stream."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

from sparda_jax.detokenizer import IncrementalDetokenizer
from sparda_jax.serve.metrics import TokenClock
from sparda_jax.serve.requests import FinishReason, TokenStream
from sparda_jax.serve.stop import StopChecker


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """New text of answer ``index``; the last piece carries the finish reason."""

    index: int
    text: str
    finish_reason: FinishReason | None = None


SILENCE = Piece(index=0, text="")
"""What `merge` gives when there has been nothing for a while."""


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
        stops: Sequence[str],
        stop_ids: Collection[int],
        clock: TokenClock,
    ) -> None:
        self.index = index
        self.completion_tokens = 0
        self.stats: dict[str, Any] | None = None
        self._tokens = tokens
        self._detokenizer = detokenizer
        self._stop = StopChecker(stops)
        self._stop_ids = frozenset(stop_ids)
        self._clock = clock

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The text as it becomes certain; the last piece has a finish reason.

        Raises:
            EngineError: the sequence could not be finished.
        """
        try:
            async for event in self._tokens:
                self._clock.tick()
                self.completion_tokens += 1
                self.stats = event.stats
                is_end = event.is_end or event.token_id in self._stop_ids
                reason = "stop" if is_end else event.finish_reason
                text = "" if is_end else self._detokenizer.push(event.token_id)
                if reason is not None:
                    text += self._detokenizer.flush()
                shown, stopped = self._stop.push(text)
                if stopped:
                    yield Piece(index=self.index, text=shown, finish_reason="stop")
                    return
                if reason is not None:
                    shown += self._stop.flush()
                    yield Piece(index=self.index, text=shown, finish_reason=reason)
                    return
                if shown:
                    yield Piece(index=self.index, text=shown)
        finally:
            self.cancel()
            self._clock.stop()

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
