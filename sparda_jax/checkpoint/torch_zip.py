"""PyTorch's zip format (``torch.save``) without PyTorch: memory-mapped tensors, and a pickle that can run nothing.

A file is a zip archive of ``NAME/data.pkl`` (a pickle whose tensors name their storages) and uncompressed storages
``NAME/data/KEY``. Only the globals listed here are resolved, each to code of this module; any other one is an error.
"""

import collections
import dataclasses
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sparda_jax.checkpoint.errors import CheckpointError

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "HalfStorage": np.dtype(np.float16),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
# What numpy writes for a random generator's state, which the reference's trainer stores too. Never rebuilt.
_NUMPY_STATE = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StorageType:
    """The element type that a storage is declared with."""

    dtype: np.dtype


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """``count`` elements of ``dtype`` in the archive member ``data/KEY``."""

    key: str
    dtype: np.dtype
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorRef:
    """A tensor that has not been read: a strided view of a storage, in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Inert:
    """Stands for an object that is not wanted; whatever the pickle does to it has no effect."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


def _rebuild_tensor(storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object):
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    sizes, steps = tuple(map(int, shape)), tuple(map(int, strides))
    return TensorRef(storage=storage, offset=int(offset), shape=sizes, strides=steps)


def _rebuild_parameter(data: TensorRef, *_: object) -> TensorRef:
    return data


_REBUILD: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): collections.OrderedDict,
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        key = (module_name, global_name)
        if key in _REBUILD:
            return _REBUILD[key]
        if module_name == "torch" and global_name in _STORAGES:
            return StorageType(dtype=_STORAGES[global_name])
        if key in _NUMPY_STATE:
            return Inert
        raise CheckpointError(
            f"the pickle asks for {module_name}.{global_name}, which is refused: only tensors and plain containers "
            "are read; save a state dict, or convert the file to safetensors"
        )

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage_type, key, _location, count = pid
        if kind != "storage" or not isinstance(storage_type, StorageType):
            raise pickle.UnpicklingError(f"unknown persistent id {kind!r}")
        return Storage(key=str(key), dtype=storage_type.dtype, count=int(count))


class TorchFile:
    """An opened file of ``torch.save``.

    Attributes:
        content: the saved object; its tensors are :class:`TensorRef`.

    Raises:
        CheckpointError: no zip archive of ``torch.save``, truncated, or with anything but tensors and containers in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._members = self._read_directory()
        pickles = [name for name in self._members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{path.name} is a zip archive but not one of torch.save (no data.pkl)")
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}constants.pkl" in self._members:
            raise CheckpointError(f"{path.name} is a TorchScript program; save its state_dict() instead")
        with zipfile.ZipFile(path) as archive:
            order = archive.read(f"{self._root}byteorder") if f"{self._root}byteorder" in self._members else b"little"
            if order != b"little":
                raise CheckpointError(f"{path.name} has {order.decode()}-endian storages; only little-endian is read")
            self.content = self._unpickle(archive)

    def _read_directory(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return {info.filename: info for info in archive.infolist()}
        except zipfile.BadZipFile as error:
            with self.path.open("rb") as file:
                head = file.read(512)
            # A pickle (protocol 2) up to PyTorch 1.5, a tar archive before 0.1.10.
            if head[:2] == b"\x80\x02" or head[257:262] == b"ustar":
                raise CheckpointError(
                    f"{self.path.name} is in PyTorch's legacy format (before 1.6), which is not read; load it with "
                    "PyTorch and save it again with torch.save, or as safetensors"
                ) from error
            raise CheckpointError(
                f"{self.path.name} is no whole file of torch.save ({error}); fetch it again"
            ) from error

    def _unpickle(self, archive: zipfile.ZipFile) -> Any:
        try:
            with archive.open(f"{self._root}data.pkl") as file:
                return _RestrictedUnpickler(file).load()
        except CheckpointError as error:
            raise CheckpointError(f"{self.path.name}: {error}") from None
        except Exception as error:  # a damaged pickle can fail in any way; nothing of it was run
            raise CheckpointError(f"{self.path.name}: its pickle cannot be read ({error!r})") from error

    def read(self, ref: TensorRef) -> np.ndarray:
        """The tensor's values: a read-only view of the file, with the saved strides.

        Raises:
            CheckpointError: the storage is missing, compressed, cut off or smaller than the tensor.
        """
        storage, itemsize = ref.storage, ref.storage.dtype.itemsize
        where = f"{self.path.name}: storage {storage.key!r}"
        info = self._members.get(f"{self._root}data/{storage.key}")
        if info is None:
            raise CheckpointError(f"{where} is missing; fetch the file again")
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{where} is compressed, which torch.save never does; the file was repacked")
        if info.file_size != storage.count * itemsize:
            raise CheckpointError(f"{where} has {info.file_size} bytes, its tensor asks for {storage.count * itemsize}")
        last = ref.offset + sum((n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True))
        is_sane = min(ref.shape, default=1) >= 1 and min(ref.strides, default=0) >= 0
        if not is_sane or not 0 <= ref.offset <= last < storage.count:
            raise CheckpointError(f"{where}: a tensor of shape {ref.shape} is not within its {storage.count} elements")
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(30)
        if header[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{where} has no header in the archive; fetch the file again")
        name_length, extra_length = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        start = info.header_offset + 30 + name_length + extra_length
        data = np.asarray(np.memmap(self.path, np.uint8, "r", start, (info.file_size,))).view(storage.dtype)
        return np.lib.stride_tricks.as_strided(
            data[ref.offset :], ref.shape, tuple(stride * itemsize for stride in ref.strides), writeable=False
        )
