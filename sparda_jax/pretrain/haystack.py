"""Filler text as token ids: prose from the corpus, RULER's repeated noise, shuffled words.

Documents are assembled from pieces that were tokenized apart. That gives exactly the ids of the joined text as long as
a piece begins with white space (or with punctuation after a letter or digit) and no piece ends with white space: the
pre-tokenizer always splits there, and byte-pair merges never cross its splits. Every cut below keeps to that rule.
"""

import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int, UInt16
from tokenizers import Tokenizer

from sparda_jax.pretrain.task_words import WordLists
from sparda_jax.pretrain.tokenizer_training import BOS_ID, EOS_ID, SPECIAL_TOKENS

FILLERS = ("prose", "noise", "words")
RULER_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NOISE = (
    RULER_NOISE,
    "The river runs to the sea. The road goes over the hill. Nothing happened that day.",
    "Time passes slowly here. We wait and we watch. The clock on the wall keeps ticking.",
)


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """Filler without its needles.

    Attributes:
        ids: token ids; the first one begins no white space.
        cuts: ascending positions in `ids` at which a piece may be inserted, 0 and `len(ids)` included.
        is_prose: whether the text is worth learning as language.
    """

    ids: Int[np.ndarray, " tokens"]
    cuts: Int[np.ndarray, " cuts"]
    is_prose: bool


class TokenCorpus:
    """A tokenized corpus, `<s> document </s> <s> document </s> ...`, and where it may be cut.

    Args:
        tokens: uint16 token ids, usually a read-only memory map.
        tokenizer: the tokenizer that made them.

    Raises:
        ValueError: no line starts, or ids outside the vocabulary.
    """

    def __init__(self, tokens: UInt16[np.ndarray, " tokens"], tokenizer: Tokenizer) -> None:
        size = tokenizer.get_vocab_size()
        if tokens.size == 0 or int(tokens.max()) >= size:
            raise ValueError(
                f"tokens: {tokens.size} ids given, not all below the tokenizer's vocabulary size {size}; "
                "tokenize the corpus with this tokenizer"
            )
        self.tokens = tokens
        self.newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
        texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(size)]
        special = _table(texts, lambda text: text in SPECIAL_TOKENS)
        white = _table(texts, lambda text: text.isspace())
        leading = _table(texts, lambda text: text[:1].isspace())
        stop = _table(texts, lambda text: text.rstrip("\"')").endswith((".", "!", "?")) and not text.isspace())
        previous, current = tokens[:-1], tokens[1:]
        newline_or_end = (current == self.newline) | (current == EOS_ID)
        sentence = leading[current] & stop[previous]
        self.cuts = 1 + np.flatnonzero((newline_or_end | sentence) & ~white[previous] & ~special[previous])
        opens = (previous == self.newline) | (previous == BOS_ID)
        self.line_starts = 1 + np.flatnonzero(opens & ~leading[current] & ~special[current])
        if self.line_starts.size == 0:
            raise ValueError("tokens: no line start found; the corpus must hold documents that begin with <s>")

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer) -> "TokenCorpus":
        """A corpus from a file, see `map_tokens`."""
        return cls(cls.map_tokens(path), tokenizer)

    @staticmethod
    def map_tokens(path: Path) -> UInt16[np.ndarray, " tokens"]:
        """Maps a uint16 .npy file; if only PATH.xz is there, unpacks it first.

        Raises:
            FileNotFoundError: neither file exists.
        """
        packed = path.with_name(path.name + ".xz")
        if not path.exists() and packed.exists():
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(lzma.decompress(packed.read_bytes()))
            temporary.replace(path)
        if not path.exists():
            raise FileNotFoundError(
                f"{path} (or {packed.name}) is missing: run `python -m sparda_jax.pretrain.prepare`"
            )
        return np.load(path, mmap_mode="r")

    def prose(self, rng: np.random.Generator, length: int) -> Haystack:
        """Text from random line starts, at most `length` tokens, ended at a sentence; newlines join documents."""
        ids, cuts = self._run(rng, length)
        while True:  # a run ends early only at the end of the corpus
            room = length - ids.size - 1
            if room < max(32, length // 8) or ids.size == 0:
                break
            more, more_cuts = self._run(rng, room)
            if more.size == 0:
                break
            cuts = np.concatenate([cuts, ids.size + 1 + more_cuts])
            ids = np.concatenate([ids, [self.newline], more])
        return Haystack(ids=ids, cuts=np.concatenate([[0], cuts]), is_prose=True)

    def _run(
        self, rng: np.random.Generator, length: int
    ) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, " cuts"]]:
        start = int(self.line_starts[rng.integers(self.line_starts.size)])
        slack = length // 64 + 8  # the <s> tokens that drop out
        raw = np.asarray(self.tokens[start : start + length + slack]).astype(np.int32)
        first, last = np.searchsorted(self.cuts, [start, start + raw.size], side="right")
        kept = raw != BOS_ID
        before = np.concatenate([[0], np.cumsum(kept)])
        cuts = before[self.cuts[first:last] - start]
        cuts = cuts[cuts <= length]
        ids = raw[kept]
        ids[ids == EOS_ID] = self.newline
        return ids[: int(cuts[-1]) if cuts.size else 0], cuts


def _table(texts: list[str], predicate: Callable[[str], bool]) -> Bool[np.ndarray, " vocab"]:
    return np.array([predicate(text) for text in texts])


class FillerSampler:
    """Draws haystacks of any kind.

    Args:
        tokenizer: the tokenizer.
        corpus: where prose comes from.
        words: where shuffled words come from; use the lists of the split wanted.
        ruler_noise_only: noise is always RULER's sentence.
    """

    def __init__(
        self, tokenizer: Tokenizer, corpus: TokenCorpus, words: WordLists, *, ruler_noise_only: bool = False
    ) -> None:
        self.corpus = corpus
        noises = _NOISE[:1] if ruler_noise_only else _NOISE
        self._noise = [
            np.array(tokenizer.encode("\n" + text, add_special_tokens=False).ids, np.int32) for text in noises
        ]
        pool = [" " + word for word in words.nouns + words.adjectives]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(pool, add_special_tokens=False)]
        self._word_lengths = np.array([len(ids) for ids in encoded])
        self._word_starts = np.concatenate([[0], np.cumsum(self._word_lengths)[:-1]])
        self._word_ids = np.concatenate([np.array(ids, np.int32) for ids in encoded])
        self._capitals = [
            np.array(tokenizer.encode(word.capitalize(), add_special_tokens=False).ids, np.int32)
            for word in words.nouns
        ]
        self._stop = np.array(tokenizer.encode(".", add_special_tokens=False).ids, np.int32)
        self._newline = np.array([corpus.newline], np.int32)

    def draw(self, rng: np.random.Generator, kind: str, length: int) -> Haystack:
        """A haystack of at most `length` tokens (a little less: it ends with a sentence).

        Raises:
            ValueError: `kind` is not one of `FILLERS`.
        """
        if kind == "prose":
            return self.corpus.prose(rng, length)
        if kind == "noise":
            unit = self._noise[rng.integers(len(self._noise))]
            count = (length + 1) // unit.size
            ids = np.tile(unit, count)[1:]  # no newline at the very beginning
            cuts = np.concatenate([[0], np.arange(1, count) * unit.size - 1, [ids.size]])
            return Haystack(ids=ids, cuts=np.unique(cuts), is_prose=False)
        if kind == "words":
            return self._shuffled_words(rng, length)
        raise ValueError(f"kind: {kind!r} given, must be one of {FILLERS}")

    def _shuffled_words(self, rng: np.random.Generator, length: int) -> Haystack:
        pieces, cuts, size = [], [0], 0
        while True:
            chosen = rng.integers(self._word_lengths.size, size=rng.integers(6, 20))
            lengths = self._word_lengths[chosen]
            offsets = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            body = self._word_ids[np.repeat(self._word_starts[chosen], lengths) + offsets]
            head = self._capitals[rng.integers(len(self._capitals))]
            sentence = [head, body, self._stop] if not pieces else [self._newline, head, body, self._stop]
            added = sum(part.size for part in sentence)
            if size + added > length:
                break
            pieces += sentence
            size += added
            cuts.append(size)
        ids = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
        return Haystack(ids=ids, cuts=np.array(cuts), is_prose=False)
