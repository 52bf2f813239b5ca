"""Keeps control tokens that are spelled out inside chat messages from becoming control tokens."""

import functools
import re
import secrets
from collections.abc import Mapping
from typing import Any

import tokenizers


def encode_text(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Token ids without added specials. A batch of one: unlike ``encode`` it lets other threads run, and keeps no
    offsets, which take several times the memory of the text.
    """
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


class InjectionGuard:
    """Encodes a rendered conversation in which some message spells out a control token.

    Before rendering, each such spelling is replaced by a random mark; afterwards everything that still reads as a
    control token comes from the template, and is replaced by an alias that only a copy of the tokenizer knows, in which
    control tokens are not parsed. Then the marks turn back into their text, and the aliases' ids into the real ones.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, specials: Mapping[str, int], find_special: re.Pattern[str]
    ) -> None:
        nonce = secrets.token_hex(16)
        self._find_special = find_special
        self._marks = {text: f"\x02{nonce}:{i}\x03" for text, i in specials.items()}
        self._text_of_mark = {mark: text for text, mark in self._marks.items()}
        self._find_mark = re.compile(f"\x02{nonce}:\\d+\x03")
        self._aliases = {text: f"\x02alias {nonce}:{i}\x03" for text, i in specials.items()}
        self._backend = backend
        self._specials = dict(specials)

    def is_needed(self, value: Any) -> bool:
        """Whether any string inside messages or arguments spells out a control token."""
        if isinstance(value, str):
            return self._find_special.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.is_needed(item) for item in value.values())
        return isinstance(value, list | tuple) and any(self.is_needed(item) for item in value)

    def hide(self, value: Any) -> Any:
        """A copy of messages or arguments in which every spelled-out control token is a mark."""
        if isinstance(value, str):
            return self._find_special.sub(lambda match: self._marks[match[0]], value)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        aliased = self._find_special.sub(lambda match: self._aliases[match[0]], rendered)
        text = self._find_mark.sub(lambda match: self._text_of_mark[match[0]], aliased)
        copy, real_id = self._copy_and_ids
        ids = encode_text(copy, text)
        return [real_id.get(token_id, token_id) for token_id in ids]

    @functools.cached_property
    def _copy_and_ids(self) -> tuple[tokenizers.Tokenizer, dict[int | None, int]]:
        """The copy, made when first needed, and the real id of each alias."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        flags = self._backend.get_added_tokens_decoder()
        copy.add_tokens(
            [
                tokenizers.AddedToken(
                    self._aliases[text], normalized=False, special=False, lstrip=flags[i].lstrip, rstrip=flags[i].rstrip
                )
                for text, i in self._specials.items()
            ]
        )
        return copy, {copy.token_to_id(alias): self._specials[text] for text, alias in self._aliases.items()}
