"""The two response shapes, whole and in chunks, as OpenAI's clients read them."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from sparda_jax.serve.requests import FinishReason
from sparda_jax.serve.scored_tokens import Likely, ScoredToken

Json = dict[str, Any]


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk``."""

    endpoint = "chat.completions"
    prompt_field = "messages"
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Json:
        """The chunk that opens an answer, or nothing."""
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None}, None)

    def piece(self, index: int, text: str, logprobs: Json | None) -> Json:
        return self._delta(index, {"content": text}, None, logprobs)

    def closing(self, index: int, reason: FinishReason) -> Json:
        return self._delta(index, {}, reason)

    def choice(self, index: int, text: str, reason: FinishReason, logprobs: Json | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> Json:
        """``content``: an object a token, with the likeliest ones at its place."""

        def entry(token: ScoredToken | Likely) -> Json:
            return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}

        content = [entry(token) | {"top_logprobs": [entry(other) for other in token.likeliest]} for token in tokens]
        return {"content": content, "refusal": None}

    @staticmethod
    def _delta(index: int, delta: Json, reason: FinishReason | None, logprobs: Json | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class CompletionShape:
    """``text_completion``, the same object whole and in chunks."""

    endpoint = "completions"
    prompt_field = "prompt"
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> None:
        """A text needs none."""

    def piece(self, index: int, text: str, logprobs: Json | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def closing(self, index: int, reason: FinishReason) -> Json:
        return self.choice(index, "", reason, None)

    def choice(self, index: int, text: str, reason: FinishReason, logprobs: Json | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Sequence[ScoredToken]) -> Json:
        """Four lists; at each place the likeliest tokens by their text, and the token itself."""
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "tokens": [token.text for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
        }


def _by_text(token: ScoredToken) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for likely in token.likeliest:
        # Of tokens with the same text, as parts of characters have, the best one counts.
        found.setdefault(likely.text, likely.logprob)
    found.setdefault(token.text, token.logprob)
    return found


Shape = ChatShape | CompletionShape


class Envelope:
    """What all chunks of one response have in common."""

    def __init__(self, shape: Shape, model: str) -> None:
        self._shape = shape
        self._common = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, choices: list[Json], **more: Any) -> Json:
        return {**self._common, "object": self._shape.whole, "choices": choices, **more}

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        return {**self._common, "object": self._shape.chunk, "choices": choices, **more}


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Tokens of the prompts (each counted once, whatever ``n``) and of all answers."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
