"""The two response shapes, whole and in chunks, as OpenAI's clients read them."""

import time
import uuid
from typing import Any

from sparda_jax.serve.engine import FinishReason

Json = dict[str, Any]


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk``."""

    endpoint = "chat.completions"
    prompt_field = "messages"
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int, echo: str) -> Json:
        """The chunk that opens an answer, or nothing."""
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None}, None)

    def piece(self, index: int, text: str) -> Json:
        return self._delta(index, {"content": text}, None)

    def closing(self, index: int, reason: FinishReason) -> Json:
        return self._delta(index, {}, reason)

    def choice(self, index: int, text: str, reason: FinishReason) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    @staticmethod
    def _delta(index: int, delta: Json, reason: FinishReason | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


class CompletionShape:
    """``text_completion``, the same object whole and in chunks."""

    endpoint = "completions"
    prompt_field = "prompt"
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int, echo: str) -> Json | None:
        return self.piece(index, echo) if echo else None

    def piece(self, index: int, text: str) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def closing(self, index: int, reason: FinishReason) -> Json:
        return self.choice(index, "", reason)

    def choice(self, index: int, text: str, reason: FinishReason) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


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
