"""Forecast checkpoints (docs/semantics.md section 8.3): the reference's ``.pt``, or safetensors with a JSON sidecar."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparda_jax.checkpoint.accounting import compare, unexpected
from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.mapping import FORECAST_NAME, SourceTensor, forecast_tensors, last_q_future
from sparda_jax.checkpoint.tensor_files import TensorEntry, TensorFiles, open_tensors, read_json, write_safetensors
from sparda_jax.config import ModelConfig

FORECAST_FILE = "forecast.safetensors"
SIDECAR_KEYS = ("sparse_config", "base_model_path", "step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast weights whose names, shapes and dtypes are those of the model.

    Attributes:
        file: name of the file they come from.
        entries: every Forecast tensor by name, in the model's order.
        zero_filled: the last layer's ``q_future`` when the file lacks it; nothing reads it.
        ignored: other keys of the file.
        metadata: ``sparse_config``, ``base_model_path`` and ``step``, as far as the file has them.
    """

    file: str
    entries: Mapping[str, TensorEntry]
    zero_filled: tuple[str, ...]
    ignored: tuple[str, ...]
    metadata: Mapping[str, Any]


def _zeros(tensor: SourceTensor) -> TensorEntry:
    return TensorEntry(
        name=tensor.name,
        file="",
        shape=tensor.shape,
        dtype="float32",
        read=lambda: np.zeros(tensor.shape, np.float32),
    )


def open_forecast(path: Path, config: ModelConfig) -> Forecast:
    """Opens a Forecast checkpoint.

    Args:
        path: the file (``.pt``, ``.safetensors``), or a folder that holds ``forecast.safetensors`` or weights.
        config: of the base model.

    Raises:
        CheckpointError: with the full list of what is missing, misshaped or belongs to another model.
    """
    if (path / FORECAST_FILE).is_file():
        path = path / FORECAST_FILE
    files = open_tensors(path)
    sidecar = path.with_suffix(".json")
    if path.suffix == ".safetensors" and sidecar.is_file():
        content = read_json(sidecar)
        files = dataclasses.replace(files, metadata={k: content[k] for k in SIDECAR_KEYS if content.get(k) is not None})
    return forecast_among(files, config, file=path.name)


def forecast_among(files: TensorFiles, config: ModelConfig, *, file: str) -> Forecast:
    """The Forecast among opened tensors, which may also hold a base model (:func:`open_forecast` says more)."""
    tensors = forecast_tensors(config)
    found = {name: entry for name, entry in files.entries.items() if FORECAST_NAME.search(name)}
    last = last_q_future(config)
    zero_filled = () if last in found else (last,)
    problems = list(files.problems) + compare((t for t in tensors if t.name not in zero_filled), found)
    problems += unexpected(found.keys() - {t.name for t in tensors})
    if problems:
        way_out = "Nothing was converted or loaded: give the Forecast that was trained for this model."
        raise CheckpointError.listing(f"Forecast {files.label}", problems, way_out)
    ignored = (*files.foreign, *(name for name in files.entries if name not in found))
    return Forecast(
        file=file,
        entries={t.name: found.get(t.name) or _zeros(t) for t in tensors},
        zero_filled=zero_filled,
        ignored=tuple(key for key in ignored if key not in files.metadata),
        metadata=files.metadata,
    )


def write_forecast(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any], *, overwrite: bool = False
) -> None:
    """Writes ``path`` (safetensors, PyTorch's names and ``[out, in]``) and its JSON sidecar, each atomically.

    Raises:
        CheckpointError: ``path`` does not end in ``.safetensors``, or exists without ``overwrite``.
    """
    if path.suffix != ".safetensors":
        raise CheckpointError(f"the Forecast is written as safetensors; {path.name} has to end in .safetensors")
    sidecar = path.with_suffix(".json")
    content = json.dumps({key: metadata.get(key) for key in SIDECAR_KEYS}, indent=2) + "\n"
    with atomic_file(sidecar, overwrite=overwrite) as temporary:
        temporary.write_text(content)
    with atomic_file(path, overwrite=overwrite) as temporary:
        write_safetensors(temporary, tensors)
