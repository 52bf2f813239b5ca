"""What there is to train on: files of text, tables and data sets of shards, and which domain each belongs to."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from sparda_jax.train.errors import TrainingError
from sparda_jax.train.mds import INDEX_FILE, is_mds, read_index

TEXT, JSON_LINES, PARQUET = ".txt", ".jsonl", ".parquet"
_SUFFIXES = (TEXT, JSON_LINES, PARQUET)
_KINDS = f"{TEXT}, {JSON_LINES} or {PARQUET} files, or MDS data sets (folders with {INDEX_FILE})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A file, or the folder of an MDS data set.

    Attributes:
        path: of the file or folder.
        domain: name of the folder below the given one that it stands in; else of the given file or folder itself.
    """

    path: Path
    domain: str

    @property
    def files(self) -> list[Path]:
        """Everything that it is read from."""
        if not self.path.is_dir():
            return [self.path]
        return [self.path / INDEX_FILE, *(shard.stored.path for shard in read_index(self.path))]

    @property
    def num_bytes(self) -> int:
        """Of all its files that are there."""
        return sum(file.stat().st_size for file in self.files if file.is_file())


def find_sources(paths: Sequence[Path]) -> list[Source]:
    """The files and data sets among ``paths``, and in those that are folders, at any depth.

    The order is that of ``paths``, sorted by name within a folder; what is named twice counts once, the first time.

    Raises:
        TrainingError: a path does not exist, is a file of another kind, or is a folder without any.
    """
    found: dict[Path, Source] = {}
    for path in paths:
        if path.is_dir():
            inside = list(_in_folder(path))
            if not inside:
                raise TrainingError(f"{path} holds nothing to read; give {_KINDS}, or folders of them")
        elif not path.is_file():
            raise TrainingError(f"{path} does not exist; give {_KINDS}, or folders of them")
        elif path.suffix not in _SUFFIXES:
            raise TrainingError(f"{path} ends in neither {TEXT}, {JSON_LINES} nor {PARQUET}; rename or convert it")
        else:
            inside = [Source(path=path, domain=path.stem)]
        for source in inside:
            found.setdefault(source.path.resolve(), source)
    return list(found.values())


def _in_folder(top: Path) -> Iterator[Source]:
    own = top.absolute().name
    if is_mds(top):  # it may lie over several folders, whose own indices say the same again
        yield Source(path=top, domain=own)
        return
    data_sets: list[Path] = []
    for path in sorted(top.rglob("*")):
        if any(folder in path.parents for folder in data_sets[-1:]):
            continue
        depth = len(path.relative_to(top).parts)
        if path.is_dir() and is_mds(path):
            data_sets.append(path)
            yield Source(path=path, domain=path.relative_to(top).parts[0])
        elif path.suffix in _SUFFIXES and path.is_file():
            yield Source(path=path, domain=path.relative_to(top).parts[0] if depth > 1 else own)
