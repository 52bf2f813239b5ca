"""From the prompts of requests to token ids, each checked before work goes into it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool

from sparda_jax.chat_template import ReservedArgumentError
from sparda_jax.serve.errors import ApiError
from sparda_jax.serve.protocol import Message
from sparda_jax.tokenizer import ChatTemplateError, Tokenizer


class Prompts:
    """Encodes prompts in a thread, so that a long one does not keep the other requests waiting."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int) -> None:
        """
        Args:
            tokenizer: of the model that is served.
            max_model_len: tokens of the context.
            vocab_size: token ids that the model has; the tokenizer may know fewer.
        """
        self._tokenizer, self._max_model_len, self._vocab_size = tokenizer, max_model_len, vocab_size

    async def chat(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: 400 for ``messages`` or ``chat_template_kwargs``.
        """
        self._check_size("messages", (message.content for message in messages))
        try:
            return await run_in_threadpool(
                self._tokenizer.encode_chat,
                [message.for_template() for message in messages],
                add_generation_prompt=add_generation_prompt,
                arguments=template_kwargs or {},
            )
        except ReservedArgumentError as error:
            raise ApiError.bad_field("chat_template_kwargs", f"chat_template_kwargs: {error}") from error
        except ChatTemplateError as error:
            raise ApiError.bad_field("messages", str(error)) from error

    async def text(self, prompt: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of a plain prompt.

        Raises:
            ApiError: 400 for ``prompt``.
        """
        self._check_size("prompt", [prompt])
        return await run_in_threadpool(self._tokenizer.encode, prompt, add_bos=add_bos)

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Refuses ids that the model does not have.

        Raises:
            ApiError: 400 for ``field``.
        """
        outside = next((i for i in ids if not 0 <= i < self._vocab_size), None)
        if outside is not None:
            message = f"{field} holds the token id {outside}; the model has 0 to {self._vocab_size - 1}"
            raise ApiError.bad_field(field, message)

    def _check_size(self, field: str, texts: Iterable[str]) -> None:
        """Refuses what can't fit whatever its tokens are, before minutes and gigabytes go into counting them."""
        size, limit = sum(len(text) for text in texts), self._max_model_len
        if size > limit * self._tokenizer.longest_token:
            message = (
                f"the prompt has {size} characters, more than the {limit} tokens of the context (--max-model-len) hold"
            )
            raise ApiError.bad_field(field, message, code="context_length_exceeded")
