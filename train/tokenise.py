"""Texts tokenised once, kept in a folder named after their contents, and mapped into memory from there."""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer, UInt

from sparda_jax.tokenizer import Tokenizer
from sparda_jax.train.documents import Document, read_documents
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.kept import description, make_once
from sparda_jax.train.mapped import mds_fingerprint
from sparda_jax.train.sources import Source
from sparda_jax.train.vocabulary import check_ids

_FORMAT = 1
_TOKENS, _STARTS = "tokens.bin", "starts.npy"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# Documents that the threads share out; the texts of so many are in memory at a time.
_BATCH = 256


def tokenise(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    cache: Path,
    fingerprint: str,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[UInt[np.ndarray, " tokens"], Int64[np.ndarray, " documents_plus_one"], Int64[np.ndarray, " sources"]]:
    """The ids of all documents, where each begins, and how many documents each source has.

    The ids are uint16, or uint32 for a vocabulary of more than 65536.

    Args:
        sources: texts, or tables of ids.
        tokenizer: of the model.
        cache: in it, a folder named after the fingerprint is made once.
        fingerprint: see `texts_fingerprint`.
        progress: told the bytes that are done; not called when the cache has it.

    Raises:
        TrainingError: there is no text, something can't be read, or ``cache`` can't be written.
    """
    folder = cache / fingerprint[:16]
    make_once(folder, lambda target: _write(sources, tokenizer, target, progress) | {"fingerprint": fingerprint})
    return _map(folder, fingerprint, len(sources))


def texts_fingerprint(sources: Sequence[Source], tokenizer_folder: Path) -> str:
    """Hash of the texts and the tokenizer."""
    paths = (source.path for source in sources)
    whole = hashlib.sha256(f"{_FORMAT}".encode())
    tokenizer_files = (tokenizer_folder / name for name in _TOKENIZER_FILES)
    for path in itertools.chain(paths, (f for f in tokenizer_files if f.is_file())):
        whole.update(f"{path.suffix} {mds_fingerprint(path) if path.is_dir() else digest(path)}\n".encode())
    return whole.hexdigest()


def digest(file: Path) -> str:
    """SHA-256 of a file's contents."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(
    sources: Sequence[Source], tokenizer: Tokenizer, folder: Path, progress: Callable[[int], None]
) -> dict[str, Any]:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    done, lengths, counts = 0, [], [0] * len(sources)
    progress(done)

    def encode(numbered: tuple[int, Document]) -> Sequence[int] | Integer[np.ndarray, " tokens"]:
        return encode_document(tokenizer, numbered[1])

    with ThreadPoolExecutor(os.cpu_count()) as threads, (folder / _TOKENS).open("wb") as stream:
        for batch in itertools.batched(_numbered(sources), _BATCH):
            for (number, document), ids in zip(batch, threads.map(encode, batch), strict=True):
                counts[number] += 1
                stream.write(np.asarray(ids, dtype).tobytes())
                lengths.append(len(ids))
                done += document.num_bytes
            progress(done)
    if not lengths:
        named = ", ".join(str(source.path) for source in sources[:5])
        raise TrainingError(f"no text in {named}{', ...' if len(sources) > 5 else ''}")
    progress(sum(source.num_bytes for source in sources))
    np.save(folder / _STARTS, np.cumsum([0, *lengths], dtype=np.int64))
    return {"dtype": dtype.name, "tokens": sum(lengths), "documents": counts}


def _numbered(sources: Sequence[Source]) -> Iterator[tuple[int, Document]]:
    for number, source in enumerate(sources):
        yield from ((number, document) for document in read_documents(source.path))


def encode_document(tokenizer: Tokenizer, document: Document) -> Sequence[int] | Integer[np.ndarray, " tokens"]:
    """A text's ids, with the one BOS of a model that wants it; or those that the document has.

    Raises:
        TrainingError: it has ids that the tokenizer does not have.
    """
    if isinstance(document.content, str):
        return tokenizer.encode(document.content)
    check_ids(document.content, tokenizer, document.place)
    return document.content


def _map(folder: Path, fingerprint: str, num_sources: int) -> tuple[np.memmap, np.ndarray, np.ndarray]:
    try:
        described = description(folder)
        starts = np.load(folder / _STARTS, mmap_mode="r")
        tokens = np.memmap(folder / _TOKENS, described["dtype"], "r")
        counts = np.array(described["documents"], np.int64)
        whole = described["fingerprint"] == fingerprint and starts[-1] == tokens.size == described["tokens"]
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"{folder} is damaged ({error!r}); remove it, and it is made again") from error
    if not whole or counts.shape != (num_sources,) or counts.sum() != len(starts) - 1:
        raise TrainingError(f"{folder} does not hold the tokens that it describes; remove it, and it is made again")
    return tokens, starts, counts
