"""Shards of tokenised documents with the columns of ProLong: every sample says where its documents begin and end."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt32

from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.train.mds.index import INDEX_FILE

SHARD_BYTES = 1 << 26
_COLUMNS = {"domain": "str", "indices": "ndarray:uint32", "input_ids": "ndarray:uint32", "length": "uint64"}
_SIZES = [None, None, None, 8]
_HASH = "sha1"
_DESCRIPTION: dict[str, Any] = {
    "column_encodings": list(_COLUMNS.values()),
    "column_names": list(_COLUMNS),
    "column_sizes": _SIZES,
    "compression": None,
    "format": "mds",
    "hashes": [_HASH],
    "size_limit": SHARD_BYTES,
    "version": 2,
}
_HEADER = json.dumps(_DESCRIPTION, sort_keys=True).encode()


class ShardWriter:
    """Collects samples and writes a shard whenever one is full; each appears whole under its name.

    Args:
        folder: where to write.
        prefix: of the names: ``PREFIX-00000.mds`` and so on.
        domain: of all samples.
        shard_bytes: size from which on a shard is written; about as much is held in memory.
    """

    def __init__(self, folder: Path, prefix: str, domain: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._prefix, self._domain, self._limit = folder, prefix, domain.encode(), shard_bytes
        self._samples: list[bytes] = []
        self._size = 0
        self._entries: list[dict[str, Any]] = []

    def add(self, documents: Sequence[UInt32[np.ndarray, " tokens"]]) -> None:
        """Adds a sample of these documents, none of which is empty, one behind the other."""
        sample = _encode(self._domain, documents)
        self._samples.append(sample)
        self._size += len(sample)
        if self._size >= self._limit:
            self._write()

    def close(self) -> list[dict[str, Any]]:
        """Writes what is left, and returns the entries of the index for all shards."""
        if self._samples:
            self._write()
        return self._entries

    def _write(self) -> None:
        count = len(self._samples)
        offsets = np.cumsum([4 * (count + 2) + len(_HEADER), *map(len, self._samples)]).astype("<u4")
        content = b"".join((np.uint32(count).tobytes(), offsets.tobytes(), _HEADER, *self._samples))
        name = f"{self._prefix}-{len(self._entries):05}.mds"
        with atomic_file(self._folder / name, overwrite=True) as temporary:
            temporary.write_bytes(content)
        raw = {"basename": name, "bytes": len(content), "hashes": {_HASH: hashlib.new(_HASH, content).hexdigest()}}
        self._entries.append(_DESCRIPTION | {"raw_data": raw, "samples": count, "zip_data": None})
        self._samples, self._size = [], 0


def write_index(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Writes the index of these shards: from then on the folder is a data set."""
    with atomic_file(folder / INDEX_FILE, overwrite=True) as temporary:
        temporary.write_text(json.dumps({"shards": list(entries), "version": 2}, sort_keys=True) + "\n")


def _encode(domain: bytes, documents: Sequence[UInt32[np.ndarray, " tokens"]]) -> bytes:
    ends = np.cumsum([len(document) for document in documents])
    indices = np.stack([ends - [len(document) for document in documents], ends], axis=1).astype("<u4")
    values = [domain, _array(indices), _array(np.concatenate(documents).astype("<u4", copy=False))]
    sizes = np.array([len(value) for value in values], "<u4").tobytes()
    return b"".join((sizes, *values, np.uint64(ends[-1]).tobytes()))


def _array(values: np.ndarray) -> bytes:
    """Axes and the width of their numbers in one byte, the shape, the numbers."""
    width = next(width for width in range(3) if max(values.shape) < 1 << (8 << width))
    shape = np.array(values.shape, f"<u{1 << width}").tobytes()
    return bytes([values.ndim << 2 | width]) + shape + values.tobytes()
