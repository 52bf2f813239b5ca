"""Token ids of MDS shards: read through once, to check them and to find the documents, from then on read in place."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from sparda_jax.train import mds
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.kept import DESCRIPTION, description, make_once
from sparda_jax.train.token_arrays import FileTokens

_FORMAT = 1
_PLACES = "documents.npz"
_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


def map_tokens(
    folder: Path, cache: Path, fingerprint: str, vocab_size: int, progress: Callable[[int], None]
) -> tuple[FileTokens, Int64[np.ndarray, " documents_plus_one"]]:
    """The documents of a data set whose samples hold ids: their tokens, and where each begins.

    Args:
        folder: of the data set. It stays as it is; the places of the documents, and what compressed shards unpack to,
            are kept in ``cache``.
        cache: see above; in it, a folder named after the fingerprint.
        fingerprint: see `mds_fingerprint`.
        vocab_size: no id may reach it.
        progress: told the bytes that are read through; not called when the cache knows the documents.

    Raises:
        TrainingError: something is missing, damaged or no id; the message says where.
    """
    shards = mds.read_index(folder)
    kept = cache / fingerprint[:16]
    make_once(kept, lambda target: _read_through(folder, shards, target, progress))
    try:
        largest = description(kept)["largest"]
        with np.load(kept / _PLACES) as arrays:
            starts, numbers, offsets, codes = (arrays[name] for name in ("starts", "numbers", "offsets", "codes"))
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"{kept} is damaged ({error}); remove it, and it is made again") from error
    if largest >= vocab_size:
        raise TrainingError(
            f"{folder} has the id {largest}, but the tokenizer ends at {vocab_size - 1}: it was made for another one; "
            "`python -m sparda_jax.train retokenise` makes it fit"
        )
    files = [shard.raw.path if shard.stored is shard.raw else kept / _name(i) for i, shard in enumerate(shards)]
    for file, shard in zip(files, shards, strict=True):
        if not file.is_file() or file.stat().st_size != shard.raw.num_bytes:
            raise TrainingError(f"{file} is not what it was: fetch it again, or remove {kept / DESCRIPTION}")
    return FileTokens(files, _DTYPES, starts, numbers, offsets, codes), starts


def mds_fingerprint(folder: Path) -> str:
    """Hash of the index: what the shards are, but for contents that only their digests there would tell."""
    return hashlib.sha256(f"mds {_FORMAT} ".encode() + (folder / mds.INDEX_FILE).read_bytes()).hexdigest()


def _name(shard: int) -> str:
    return f"{shard:05}.mds"


def _read_through(
    folder: Path, shards: list[mds.ShardInfo], target: Path, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Writes what `map_tokens` reads, and returns the description."""
    places: list[np.ndarray] = []
    largest, done = -1, 0
    for number, info in enumerate(shards):
        shard = mds.open_shard(info, check_hashes=True)
        if info.stored is not info.raw:
            shard.save(target / _name(number))
        for sample in range(len(shard)):
            found, top = _documents(shard, sample, mds.has_indices(info))
            places.append(np.insert(found, 0, number, axis=1))
            largest = max(largest, top)
        done += info.stored.num_bytes
        progress(done)
    rows = np.concatenate(places) if places else np.zeros((0, 4), np.int64)
    if not len(rows):
        raise TrainingError(f"{folder} holds no token; leave it out")
    np.savez(
        target / _PLACES,
        starts=np.concatenate([[0], np.cumsum(rows[:, 3])]),
        numbers=rows[:, 0].astype(np.int32),
        offsets=rows[:, 1],
        codes=rows[:, 2].astype(np.uint8),
    )
    return {"largest": largest, "documents": len(rows), "tokens": int(rows[:, 3].sum())}


def _documents(shard: mds.Shard, sample: int, divided: bool) -> tuple[Int64[np.ndarray, "documents 3"], int]:
    """Byte offset, code of the dtype and length of each document in a sample, and the largest id."""
    array, ids = shard.array(sample, mds.IDS), shard.value(sample, mds.IDS)
    if array.dtype.name not in _DTYPES:
        raise TrainingError(f"{shard.place(sample)}: {mds.IDS} are {array.dtype.name}; only whole numbers are ids")
    lowest, top = (int(ids.min()), int(ids.max())) if ids.size else (0, -1)
    if lowest < 0:
        raise TrainingError(f"{shard.place(sample)} has the id {lowest}; ids are not negative")
    pairs = mds.bounds(shard, sample, ids.size) if divided else np.array([[0, ids.size]])[: ids.size]
    begins, ends = pairs.T
    code = _DTYPES.index(array.dtype.name)
    rows = [array.offset + begins * array.dtype.itemsize, np.full(len(pairs), code), ends - begins]
    return np.stack(rows, axis=1).astype(np.int64), top
