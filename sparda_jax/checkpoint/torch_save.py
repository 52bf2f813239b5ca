"""Files that ``torch.load`` reads, written without PyTorch: plain containers and tensors, also with weights_only=True.

The format is the one that `sparda_jax.checkpoint.torch_zip` reads: a zip archive with a pickle and one member for every
tensor. The pickle uses protocol 2 and the opcodes that PyTorch's safe unpickler knows.
"""

import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sparda_jax.checkpoint.errors import CheckpointError

_STORAGES = {np.dtype(np.float32): "FloatStorage", np.dtype(ml_dtypes.bfloat16): "BFloat16Storage"}
_ARCHIVE = "archive"


def write_torch(path: Path, content: Any) -> None:
    """Writes what ``torch.save(content, path)`` would.

    Args:
        content: mappings with string keys, sequences, strings, numbers, None, and arrays (float32 or bfloat16), which
            become tensors.

    Raises:
        CheckpointError: something else is in it.
    """
    arrays: list[np.ndarray] = []
    program = b"\x80\x02" + _encode(content, arrays) + b"."
    # A fixed date: equal contents give equal files.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, data: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(f"{_ARCHIVE}/{name}"), data)

        add("data.pkl", program)
        add("byteorder", b"little")
        for key, array in enumerate(arrays):
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            add(f"data/{key}", np.ascontiguousarray(little).tobytes())
        add("version", b"3\n")


def _encode(value: Any, arrays: list[np.ndarray]) -> bytes:
    """The pickle of a value; its arrays are appended to ``arrays`` and named by their number."""

    def many(values: Sequence[Any]) -> bytes:
        return b"".join(_encode(item, arrays) for item in values)

    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode()
            return b"X" + struct.pack("<I", len(text)) + text
        case np.ndarray():
            return _tensor(value, arrays)
        case tuple():
            return b"(" + many(value) + b"t"
        case list():
            return b"](" + many(value) + b"e"
        case Mapping():
            return b"}(" + many([part for item in value.items() for part in item]) + b"u"
    raise CheckpointError(f"a PyTorch file can't hold {value!r} ({type(value).__name__}) here")


def _tensor(array: np.ndarray, arrays: list[np.ndarray]) -> bytes:
    if array.dtype not in _STORAGES:
        names = ", ".join(dtype.name for dtype in _STORAGES)
        raise CheckpointError(f"a tensor of dtype {array.dtype} can't be written; use one of {names}")
    storage = _encode("storage", arrays) + _global("torch", _STORAGES[array.dtype])
    storage += _encode(str(len(arrays)), arrays) + _encode("cpu", arrays) + _encode(array.size, arrays)
    arrays.append(array)
    strides = tuple(int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim))
    arguments = b"(" + storage + b"tQ" + _encode(0, arrays) + _encode(array.shape, arrays) + _encode(strides, arrays)
    # requires_grad, and no hooks
    arguments += _encode(False, arrays) + _global("collections", "OrderedDict") + b")R"
    return _global("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()
