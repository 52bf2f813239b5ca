"""MDS data sets put together byte by byte from the description of the format, without the code that reads them."""

import bz2
import gzip
import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CODES = {"uint8": 8, "uint16": 16, "int32": 33, "uint32": 32, "int64": 65, "float32": 34}
SCALARS = {"int": "<q", "uint64": "<Q", "uint8": "<B", "float32": "<f", "int32": "<i"}


def encode(encoding: str, value: Any) -> bytes:
    name, _, described = encoding.partition(":")
    if name == "str":
        return value.encode()
    if name == "bytes":
        return value
    if name in SCALARS:
        return struct.pack(SCALARS[name], value)
    assert name == "ndarray"
    array = np.asarray(value)
    dtype, _, shape = described.partition(":")
    if dtype:
        array = array.astype(dtype)
    out = b"" if dtype else struct.pack("<B", CODES[array.dtype.name])
    if not shape:
        largest = max(array.shape)
        width = 0 if largest < 256 else 1 if largest < 65536 else 2
        out += struct.pack("<B", array.ndim * 4 + width)
        for axis in array.shape:
            out += struct.pack("<" + "BHI"[width], axis)
    return out + array.tobytes()


def fixed_size(encoding: str) -> int | None:
    if encoding in SCALARS:
        return struct.calcsize(SCALARS[encoding])
    parts = encoding.split(":")
    if len(parts) == 3:
        return int(np.prod([int(n) for n in parts[2].split(",")])) * np.dtype(parts[1]).itemsize
    return None


def shard_bytes(columns: Mapping[str, str], samples: Sequence[Mapping[str, Any]]) -> bytes:
    names = sorted(columns)
    bodies = []
    for sample in samples:
        values = [encode(columns[name], sample[name]) for name in names]
        variable = [v for name, v in zip(names, values, strict=True) if fixed_size(columns[name]) is None]
        bodies.append(b"".join(struct.pack("<I", len(v)) for v in variable) + b"".join(values))
    config = b'{"a description that readers pass over": 1}'
    place = 4 + 4 * (len(bodies) + 1) + len(config)
    header = struct.pack("<I", len(bodies))
    for body in bodies:
        header += struct.pack("<I", place)
        place += len(body)
    return header + struct.pack("<I", place) + config + b"".join(bodies)


def zstd_frames(data: bytes) -> bytes:
    """Two Zstandard frames of stored (not compressed) blocks, without the size of their contents."""
    half = len(data) // 2
    return b"".join(_zstd_frame(part) for part in (data[:half], data[half:]))


def _zstd_frame(data: bytes) -> bytes:
    out = bytes.fromhex("28b52ffd") + b"\x00" + b"\x58"  # magic number, no flags, a window of 2 MiB
    blocks = [data[i : i + 60000] for i in range(0, len(data), 60000)] or [b""]
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        out += (len(block) << 3 | last).to_bytes(3, "little") + block
    return out


PACK: dict[str, Callable[[bytes], bytes]] = {"zstd": zstd_frames, "gz": gzip.compress, "bz2": bz2.compress}


def write_mds(
    folder: Path,
    columns: Mapping[str, str],
    shards: Sequence[Sequence[Mapping[str, Any]]],
    *,
    compression: str | None = None,
    hashes: Sequence[str] = (),
) -> Path:
    """Writes shards and their index; compressed ones leave no raw file, as after a download."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, samples in enumerate(shards):
        raw, basename = shard_bytes(columns, samples), f"shard.{number:05}.mds"
        entry: dict[str, Any] = {
            "column_names": sorted(columns),
            "column_encodings": [columns[name] for name in sorted(columns)],
            "column_sizes": [fixed_size(columns[name]) for name in sorted(columns)],
            "compression": compression and f"{compression}:3",
            "format": "mds",
            "hashes": list(hashes),
            "raw_data": _described(basename, raw, hashes),
            "samples": len(samples),
            "size_limit": 1 << 26,
            "version": 2,
            "zip_data": None,
        }
        if compression:
            packed = PACK[compression](raw)
            entry["zip_data"] = _described(f"{basename}.{compression}", packed, hashes)
            (folder / f"{basename}.{compression}").write_bytes(packed)
        else:
            (folder / basename).write_bytes(raw)
        entries.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


def _described(basename: str, content: bytes, hashes: Sequence[str]) -> dict[str, Any]:
    digests = {name: hashlib.new(name, content).hexdigest() if name != "xxh64" else "00" for name in hashes}
    return {"basename": basename, "bytes": len(content), "hashes": digests}
