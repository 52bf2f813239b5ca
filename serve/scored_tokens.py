"""Tokens with their log probabilities, as text and bytes."""

import dataclasses
from collections.abc import Iterator, Sequence

from sparda_jax.logprobs import Logprobs
from sparda_jax.tokenizer import Tokenizer

# What JSON has no number for.
LOWEST = -9999.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Likely:
    """A token that could stand at a place.

    Attributes:
        text: of a control token its spelling. data: its bytes, which may be a part of a character.
        logprob: its natural logarithm.
    """

    text: str
    data: bytes
    logprob: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredToken:
    """A token of a prompt or an answer.

    Attributes:
        text: what it adds to the text: a character comes with the token that completes it. Of a control token its
            spelling, though the text has nothing of it.
        data: its bytes.
        offset: characters of the text before it.
        logprob: None of a prompt's first token.
        likeliest: at its place, the best first; the token itself may be one of them.
    """

    text: str
    data: bytes
    offset: int
    logprob: float | None
    likeliest: tuple[Likely, ...] = ()


class TokenScorer:
    """Makes `ScoredToken` of the rows of `Logprobs`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, ids: Sequence[int], logprobs: Logprobs, length: int) -> list[ScoredToken]:
        """A prompt's tokens.

        Args:
            ids: of all.
            logprobs: of those behind the first.
            length: characters that are shown of it.
        """
        detokenizer = self._tokenizer.detokenizer()
        texts = [detokenizer.push(token) for token in ids]
        texts[-1] += detokenizer.flush()
        found, offset, rows = [], 0, _rows(logprobs)
        for place, (token, text) in enumerate(zip(ids, texts, strict=True)):
            row = next(rows) if place else None
            # Where the tokenizer changes the text, the shown one is not quite what its tokens say.
            found.append(self._scored(token, text, min(offset, length), row))
            offset += len(text)
        return found

    def token(self, token: int, text: str, offset: int, logprobs: Logprobs) -> ScoredToken:
        """A new token, which adds ``text`` to what has ``offset`` characters; of its logprobs there is one row."""
        return self._scored(token, text, offset, next(_rows(logprobs)))

    def _scored(self, token: int, text: str, offset: int, row: Sequence[tuple[int, float]] | None) -> ScoredToken:
        data = self._tokenizer.token_bytes(token)
        if not self._tokenizer.adds_text(token):
            text = text or data.decode()
        if row is None:
            return ScoredToken(text=text, data=data, offset=offset, logprob=None)
        likeliest = []
        for other, logprob in row[1:]:
            other_data = self._tokenizer.token_bytes(other)
            other_text = text if other == token else other_data.decode(errors="replace")
            likeliest.append(Likely(text=other_text, data=other_data, logprob=logprob))
        return ScoredToken(text=text, data=data, offset=offset, logprob=row[0][1], likeliest=tuple(likeliest))


def _rows(logprobs: Logprobs) -> Iterator[list[tuple[int, float]]]:
    for ids, values in zip(logprobs.ids.tolist(), logprobs.values.tolist(), strict=True):
        # In this order a NaN becomes the lowest, too.
        yield [(token, max(LOWEST, value)) for token, value in zip(ids, values, strict=True)]
