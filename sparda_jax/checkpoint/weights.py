"""One way to read weights, from a Hugging Face folder or a converted one: item by item, as the decoder's parameters."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparda_jax.checkpoint import store
from sparda_jax.checkpoint.accounting import Accounted, account
from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.forecast import FORECAST_FILE, SIDECAR_KEYS, Forecast, forecast_among, open_forecast
from sparda_jax.checkpoint.manifest import MANIFEST_FILE, Manifest
from sparda_jax.checkpoint.mapping import FORECAST_NAME, Parameter, decoder_parameters
from sparda_jax.checkpoint.tensor_files import open_tensors, sha256
from sparda_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """An opened checkpoint; nothing is read until an item is asked for.

    Attributes:
        config: of the model, with the Forecast's ``sparse_config`` merged in.
        parameters: that the items hold.
        forecast: None without a Forecast, else its ``sparse_config``, ``base_model_path`` and ``step``.
        read_item: gives an item's parameters by dotted path, fresh arrays in the stored dtype.
    """

    config: ModelConfig
    parameters: tuple[Parameter, ...]
    forecast: Mapping[str, Any] | None
    read_item: Callable[[str], dict[str, np.ndarray]]

    @property
    def items(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(parameter.item for parameter in self.parameters))

    def of_item(self, item: str) -> tuple[Parameter, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.item == item)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfCheckpoint:
    """A Hugging Face folder whose tensors are all accounted for, with the Forecast that goes with it."""

    config: ModelConfig
    accounted: Accounted
    forecast: Forecast | None

    def read_parts(self, parameter: Parameter) -> list[np.ndarray]:
        """A parameter's tensors; a Forecast is cast to the dtype of the projections that it is joined with."""
        arrays = [self.accounted.entries[tensor.name].read() for tensor in parameter.tensors]
        return [array.astype(arrays[0].dtype, copy=False) for array in arrays]


def open_hf(folder: Path, forecast: Path | None = None) -> HfCheckpoint:
    """Opens a Hugging Face folder and accounts for every tensor.

    Args:
        folder: with ``config.json`` and weights.
        forecast: the Forecast's file. None: the folder's own, if any (``forecast.safetensors``, or among its weights).

    Raises:
        CheckpointError: with the full list of what is wrong with the tensors.
        ConfigError: the model is not one that is implemented.
    """
    config = ModelConfig.from_pretrained(folder)
    files = open_tensors(folder)
    if forecast is None and (folder / FORECAST_FILE).is_file():
        forecast = folder / FORECAST_FILE
    opened = None
    if forecast is not None:
        opened = open_forecast(forecast, config)
        both = [name for name in opened.entries if name in files.entries]
        twice = [f"duplicate: {name} in {files.entries[name].file} and {opened.file}" for name in both]
        files = dataclasses.replace(files, problems=(*files.problems, *twice))
    elif any(FORECAST_NAME.search(name) for name in files.entries):
        opened = dataclasses.replace(forecast_among(files, config, file=files.label), ignored=())
    if opened is not None:
        files = dataclasses.replace(files, entries={**files.entries, **opened.entries})
        config = ModelConfig.from_pretrained(folder, opened.metadata.get("sparse_config"))
    accounted = account(files, config, has_forecast=opened is not None)
    return HfCheckpoint(config=config, accounted=accounted, forecast=opened)


def open_weights(path: Path, *, forecast: Path | None = None, check_hashes: bool = False) -> Weights:
    """Opens a Hugging Face or a converted folder.

    Args:
        path: the folder.
        forecast: a Forecast checkpoint to use in place of the folder's own, if it has one.
        check_hashes: compare the values of a converted folder with the hashes in its manifest, as they are read.

    Raises:
        CheckpointError: something is missing, damaged or belongs to another model.
    """
    if (path / MANIFEST_FILE).is_file():
        return _open_converted(path, forecast, check_hashes)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; give that of a Hugging Face or converted checkpoint")
    source = open_hf(path, forecast)
    parameters = source.accounted.parameters

    def read_item(item: str) -> dict[str, np.ndarray]:
        return {p.path: p.join(source.read_parts(p)) for p in parameters if p.item == item}

    metadata = source.forecast.metadata if source.forecast else None
    return Weights(config=source.config, parameters=parameters, forecast=metadata, read_item=read_item)


def _open_converted(path: Path, forecast: Path | None, check_hashes: bool) -> Weights:
    manifest = Manifest.read(path)
    recorded = manifest.forecast
    metadata = {key: recorded.get(key) for key in SIDECAR_KEYS} if recorded is not None else None
    config = ModelConfig.from_pretrained(path, metadata["sparse_config"] if metadata else None)
    stored = decoder_parameters(config, has_forecast=recorded is not None)
    manifest.check(path, stored)

    def read_stored(item: str) -> dict[str, np.ndarray]:
        arrays = store.read_item(path, item)
        _check_item(path, manifest, [p for p in stored if p.item == item], arrays, check_hashes)
        return arrays

    if forecast is None:
        return Weights(config=config, parameters=stored, forecast=metadata, read_item=read_stored)
    replacement = open_forecast(forecast, config)
    config = ModelConfig.from_pretrained(path, replacement.metadata.get("sparse_config"))
    parameters = decoder_parameters(config, has_forecast=True)

    def read_replaced(item: str) -> dict[str, np.ndarray]:
        arrays = read_stored(item)
        old = {p.path: p for p in stored if p.item == item}
        for parameter in parameters:
            if parameter.item == item and any(tensor.is_forecast for tensor in parameter.tensors):
                value = arrays[parameter.path]
                parts = old[parameter.path].split(value)
                parts |= {n: e.read().astype(value.dtype) for n, e in replacement.entries.items()}
                arrays[parameter.path] = parameter.join([parts[tensor.name] for tensor in parameter.tensors])
        return arrays

    return Weights(config=config, parameters=parameters, forecast=replacement.metadata, read_item=read_replaced)


def _check_item(
    path: Path, manifest: Manifest, parameters: list[Parameter], arrays: Mapping[str, np.ndarray], check_hashes: bool
) -> None:
    problems = [f"unexpected: {name}" for name in arrays.keys() - {p.path for p in parameters}]
    for parameter in parameters:
        value, record = arrays.get(parameter.path), manifest.tensors[parameter.tensors[0].name]
        if value is None or value.shape != parameter.shape or value.dtype.name != record.stored_dtype:
            found = "missing" if value is None else f"{value.dtype} {list(value.shape)}"
            problems.append(f"{parameter.path}: {found}, not {record.stored_dtype} {list(parameter.shape)}")
        elif check_hashes:
            parts = parameter.split(value)
            changed = [name for name, part in parts.items() if sha256(part) != manifest.tensors[name].stored_sha256]
            problems += [f"changed: {name} does not have the hash that {MANIFEST_FILE} says" for name in changed]
    if problems:
        raise CheckpointError.listing(
            str(path), problems, "The folder was damaged after its conversion: convert again."
        )
