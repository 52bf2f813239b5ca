"""Documents of text and JSONL files, one at a time."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparda_jax.train.errors import TrainingError

TEXT, JSON_LINES = ".txt", ".jsonl"
TEXT_FIELD = "text"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A text and where it stands.

    Attributes:
        text: not empty, and valid as UTF-8.
        place: ``file`` or ``file:line``, for messages.
        num_bytes: of the files, read since the last document.
    """

    text: str
    place: str
    num_bytes: int


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The ``.txt`` and ``.jsonl`` files among ``paths``, and in those that are folders, at any depth.

    The order is that of ``paths``, sorted by name within a folder; a file that is named twice counts once.

    Raises:
        TrainingError: a path does not exist, is a file of another kind, or is a folder without such files.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.suffix in (TEXT, JSON_LINES) and f.is_file())
            if not files:
                raise TrainingError(f"{path} holds no {TEXT} or {JSON_LINES} file; give a folder or file with text")
        elif not path.is_file():
            raise TrainingError(f"{path} does not exist; give files that end in {TEXT} or {JSON_LINES}, or folders")
        elif path.suffix not in (TEXT, JSON_LINES):
            raise TrainingError(f"{path} ends in neither {TEXT} nor {JSON_LINES}; rename or convert it")
        else:
            files = [path]
        found |= {file.resolve(): file for file in files if file.resolve() not in found}
    return list(found.values())


def read_documents(file: Path) -> Iterator[Document]:
    """A ``.txt`` file is one document; every line of a ``.jsonl`` file is an object whose field ``text`` is one.

    A document of nothing but white space is left out.

    Raises:
        TrainingError: a line is no such object, or the text is not valid Unicode; the message names file and line.
    """
    skipped = 0
    with file.open("rb") as stream:
        pieces = enumerate(stream, 1) if file.suffix == JSON_LINES else [(0, stream.read())]
        for line, piece in pieces:
            place = f"{file}:{line}" if line else str(file)
            text = _text(piece, place, file.suffix) if piece.strip() else ""
            skipped += len(piece)
            if text.strip():
                yield Document(text=text, place=place, num_bytes=skipped)
                skipped = 0


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
    except json.JSONDecodeError as error:
        raise TrainingError(f"{place} is not valid JSON ({error}); one object a line is needed") from error
    return text
