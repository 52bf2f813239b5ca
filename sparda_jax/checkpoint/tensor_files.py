"""The tensors of a checkpoint's files by name: safetensors or PyTorch, sharded or single. Values are read on demand."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.torch_zip import TensorRef, TorchFile

_SAFETENSORS_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_SAFETENSORS, _TORCH = (".safetensors",), (".bin", ".pt", ".pth")
# In the order of preference. Each name may also be followed by ".index.json".
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt", "model.pt")
# Dictionaries that trainers put around a state dict (docs/semantics.md section 8.3).
_WRAPPERS = ("model_state_dict", "state_dict", "model", "net", "weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor in a file.

    Attributes:
        name, file: its name, and the name of its file.
        shape: as stored, PyTorch's ``[out, in]``.
        dtype: ``bfloat16``, ``float16``, ``float32``, or the file's own word for anything else.
        read: gives the values: a read-only memory-mapped view.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFiles:
    """All tensors of a checkpoint.

    Attributes:
        label: what to call it in messages.
        entries: by name.
        problems: what is wrong across files: a tensor in two shards, an index that its shards contradict.
        foreign: keys of a PyTorch file beside its weights, as the optimizer's state.
        metadata: what a trainer stored with the weights (``sparse_config``, ``base_model_path``, ``step``).
    """

    label: str
    entries: Mapping[str, TensorEntry]
    problems: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def sha256(array: np.ndarray) -> str:
    """Hash of the values' bytes in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


def has_weights(folder: Path) -> bool:
    """Whether :func:`open_tensors` would find weights in a folder."""
    return any((folder / name).is_file() or (folder / f"{name}.index.json").is_file() for name in _WEIGHT_FILES)


def open_tensors(path: Path) -> TensorFiles:
    """Opens a safetensors or PyTorch file, or the weights of a folder (safetensors first, as transformers does).

    Raises:
        CheckpointError: there are no weights, or a file is damaged, missing or in a format that is not read.
    """
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    for name in _WEIGHT_FILES:
        single, index = path / name, path / f"{name}.index.json"
        if single.is_file() and index.is_file():
            raise CheckpointError(f"{path} holds both {single.name} and {index.name}; remove the outdated one")
        if single.is_file():
            return _open_file(single)
        if index.is_file():
            return _open_sharded(index)
    raise CheckpointError(f"{path} holds no weights; looked for {', '.join(_WEIGHT_FILES)}, each also with .index.json")


def _open_file(path: Path) -> TensorFiles:
    if path.suffix in _SAFETENSORS:
        return TensorFiles(label=path.name, entries=_safetensors_entries(path))
    if path.suffix in _TORCH:
        return _open_torch(path)
    raise CheckpointError(f"{path.name} is neither {' nor '.join(_SAFETENSORS + _TORCH)}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or a :class:`CheckpointError` that names the file."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds a JSON {type(content).__name__}; an object is needed")
    return content


def _safetensors_entries(path: Path) -> dict[str, TensorEntry]:
    try:
        # The library checks the header: every byte of the file belongs to one tensor, sizes agree, nothing is cut off.
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} is not a whole safetensors file ({error}); fetch it again") from error
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return {name: _safetensors_entry(path, name, field, 8 + header_bytes) for name, field in header.items()}


def _safetensors_entry(path: Path, name: str, field: Mapping[str, Any], data_start: int) -> TensorEntry:
    shape, (start, stop) = tuple(field["shape"]), field["data_offsets"]
    dtype = _SAFETENSORS_DTYPES.get(field["dtype"])

    def read() -> np.ndarray:
        if dtype is None:
            raise CheckpointError(f"{path.name}: {name} is {field['dtype']}, which is not read")
        # One mapping per tensor: its pages leave this process with the array.
        data = np.memmap(path, np.uint8, "r", data_start + start, (stop - start,))
        return np.asarray(data).view(dtype).reshape(shape)

    return TensorEntry(name=name, file=path.name, shape=shape, dtype=dtype.name if dtype else field["dtype"], read=read)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file that transformers and the reference's loaders take: they ask for the entry ``format``."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library leaves it readable by its owner only


def _open_torch(path: Path) -> TensorFiles:
    file = TorchFile(path)
    content, foreign = file.content, []
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path.name} holds a {type(content).__name__}; a state dict is needed")
    state = content
    for wrapper in _WRAPPERS:
        if isinstance(content.get(wrapper), Mapping):
            state = content[wrapper]
            foreign = [str(key) for key in content if key != wrapper]
            break
    entries: dict[str, TensorEntry] = {}
    problems = []
    for key, value in state.items():
        if not isinstance(value, TensorRef):
            foreign.append(str(key))
            continue
        name = str(key).removeprefix("module.")
        if name in entries:
            problems.append(f"duplicate: {name}, with and without the prefix 'module.' in {path.name}")
        entries[name] = _torch_entry(file, name, value)
    wanted = ("sparse_config", "base_model_path", "step")
    metadata = {key: content[key] for key in wanted if isinstance(content.get(key), dict | str | int)}
    return TensorFiles(
        label=path.name, entries=entries, problems=tuple(problems), foreign=tuple(foreign), metadata=metadata
    )


def _torch_entry(file: TorchFile, name: str, ref: TensorRef) -> TensorEntry:
    return TensorEntry(
        name=name,
        file=file.path.name,
        shape=ref.shape,
        dtype=ref.storage.dtype.name,
        read=lambda: file.read(ref),
    )


def _open_sharded(index: Path) -> TensorFiles:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index.name} has no weight_map; fetch it again")
    shards = sorted(set(map(str, weight_map.values())))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise CheckpointError(f"{index.name} names files outside of its folder: {', '.join(outside)}")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise CheckpointError(f"{index.parent} lacks shards that {index.name} names: {', '.join(missing)}; fetch them")
    entries: dict[str, TensorEntry] = {}
    problems, foreign = [], []
    for shard in shards:
        opened = _open_file(index.parent / shard)
        problems += opened.problems
        foreign += opened.foreign
        for name, entry in opened.entries.items():
            if name in entries:
                problems.append(f"duplicate: {name} in {entries[name].file} and {shard}")
            entries.setdefault(name, entry)
    problems += [
        f"index: {name} is said to be in {shard}, which does not hold it"
        for name, shard in weight_map.items()
        if name in entries and entries[name].file != shard
    ]
    return TensorFiles(label=index.parent.name, entries=entries, problems=tuple(problems), foreign=tuple(foreign))
