"""Streaming decoding: token ids to text, one token at a time."""

import codecs
import json
import re
from collections.abc import Callable

import tokenizers


class IncrementalDetokenizer:
    """Token ids in, text out, one token at a time.

    Bytes of an unfinished UTF-8 character wait for their rest, so no half character and no replacement character for
    one is ever handed out. The concatenated pieces are the UTF-8 decoding of all bytes. Constant work per token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD when the last character was never finished, else nothing."""
        return self._decoder.decode(b"", final=True)


class TokenBytes:
    """Bytes that a token adds to a text; special tokens add none. Each id is worked out once."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._known: dict[int, bytes] = {}
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        kinds = {part.get("type") for part in [decoder, *(decoder.get("decoders") or [])]}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._byte_of_char = {char: byte for byte, char in _byte_level_alphabet().items()}
        self._added = {i: t.content for i, t in backend.get_added_tokens_decoder().items()}
        self._anchor = next((i for i in range(backend.get_vocab_size()) if self._is_plain(i)), None)

    def __call__(self, token_id: int) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = self._work_out(token_id)
        return self._known[token_id]

    def _work_out(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None or token_id in self._special_ids:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._byte_level:
            if all(char in self._byte_of_char for char in token):
                return bytes(self._byte_of_char[char] for char in token)
            return token.encode()
        if self._byte_fallback and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            return bytes([int(match[1], 16)])
        # Decoders of the sentencepiece kind strip a leading space at the start of a text only, so decode mid-text.
        if self._anchor is None:
            return self._backend.decode([token_id]).encode()
        before = self._backend.decode([self._anchor])
        return self._backend.decode([self._anchor, token_id])[len(before) :].encode()

    def _is_plain(self, token_id: int) -> bool:
        token = self._backend.id_to_token(token_id)
        return token_id not in self._added and token is not None and token.isascii() and token.isalnum()


def _byte_level_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in kept}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(kept))
    return table
