"""A Hugging Face folder into a converted one: streamed item by item, hashed, and in place only when it is whole."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sparda_jax import __version__
from sparda_jax.checkpoint import store
from sparda_jax.checkpoint.atomic import atomic_folder
from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.forecast import SIDECAR_KEYS, Forecast, write_forecast
from sparda_jax.checkpoint.hf import CONFIG_FILES, TOKENIZER_FILES, copy_files
from sparda_jax.checkpoint.manifest import FORMAT_VERSION, MANIFEST_FILE, Manifest, TensorRecord
from sparda_jax.checkpoint.mapping import Parameter
from sparda_jax.checkpoint.tensor_files import TensorEntry, sha256
from sparda_jax.checkpoint.weights import HfCheckpoint, open_hf, open_weights

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and all bytes."""


def _ignore_progress(_done: int, _total: int) -> None: ...


def convert_checkpoint(
    source: Path,
    target: Path,
    *,
    forecast: Path | None = None,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
    progress: Progress = _ignore_progress,
) -> Manifest:
    """Converts ``source`` to ``target``: orbax weights, ``config.json``, tokenizer files, ``manifest.json``.

    Values are stored as they are, bit for bit; only a Forecast in another dtype than q_proj is cast to that. Host
    memory holds one layer, or the embeddings, a few times.

    Args:
        source: a Hugging Face folder.
        target: the folder to make.
        forecast: a Forecast checkpoint that is not in ``source``.
        overwrite: replace a folder that was converted before.
        check: called with the complete folder before it gets its name; an error from it means that nothing is left.
        progress: of the bytes converted.

    Raises:
        CheckpointError: a tensor is not accounted for, ``target`` exists, or the disk is too small.
        ConfigError: the model is not one that is implemented.
    """
    _check_apart(target, source, *([] if forecast is None else [forecast]))
    if (source / MANIFEST_FILE).is_file():
        raise CheckpointError(
            f"{source} is converted already: serve it as it is (--forecast there gives it another Forecast), or give "
            "the folder that it was made from"
        )
    opened = open_hf(source, forecast)
    parameters = opened.accounted.parameters
    total = sum(_num_bytes(opened, parameter) for parameter in parameters)
    with atomic_folder(target, overwrite=overwrite, marker=MANIFEST_FILE) as folder:
        free = shutil.disk_usage(folder).free
        if free < total:
            raise CheckpointError(
                f"{target} needs {total:,} bytes, its disk has {free:,} free; make room or use another"
            )
        records: dict[str, TensorRecord] = {}
        done = 0
        progress(done, total)
        for item in dict.fromkeys(parameter.item for parameter in parameters):
            arrays: dict[str, np.ndarray] = {}
            for parameter in parameters:
                if parameter.item == item:
                    arrays[parameter.path] = _read_and_hash(opened, parameter, records)
            store.write_item(folder, item, arrays)
            done += sum(array.nbytes for array in arrays.values())
            progress(done, total)
        copy_files(source, folder, CONFIG_FILES + TOKENIZER_FILES)
        manifest = _manifest(source, opened, records)
        manifest.write(folder)
        if check is not None:
            check(folder)
    return manifest


def _check_apart(target: Path, *inputs: Path) -> None:
    """What is read must not lie inside of the folder that will be replaced."""
    for path in inputs:
        if target.exists() and target.resolve() in (path.resolve(), *path.resolve().parents):
            raise CheckpointError(f"{target} is not replaced: it holds {path}, which is read; give another folder")


def export_forecast(path: Path, out: Path, *, forecast: Path | None = None, overwrite: bool = False) -> None:
    """Writes the Forecast of a Hugging Face or converted folder as safetensors with a JSON sidecar.

    Args:
        path: the folder.
        out: the file, ending in ``.safetensors``.
        forecast: a Forecast checkpoint to take in place of the folder's own (so a ``.pt`` becomes safetensors).
        overwrite: replace an existing file.

    Raises:
        CheckpointError: there is no Forecast, or ``out`` exists.
    """
    weights = open_weights(path, forecast=forecast)
    if weights.forecast is None:
        raise CheckpointError(f"{path} has no Forecast to export; give its file with --forecast FILE")
    tensors: dict[str, np.ndarray] = {}
    for parameter in weights.parameters:
        names = [tensor.name for tensor in parameter.tensors if tensor.is_forecast]
        if names:
            parts = parameter.split(weights.read_item(parameter.item)[parameter.path])
            tensors |= {name: parts[name] for name in names}
    write_forecast(out, tensors, weights.forecast, overwrite=overwrite)


def _stored_dtype(opened: HfCheckpoint, parameter: Parameter) -> str:
    return opened.accounted.entries[parameter.tensors[0].name].dtype


def _num_bytes(opened: HfCheckpoint, parameter: Parameter) -> int:
    itemsize = {"float32": 4}.get(_stored_dtype(opened, parameter), 2)
    return math.prod(parameter.shape) * itemsize


def _read_and_hash(opened: HfCheckpoint, parameter: Parameter, records: dict[str, TensorRecord]) -> np.ndarray:
    parts = opened.read_parts(parameter)
    for tensor, part in zip(parameter.tensors, parts, strict=True):
        entry = opened.accounted.entries[tensor.name]
        records[tensor.name] = _record(entry, part)
    return parameter.join(parts)


def _record(entry: TensorEntry, stored: np.ndarray) -> TensorRecord:
    stored_hash = sha256(stored)
    return TensorRecord(
        file=entry.file,
        shape=entry.shape,
        dtype=entry.dtype,
        sha256=stored_hash if entry.dtype == stored.dtype.name else sha256(entry.read()),
        stored_dtype=stored.dtype.name,
        stored_sha256=stored_hash,
    )


def _source_name(source: Path) -> dict[str, str | None]:
    """Name and revision; a Hugging Face cache keeps both in the path ``models--ORG--NAME/snapshots/REVISION``."""
    parts = source.absolute().parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return {"name": parts[-3].removeprefix("models--").replace("--", "/"), "revision": parts[-1]}
    return {"name": source.absolute().name, "revision": None}


def _forecast_record(forecast: Forecast) -> dict[str, object]:
    record: dict[str, object] = {key: forecast.metadata.get(key) for key in SIDECAR_KEYS}
    return record | {"file": forecast.file, "zero_filled": forecast.zero_filled, "ignored": forecast.ignored}


def _manifest(source: Path, opened: HfCheckpoint, records: dict[str, TensorRecord]) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        sparda_jax_version=__version__,
        source=_source_name(source),
        config=json.loads((source / "config.json").read_text()),
        sparse_config=dataclasses.asdict(opened.config.sparse),
        forecast=_forecast_record(opened.forecast) if opened.forecast else None,
        tensors=records,
        dropped=opened.accounted.dropped,
    )
