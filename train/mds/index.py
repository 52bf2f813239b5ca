"""``index.json`` of an MDS data set, format version 2: which shards there are, and which columns a sample has."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sparda_jax.train.errors import TrainingError

INDEX_FILE = "index.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column; size: bytes of every value, None if each sample says its own."""

    name: str
    encoding: str
    size: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardFile:
    """A file of a shard.

    Attributes:
        path: where it is, or would be.
        num_bytes: its size.
        hashes: algorithm to hexadecimal digest; may be empty.
    """

    path: Path
    num_bytes: int
    hashes: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What the index says of a shard.

    Attributes:
        raw: the shard. packed: the same compressed, or None; one of both has to exist.
        compression: algorithm of ``packed``.
        num_samples: samples.
        columns: in the order in which a sample holds them.
    """

    raw: ShardFile
    packed: ShardFile | None
    compression: str | None
    num_samples: int
    columns: tuple[Column, ...]

    @property
    def stored(self) -> ShardFile:
        """The file to read: the raw one where it exists."""
        return self.raw if self.packed is None or self.raw.path.is_file() else self.packed

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)


def is_mds(folder: Path) -> bool:
    """Whether ``folder`` holds an index of shards; other programs have an ``index.json``, too."""
    file = folder / INDEX_FILE
    return file.is_file() and b'"shards"' in file.read_bytes()


def read_index(folder: Path) -> list[ShardInfo]:
    """The shards of a data set, in order.

    Raises:
        TrainingError: the index can't be read, is of another format or version, or names files outside the folder.
    """
    file = folder / INDEX_FILE
    try:
        content = json.loads(file.read_text())
        version, entries = content["version"], content["shards"]
        if version != 2:
            raise TrainingError(f"{file} has version {version}; only 2 is read: write the data set anew")
        return [_shard(folder, file, entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise TrainingError(f"{file} is no index of MDS shards ({error!r}); fetch or write it again") from error


def _shard(folder: Path, file: Path, entry: Mapping[str, Any]) -> ShardInfo:
    for name, expected in (("format", "mds"), ("version", 2)):
        if entry[name] != expected:
            raise TrainingError(f"{file} lists a shard of {name} {entry[name]!r}; only {expected!r} is read")
    columns = zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True)
    raw, packed = _file(folder, file, entry["raw_data"]), entry.get("zip_data")
    return ShardInfo(
        raw=raw,
        packed=_file(folder, file, packed) if packed else None,
        compression=(entry.get("compression") or "").split(":")[0] or None,
        num_samples=_whole(entry["samples"]),
        columns=tuple(_column(*described) for described in columns),
    )


def _column(name: str, encoding: str, size: int | None) -> Column:
    if not isinstance(encoding, str):
        raise TypeError(f"column {name} has encoding {encoding!r}")
    return Column(name=name, encoding=encoding, size=None if size is None else _whole(size))


def _whole(number: int) -> int:
    if int(number) < 0:
        raise ValueError(f"{number} is negative")
    return int(number)


def _file(folder: Path, index: Path, entry: Mapping[str, Any]) -> ShardFile:
    name = PurePosixPath(entry["basename"])
    if name.is_absolute() or ".." in name.parts:
        raise TrainingError(f"{index} names {name}, which is not in its folder")
    return ShardFile(path=folder / name, num_bytes=_whole(entry["bytes"]), hashes=dict(entry.get("hashes") or {}))
