"""Token ids of MDS shards: read through once, to check them and to find the documents, from then on read in place."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

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
    shares: list[tuple[np.ndarray, ...]] = []
    largest, done = -1, 0
    for number, info in enumerate(shards):
        shard = mds.open_shard(info, check_hashes=True)
        if info.stored is not info.raw:
            shard.save(target / _name(number))
        if len(shard):
            found, top = _documents(shard, mds.has_indices(info))
            shares.append((np.full(len(found[0]), number, np.int32), *found))
            largest = max(largest, top)
        done += info.stored.num_bytes
        progress(done)
    if not sum(len(share[0]) for share in shares):
        raise TrainingError(f"{folder} holds no token; leave it out")
    numbers, offsets, codes, lengths = (np.concatenate(arrays) for arrays in zip(*shares, strict=True))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    np.savez(target / _PLACES, starts=starts, numbers=numbers, offsets=offsets, codes=codes)
    return {"largest": largest, "documents": len(lengths), "tokens": int(starts[-1])}


def _documents(
    shard: mds.Shard, divided: bool
) -> tuple[
    tuple[Int64[np.ndarray, " documents"], UInt8[np.ndarray, " documents"], Int64[np.ndarray, " documents"]], int
]:
    """Byte offset, code of the dtype and length of each document of a shard, and the largest id."""
    offsets, codes, sizes = (np.empty(len(shard), np.int64) for _ in range(3))
    pairs: list[np.ndarray] = []
    largest = -1
    for sample in range(len(shard)):
        place = shard.array(sample, mds.IDS)
        if place.dtype.name not in _DTYPES:
            raise TrainingError(f"{shard.place(sample)}: {mds.IDS} are {place.dtype.name}; only whole numbers are ids")
        if place.count:
            ids = shard.numbers(place)
            lowest, top = int(ids.min()), int(ids.max())
            if lowest < 0:
                raise TrainingError(f"{shard.place(sample)} has the id {lowest}; ids are not negative")
            largest = max(largest, top)
        whole = np.array([[0, place.count]])[: place.count]
        pairs.append(mds.bounds(shard, sample, place.count) if divided else whole)
        offsets[sample], codes[sample] = place.offset, _DTYPES.index(place.dtype.name)
        sizes[sample] = place.dtype.itemsize
    counts = [len(found) for found in pairs]
    begins, ends = np.concatenate(pairs).T
    first = np.repeat(offsets, counts) + begins * np.repeat(sizes, counts)
    return (first, np.repeat(codes, counts).astype(np.uint8), ends - begins), largest
