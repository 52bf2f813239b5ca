"""A Hugging Face tokenizer folder without transformers: encoding, chat prompts and incremental decoding."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sparda_jax._injection_guard import InjectionGuard, encode_text
from sparda_jax.chat_template import ChatTemplate, ChatTemplateError
from sparda_jax.detokenizer import IncrementalDetokenizer, TokenBytes

__all__ = ["ChatTemplateError", "IncrementalDetokenizer", "Tokenizer", "TokenizerError"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# transformers' tokenizer classes whose add_bos_token is true when tokenizer_config.json does not say.
_ADDS_BOS_BY_DEFAULT = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})


class TokenizerError(ValueError):
    """A tokenizer folder that can't be used; the message names the file and what is wrong."""


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: number of ids, the added tokens included.
        longest_token: UTF-8 bytes of the longest token, as the vocabulary spells it: never fewer than its text has.
        bos_token_id, eos_token_id: from ``tokenizer_config.json``, or None.
        adds_bos: every prompt, plain or chat, starts with exactly one ``bos_token_id``.
        chat_template: the compiled template, or None for a model without one.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None, chat_template: str | None = None
    ) -> None:
        """
        Args:
            backend: the loaded ``tokenizer.json``.
            config: the contents of ``tokenizer_config.json``.
            chat_template: jinja2 text; None takes the one in ``config``, if any.

        Raises:
            TokenizerError: a special token that the vocabulary does not hold, or an invalid chat template.
        """
        config = config or {}
        self._backend = backend
        _add_missing_tokens(backend, config.get("added_tokens_decoder") or {})
        special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name)))}
        self.bos_token_id = self._special_id(special, "bos_token")
        self.eos_token_id = self._special_id(special, "eos_token")
        self.adds_bos = self.bos_token_id is not None and self._template_or_config_adds_bos(config)
        source = chat_template if chat_template is not None else _default_template(config.get("chat_template"))
        try:
            self.chat_template = ChatTemplate(source, special) if source is not None else None
        except ChatTemplateError as error:
            raise TokenizerError(str(error)) from error
        self._specials = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._find_special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._guard = InjectionGuard(backend, self._specials, self._find_special) if self._find_special else None
        self.longest_token = max((len(token.encode()) for token in backend.get_vocab()), default=1)
        self._token_bytes = TokenBytes(backend, frozenset(self._specials.values()))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Tokenizer":
        """Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a checkpoint folder.

        Raises:
            TokenizerError: ``tokenizer.json`` is absent, or a file is broken.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{folder} holds no tokenizer.json; save the tokenizer with transformers' fast class")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust binding raises plain Exception
            raise TokenizerError(f"{file} can't be read: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        config_file = folder / "tokenizer_config.json"
        config: dict[str, Any] = {}
        try:
            if config_file.is_file():
                config = json.loads(config_file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise TokenizerError(f"{config_file} is not valid JSON: {error}") from error
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else None
        return cls(backend, config, template)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """The whole tokenizer in the format of ``tokenizer.json``."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of a plain prompt; control tokens spelled out in it become control tokens, as in transformers.

        Args:
            text: any string without lone surrogates.
            add_bos: start with the one BOS of a model that wants it; a BOS already in the text is not doubled.
        """
        ids = encode_text(self._backend, text)
        return self._with_one_bos(ids) if add_bos and self.adds_bos else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, with one BOS whether or not the template writes it.

        Control tokens come from the template only: one that is spelled out inside a message, such as ``<|im_end|>``,
        is encoded as ordinary text and can't end the turn. (transformers and vLLM parse it.)

        Args:
            messages: ``{"role": ..., "content": ...}`` in order.
            add_generation_prompt: end with the opening of the assistant's next turn.
            arguments: further names that the template knows, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template; send a plain prompt instead")
        guard, template = self._guard, self.chat_template
        if guard is not None and guard.is_needed([list(messages), arguments]):
            rendered = template.render(
                guard.hide(messages), add_generation_prompt=add_generation_prompt, arguments=guard.hide(arguments)
            )
            ids = guard.encode(rendered)
        else:
            rendered = template.render(messages, add_generation_prompt=add_generation_prompt, arguments=arguments)
            ids = encode_text(self._backend, rendered)
        return self._with_one_bos(ids) if self.adds_bos else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def spelled(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for an id that the tokenizer does not know."""
        return [self._backend.id_to_token(i) or "" for i in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself; of a control token, which adds nothing to a text, its spelling."""
        return self._token_bytes(token_id) or (self._backend.id_to_token(token_id) or "").encode()

    def adds_text(self, token_id: int) -> bool:
        """Whether a token adds bytes to a text; control tokens don't."""
        return bool(self._token_bytes(token_id))

    def detokenizer(self) -> "IncrementalDetokenizer":
        """A new streaming decoder, for the continuation of a prompt."""
        return IncrementalDetokenizer(self._token_bytes)

    def _special_id(self, special: Mapping[str, str], name: str) -> int | None:
        if name not in special:
            return None
        token_id = self._backend.token_to_id(special[name])
        if token_id is None:
            raise TokenizerError(f"tokenizer_config.json: {name}={special[name]!r} is not in the vocabulary")
        return token_id

    def _template_or_config_adds_bos(self, config: Mapping[str, Any]) -> bool:
        explicit = config.get("add_bos_token")
        if explicit is not None:
            return bool(explicit)
        if self._backend.encode("a", add_special_tokens=True).ids[:1] == [self.bos_token_id]:
            return True
        return config.get("tokenizer_class") in _ADDS_BOS_BY_DEFAULT

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        start = 0
        while start < len(ids) and ids[start] == self.bos_token_id:
            start += 1
        assert self.bos_token_id is not None
        return [self.bos_token_id, *ids[start:]]


def _token_text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _default_template(value: Any) -> str | None:
    """``chat_template`` is a text, or a list of named ones of which ``default`` counts."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value}
        return named.get("default")
    return value


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds what ``added_tokens_decoder`` lists and ``tokenizer.json`` lacks; each must get the id it is listed with."""
    for token_id, token in sorted(((int(i), t) for i, t in added.items()), key=lambda item: item[0]):
        known = backend.get_added_tokens_decoder().get(token_id)
        if known is not None and known.content == token["content"] and known.special == bool(token.get("special")):
            continue
        flags = {name: bool(token.get(name)) for name in ("lstrip", "rstrip", "normalized", "single_word", "special")}
        new = tokenizers.AddedToken(token["content"], **flags)
        (backend.add_special_tokens if flags["special"] else backend.add_tokens)([new])
        if backend.token_to_id(token["content"]) != token_id:
            raise TokenizerError(
                f"tokenizer_config.json: added token {token['content']!r} should have id {token_id}, "
                f"but tokenizer.json gives it {backend.token_to_id(token['content'])}"
            )
