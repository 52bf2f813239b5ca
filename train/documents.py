"""Documents of files and data sets, one at a time."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from sparda_jax.train import mds
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.parquet import read_rows
from sparda_jax.train.sources import JSON_LINES, PARQUET

TEXT_FIELD = "text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A text, or token ids, and where they stand.

    Attributes:
        content: a text that is not empty and valid as UTF-8; or the ids, in some integer dtype, of at least one token.
        place: ``file``, ``file:line`` or the like, for messages.
        num_bytes: of the files, read since the last document.
    """

    content: str | Integer[np.ndarray, " tokens"]
    place: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What one line, row or sample holds.

    Attributes:
        contents: of each document.
        place, num_bytes: as a document's.
        divided: false if ids stand there without a word on where documents begin and end.
    """

    contents: list[str] | list[Integer[np.ndarray, " tokens"]]
    place: str
    num_bytes: int
    divided: bool = True


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of all samples.

    Raises:
        TrainingError: see `read_samples`.
    """
    skipped = 0
    for sample in read_samples(path):
        skipped += sample.num_bytes
        for content in sample.contents:
            yield Document(content=content, place=sample.place, num_bytes=skipped)
            skipped = 0


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a file or of a folder of MDS shards, with those that hold nothing.

    A ``.txt`` file is one document; every line of a ``.jsonl`` file is an object whose field ``text`` is one; rows of a
    Parquet file and samples of MDS shards hold a text each, or ids of one or more documents. A text of nothing but
    white space is left out.

    Raises:
        TrainingError: something is damaged, is not what it should be, or not valid Unicode; the message says where.
    """
    if path.is_dir():
        for shard in mds.read_index(path):
            yield from read_shard(path, shard)
    elif path.suffix == PARQUET:
        yield from _read_parquet(path)
    else:
        yield from _read_text(path)


def read_shard(folder: Path, info: mds.ShardInfo) -> Iterator[Sample]:
    """The samples of one shard of the data set in ``folder``.

    Raises:
        TrainingError: see `read_samples`.
    """
    kind = mds.kind(folder, [info])
    shard = mds.open_shard(info, check_hashes=True)
    share = -(-info.stored.num_bytes // max(len(shard), 1))
    for number in range(len(shard)):
        value = shard.value(number, kind)
        if kind == mds.TEXT:
            contents: list[str] | list[np.ndarray] = [value] if value.strip() else []
        elif mds.has_indices(info):
            contents = [value[a:b] for a, b in mds.bounds(shard, number, value.size)]
        else:
            contents = [value.ravel()] if value.size else []
        divided = kind == mds.TEXT or mds.has_indices(info)
        yield Sample(contents=contents, place=shard.place(number), num_bytes=share, divided=divided)


def _read_parquet(file: Path) -> Iterator[Sample]:
    size = file.stat().st_size
    for number, count, row in read_rows(file):
        if isinstance(row, str):
            contents: list[str] | list[np.ndarray] = [row] if row.strip() else []
        else:
            contents = [ids for ids in row if len(ids)]
        yield Sample(contents=contents, place=f"{file}, row {number}", num_bytes=-(-size // count))


def _read_text(file: Path) -> Iterator[Sample]:
    with file.open("rb") as stream:
        pieces = enumerate(stream, 1) if file.suffix == JSON_LINES else [(0, stream.read())]
        for line, piece in pieces:
            place = f"{file}:{line}" if line else str(file)
            text = _text(piece, place, file.suffix) if piece.strip() else ""
            yield Sample(contents=[text] if text.strip() else [], place=place, num_bytes=len(piece))


def _text(piece: bytes, place: str, suffix: str) -> str:
    try:
        text = piece.decode()
        if suffix == JSON_LINES:
            line = json.loads(text)
            text = line.get(TEXT_FIELD) if isinstance(line, dict) else None
            if not isinstance(text, str):
                raise TrainingError(f'{place} is no object with a string {TEXT_FIELD!r}: {{"text": "..."}} is needed')
            text.encode()  # JSON can spell half a surrogate pair, which no tokenizer takes
    except UnicodeError as error:
        raise TrainingError(f"{place} is not valid UTF-8 ({error}); convert or remove it") from error
    except (ValueError, RecursionError) as error:  # also a number of too many digits, and brackets without end
        raise TrainingError(f"{place} is not valid JSON ({error}); one object a line is needed") from error
    return text
