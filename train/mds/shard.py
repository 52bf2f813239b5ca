"""One shard: mapped where it lies uncompressed, unpacked into memory otherwise; any sample at once."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparda_jax.train.errors import TrainingError
from sparda_jax.train.mds.columns import ArrayPlace, ColumnError, array_place, decode, is_array
from sparda_jax.train.mds.compression import unpack
from sparda_jax.train.mds.index import ShardFile, ShardInfo

# Of the others a digest has no length of its own, or Python can't compute it.
_HASHES = {name for name in hashlib.algorithms_guaranteed if not name.startswith("shake")}


class Shard:
    """The samples of a shard.

    A shard is a count, the offsets of the samples and of the end (all uint32), a description, and the samples; a sample
    is the sizes (uint32) of those columns that have no fixed one, and the values.

    Args:
        info: what the index says.
        data: the whole uncompressed file, uint8.

    Raises:
        TrainingError: it is not what the index says, or not whole; the message names the file.
    """

    def __init__(self, info: ShardInfo, data: np.ndarray) -> None:
        self._info, self._data = info, data.view(np.ndarray)  # slices of a memmap are slow
        path, count = info.raw.path, info.num_samples
        if len(data) != info.raw.num_bytes:
            raise TrainingError(f"{path} has {len(data)} bytes, the index says {info.raw.num_bytes}: fetch it again")
        header = 4 * (count + 2)
        if len(data) < header or int(np.frombuffer(data, "<u4", 1)[0]) != count:
            raise TrainingError(f"{path} does not begin with the {count} samples of the index: fetch it again")
        self._offsets = np.frombuffer(data, "<u4", count + 1, 4).astype(np.int64)
        if self._offsets[0] < header or self._offsets[-1] != len(data) or (np.diff(self._offsets) < 0).any():
            raise TrainingError(f"{path} has offsets that do not fit its {len(data)} bytes: fetch it again")
        self._variable = sum(column.size is None for column in info.columns)

    def __len__(self) -> int:
        return self._info.num_samples

    def place(self, sample: int) -> str:
        """How messages call a sample."""
        return f"{self._info.raw.path}, sample {sample}"

    def save(self, path: Path) -> None:
        """Writes the uncompressed file."""
        path.write_bytes(self._data)

    def value(self, sample: int, column: str) -> Any:
        """A value: an array (a view of the file), text, bytes or a number.

        Raises:
            TrainingError: the sample is damaged, or the encoding is not read here.
        """
        return self._read(decode, sample, column)

    def array(self, sample: int, column: str) -> ArrayPlace:
        """Where the numbers of an array stand in the uncompressed file.

        Raises:
            TrainingError: as `value`, and for a column that holds no arrays.
        """
        return self._read(array_place, sample, column)

    def numbers(self, place: ArrayPlace) -> np.ndarray:
        """The numbers of an array, one behind the other; a view of the file."""
        return np.frombuffer(self._data, place.dtype, place.count, place.offset)

    def _read(self, how: Callable[..., Any], sample: int, name: str) -> Any:
        begin, stop = int(self._offsets[sample]), int(self._offsets[sample + 1])
        place = begin + 4 * self._variable
        sizes = iter(np.frombuffer(self._data, "<u4", self._variable, begin).tolist() if place <= stop else ())
        found = None
        for column in self._info.columns:
            size = next(sizes, stop) if column.size is None else column.size
            if column.name == name:
                found = column.encoding, place, place + size
            place += size
        if place != stop:
            raise TrainingError(f"{self.place(sample)} has columns that do not fit its {stop - begin} bytes: damaged")
        if found is None or (how is array_place and not is_array(found[0])):
            raise TrainingError(f"{self.place(sample)} has no {'array' if found else 'column'} {name!r}")
        try:
            return how(found[0], self._data, *found[1:])
        except ColumnError as error:
            raise TrainingError(f"{self.place(sample)}: column {name!r} holds {error}") from error


def open_shard(info: ShardInfo, *, check_hashes: bool = False) -> Shard:
    """Opens a shard.

    Args:
        info: see `Shard`.
        check_hashes: compare with the digests of the index, which reads the whole file; those of algorithms that Python
            does not have are passed over.

    Raises:
        TrainingError: a file is missing, damaged, or compressed with what is not here.
    """
    stored = info.stored
    if not stored.path.is_file():
        raise TrainingError(f"{stored.path} is missing, which the index names: fetch it, or write the data set again")
    if stored is info.raw:
        data = np.memmap(stored.path, np.uint8, "r") if stored.path.stat().st_size else np.zeros(0, np.uint8)
    else:
        if check_hashes:
            _check(stored, stored.path.read_bytes())
        data = np.frombuffer(unpack(stored.path, info.compression, info.raw.num_bytes), np.uint8)
    shard = Shard(info, data)
    if check_hashes:
        _check(info.raw, data)
    return shard


def _check(file: ShardFile, content: Any) -> None:
    for name in _HASHES & file.hashes.keys():
        found = hashlib.new(name, content).hexdigest()
        if found != file.hashes[name]:
            raise TrainingError(f"{file.path}: {name} is {found}, the index says {file.hashes[name]}: fetch it again")
