"""Compressed shards in memory."""

import bz2
import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

from sparda_jax.train.errors import TrainingError


def unpack(path: Path, compression: str | None, num_bytes: int) -> bytes:
    """The contents of a compressed file, and no more than one byte beyond what it should have.

    Args:
        path: the compressed file.
        compression: ``zstd``, ``gz`` or ``bz2``.
        num_bytes: the size that the contents should have. A file with more is wrong, however much it would grow to.

    Raises:
        TrainingError: the file is damaged, or compressed with something else, or zstandard is not installed.
    """
    read = _READERS.get(compression or "")
    if read is None:
        raise TrainingError(f"{path} is compressed with {compression}, which is not read here; unpack it beside itself")
    try:
        return read(path, num_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TrainingError(f"{path} can't be unpacked ({error}): fetch it again") from error


def _gzip(path: Path, limit: int) -> bytes:
    with gzip.open(path) as stream:
        return stream.read(limit)


def _bzip2(path: Path, limit: int) -> bytes:
    with bz2.open(path) as stream:
        return stream.read(limit)


def _zstd(path: Path, limit: int) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise TrainingError(
            f"{path} needs zstandard, which is not installed: pip install zstandard, or unpack it with zstd -d"
        ) from error
    unpacker = zstandard.ZstdDecompressor()
    try:
        with path.open("rb") as packed, unpacker.stream_reader(packed, read_across_frames=True) as stream:
            return stream.read(limit)
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error


_READERS: dict[str, Callable[[Path, int], bytes]] = {"gz": _gzip, "bz2": _bzip2, "zstd": _zstd}
