"""A decoder back into a Hugging Face folder."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from sparda_jax.checkpoint.atomic import atomic_folder
from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.forecast import FORECAST_FILE, write_forecast
from sparda_jax.checkpoint.mapping import decoder_parameters, forecast_tensors
from sparda_jax.checkpoint.tensor_files import write_safetensors
from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
CONFIG_FILES = ("config.json", "generation_config.json")


def copy_files(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Copies those of the files that exist (their contents: a Hugging Face snapshot holds links)."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def save_hf(
    model: Decoder,
    tokenizer_dir: str | Path | None,
    out: str | Path,
    config_json: Mapping[str, Any],
    *,
    generation_config: Mapping[str, Any] | None = None,
    forecast_metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes ``model`` as a Hugging Face folder: bfloat16 ``model.safetensors`` and ``config.json``, atomically.

    A Forecast goes to ``forecast.safetensors`` (with a JSON sidecar) beside it: other programs see a plain model.

    Args:
        model: on any device.
        tokenizer_dir: folder whose tokenizer files are copied; None for none.
        out: the folder to write.
        config_json: contents of ``config.json``; they must describe this model.
        generation_config: contents of ``generation_config.json``; None writes none.
        forecast_metadata: ``sparse_config``, ``base_model_path`` and ``step`` of the Forecast.
        overwrite: replace a folder that was written here before.

    Raises:
        CheckpointError: ``out`` exists, or ``config_json`` describes another model.
    """
    described = ModelConfig.from_hf(config_json, generation_config)
    free = ("sparse", "eos_token_ids", "bos_token_id", "initializer_range", "max_position_embeddings")
    for name, value in vars(model.config).items():
        if name not in free and getattr(described, name) != value:
            raise CheckpointError(f"config_json gives {name}={getattr(described, name)!r}, the model has {value!r}")
    values = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
    tensors: dict[str, np.ndarray] = {}
    for parameter in decoder_parameters(model.config, has_forecast=model.has_forecast):
        value = np.asarray(values[parameter.path]).astype(ml_dtypes.bfloat16, copy=False)
        tensors |= {name: np.ascontiguousarray(part) for name, part in parameter.split(value).items()}
    forecast = {t.name: tensors.pop(t.name) for t in forecast_tensors(model.config) if t.name in tensors}
    with atomic_folder(Path(out), overwrite=overwrite, marker="config.json") as folder:
        write_safetensors(folder / "model.safetensors", tensors)
        if forecast:
            write_forecast(folder / FORECAST_FILE, forecast, forecast_metadata or {})
        if tokenizer_dir is not None:
            copy_files(Path(tokenizer_dir), folder, TOKENIZER_FILES)
        (folder / "config.json").write_text(json.dumps(dict(config_json), indent=2) + "\n")
        if generation_config is not None:
            (folder / "generation_config.json").write_text(json.dumps(dict(generation_config), indent=2) + "\n")
