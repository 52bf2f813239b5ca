"""``/tokenize`` and ``/detokenize``, in vLLM's shapes."""

from starlette.concurrency import run_in_threadpool

from sparda_jax.serve.prompts import Prompts
from sparda_jax.serve.protocol import DetokenizeRequest, TokenizeRequest
from sparda_jax.serve.responses import Json
from sparda_jax.tokenizer import Tokenizer


class Tokenization:
    """Answers the two endpoints; nothing here touches the device."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int) -> None:
        """
        Args:
            tokenizer: of the model that is served.
            max_model_len: tokens of the context.
            vocab_size: token ids that the model has.
        """
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self._prompts = Prompts(tokenizer, max_model_len=max_model_len, vocab_size=vocab_size)

    async def tokenize(self, body: TokenizeRequest) -> Json:
        """The ids with which a completion (``prompt``) or a chat (``messages``) would begin; they may be too many.

        Raises:
            ApiError: 400 for the field at fault.
        """
        if body.messages is not None:
            ids = await self._prompts.chat(
                body.messages, body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt is not False
            )
        else:
            assert body.prompt is not None
            ids = await self._prompts.text(body.prompt, add_bos=body.add_special_tokens is not False)
        strings = self._tokenizer.spelled(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids, "token_strs": strings}

    async def detokenize(self, body: DetokenizeRequest) -> Json:
        """The text of ids, control tokens spelled out.

        Raises:
            ApiError: 400 for an id that the model does not have.
        """
        self._prompts.check_ids("tokens", body.tokens)
        text = await run_in_threadpool(self._tokenizer.decode, body.tokens, skip_special_tokens=False)
        return {"prompt": text}
