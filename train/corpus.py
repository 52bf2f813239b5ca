"""A tokenised corpus: made once from text, kept in a folder named after its contents, mapped into memory from there."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt

from sparda_jax.checkpoint.atomic import atomic_folder
from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.config import ModelConfig
from sparda_jax.tokenizer import Tokenizer
from sparda_jax.train.documents import Document, find_files, read_documents
from sparda_jax.train.errors import TrainingError

_FORMAT = 1
_TOKENS, _STARTS, _DESCRIPTION = "tokens.bin", "starts.npy", "corpus.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Documents that the threads share out; the texts of so many are in memory at a time.
_BATCH = 256

Progress = Callable[[int, int], None]
"""Called with the bytes of text that are done and all bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents as token ids, one after the other.

    Attributes:
        tokens: uint16, or uint32 for a vocabulary of more than 65536; usually a memory map.
        starts: document i is ``tokens[starts[i] : starts[i + 1]]``.
        fingerprint: hash of the texts and the tokenizer.
    """

    tokens: UInt[np.ndarray, " tokens"]
    starts: Int64[np.ndarray, " documents_plus_one"]
    fingerprint: str

    @property
    def lengths(self) -> Int64[np.ndarray, " documents"]:
        """Tokens of each document."""
        return np.diff(self.starts)


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Refuses a tokenizer that can't be the model's.

    Raises:
        TrainingError: it has more ids than the model, or another beginning-of-sequence id.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise TrainingError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}: it belongs to another model"
        )
    given, expected = tokenizer.bos_token_id, config.bos_token_id
    if given is not None and expected is not None and given != expected:
        raise TrainingError(
            f"the tokenizer's bos_token has id {given}, config.json says {expected}: it belongs to another model"
        )


def load_corpus(
    paths: Sequence[Path], tokenizer_folder: Path, cache: Path, *, progress: Progress = lambda done, total: None
) -> Corpus:
    """Tokenises the texts, or takes what an earlier call with the same texts and tokenizer left in ``cache``.

    Every document begins as a prompt does: with the one BOS of a model that wants it.

    Args:
        paths: see :func:`~sparda_jax.train.documents.find_files`.
        tokenizer_folder: holds ``tokenizer.json``.
        cache: a folder named after the fingerprint is made in it, whole or not at all.
        progress: of the tokenising; not called when the cache has it.

    Raises:
        TrainingError: there is no text, a file can't be read, or ``cache`` can't be written.
        TokenizerError: the tokenizer can't be read.
    """
    files = find_files(paths)
    tokenizer = Tokenizer.from_pretrained(tokenizer_folder)
    fingerprint = _fingerprint(files, tokenizer_folder)
    folder = cache / fingerprint[:16]
    if not (folder / _DESCRIPTION).is_file():
        try:
            with atomic_folder(folder, overwrite=False, marker=_DESCRIPTION) as temporary:
                _write(files, tokenizer, fingerprint, temporary, progress)
        except CheckpointError:
            # Another process of this run may have been quicker.
            if not (folder / _DESCRIPTION).is_file():
                raise
        except OSError as error:
            raise TrainingError(
                f"{cache}: the tokenised text can't be kept there ({error}); make room, or name another folder with "
                "--cache"
            ) from error
    return _map(folder, fingerprint)


def _fingerprint(files: Sequence[Path], tokenizer_folder: Path) -> str:
    whole = hashlib.sha256(f"{_FORMAT}".encode())
    tokenizer_files = (tokenizer_folder / name for name in _TOKENIZER_FILES)
    for file in itertools.chain(files, (f for f in tokenizer_files if f.is_file())):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{file.suffix} {digest}\n".encode())
    return whole.hexdigest()


def _write(files: Sequence[Path], tokenizer: Tokenizer, fingerprint: str, folder: Path, progress: Progress) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    total, done = sum(file.stat().st_size for file in files), 0
    progress(done, total)
    lengths: list[int] = []
    documents: Iterator[Document] = itertools.chain.from_iterable(map(read_documents, files))
    encode = functools.partial(_encode, tokenizer)
    with ThreadPoolExecutor(os.cpu_count()) as threads, (folder / _TOKENS).open("wb") as stream:
        for batch in itertools.batched(documents, _BATCH):
            for document, ids in zip(batch, threads.map(encode, batch), strict=True):
                stream.write(np.asarray(ids, dtype).tobytes())
                lengths.append(len(ids))
                done += document.num_bytes
            progress(done, total)
    if not lengths:
        raise TrainingError(f"no text in {', '.join(map(str, files[:5]))}{', ...' if len(files) > 5 else ''}")
    progress(total, total)
    np.save(folder / _STARTS, np.cumsum([0, *lengths], dtype=np.int64))
    description = {"dtype": dtype.name, "tokens": sum(lengths), "fingerprint": fingerprint}
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def _encode(tokenizer: Tokenizer, document: Document) -> list[int]:
    return tokenizer.encode(document.text)


def _map(folder: Path, fingerprint: str) -> Corpus:
    try:
        description = json.loads((folder / _DESCRIPTION).read_text())
        starts = np.load(folder / _STARTS, mmap_mode="r")
        tokens = np.memmap(folder / _TOKENS, description["dtype"], "r")
        whole = description["fingerprint"] == fingerprint and starts[-1] == tokens.size == description["tokens"]
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"{folder} is damaged ({error}); remove it, and it is made again") from error
    if not whole:
        raise TrainingError(f"{folder} does not hold the tokens that it describes; remove it, and it is made again")
    return Corpus(tokens=tokens, starts=starts, fingerprint=fingerprint)
