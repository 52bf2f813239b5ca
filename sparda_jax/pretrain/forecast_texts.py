"""Texts to train the bundled model's Forecast on: what pretraining read, as JSONL for ``python -m sparda_jax.train``.

A document is a recall document as long as asked for, template and special tokens included, or texts of the corpus one
behind the other. Tokenised again, it gives the ids that pretraining made without text in between. Validation documents
are made of the held-out words, facts and prose. Document ``i`` of a split is a function of (seed, split, i) alone.
"""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.pretrain.haystack import TokenCorpus
from sparda_jax.pretrain.recipe import REFINEMENT
from sparda_jax.pretrain.tasks import RecallTasks
from sparda_jax.pretrain.tokenizer_training import BOS_ID

SPLITS = ("train", "eval")
# Documents that a process makes at a time.
_BATCH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentConfig:
    """What the documents are.

    Attributes:
        length: tokens of the longest; every other document is as long, the rest between a quarter of it and it.
        text_fraction: share of the documents that are plain text.
        seed: random seed.
    """

    length: int
    text_fraction: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        if not 512 <= self.length <= 1 << 20:
            raise ValueError(f"length: {self.length} given, must lie between 512 and {1 << 20}")
        if not 0.0 <= self.text_fraction <= 1.0:
            raise ValueError(f"text_fraction: {self.text_fraction} given, must lie between 0 and 1")


class ForecastDocuments:
    """Makes documents in this process.

    Args:
        tokenizer: the model's.
        tokens: the tokenised corpus of the split, uint16, usually a memory map.
        split: `train` or `eval`.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: np.ndarray, split: str) -> None:
        self._tokenizer, self._split = tokenizer, SPLITS.index(split)
        self._corpus = TokenCorpus(tokens, tokenizer)
        self._tasks = RecallTasks(tokenizer, self._corpus, split=split, spelling=REFINEMENT.spelling)
        self._starts = np.flatnonzero(tokens == BOS_ID)

    @classmethod
    def load(cls, folder: Path, split: str) -> "ForecastDocuments":
        """Reads the files that `prepare` wrote to `folder`."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        return cls(tokenizer, TokenCorpus.map_tokens(folder / f"{split}.npy"), split)

    def ids(self, config: DocumentConfig, number: int) -> Int[np.ndarray, " tokens"]:
        """Token ids of document ``number``, `<s>` first."""
        rng = np.random.default_rng([config.seed, self._split, number])
        length = config.length if rng.random() < 0.5 else int(rng.integers(config.length // 4, config.length))
        if rng.random() < config.text_fraction:
            return self._text(rng, length)
        return self._tasks.document(rng, length).ids

    def text(self, config: DocumentConfig, number: int) -> str:
        """The same as text, without the first `<s>`, which a tokenizer puts in front by itself."""
        return self._tokenizer.decode(self.ids(config, number)[1:].tolist(), skip_special_tokens=False)

    def _text(self, rng: np.random.Generator, length: int) -> Int[np.ndarray, " tokens"]:
        """Whole texts of the corpus from a random one on; the last is ended at a sentence."""
        tokens = self._corpus.tokens
        fitting = self._starts[self._starts < max(1, tokens.size - length)]
        start = int(fitting[rng.integers(fitting.size)])
        end = np.searchsorted(self._corpus.cuts, start + length, side="right") - 1
        return np.asarray(tokens[start : int(self._corpus.cuts[end])]).astype(np.int32)


@functools.cache
def _documents(folder: str, split: str) -> ForecastDocuments:
    return ForecastDocuments.load(Path(folder), split)


def _lines(folder: str, split: str, config: DocumentConfig, numbers: range) -> str:
    """Some documents as JSON lines."""
    documents = _documents(folder, split)
    texts = (documents.text(config, number) for number in numbers)
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def write_texts(
    data: Path, file: Path, split: str, count: int, config: DocumentConfig, *, num_workers: int, overwrite: bool = False
) -> None:
    """Writes documents 0 to ``count - 1`` of a split to a JSONL file, whole or not at all.

    Args:
        data: folder that `prepare` wrote.
        num_workers: processes; they don't change what is written.
        overwrite: replace an existing file.

    Raises:
        CheckpointError: the file exists.
        FileNotFoundError: ``data`` lacks the corpus.
    """
    TokenCorpus.map_tokens(data / f"{split}.npy")  # unpacked here once, not by every worker
    jobs = [(str(data), split, config, range(i, min(i + _BATCH, count))) for i in range(0, count, _BATCH)]
    with atomic_file(file, overwrite=overwrite) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for lines in _in_order(jobs, num_workers):
            stream.write(lines)


def _in_order(jobs: list[tuple[str, str, DocumentConfig, range]], num_workers: int) -> Iterator[str]:
    if num_workers == 1:
        yield from map(_job, jobs)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    with contextlib.closing(multiprocessing.get_context("spawn").Pool(num_workers)) as pool:
        yield from pool.imap(_job, jobs)


def _job(job: tuple[str, str, DocumentConfig, range]) -> str:
    return _lines(*job)
