"""The weights that are trained: new ones, from a Forecast file, and back into one (docs/semantics.md 5.1 and 8.3).

They are one float32 array ``[layers, hidden, kv_heads * head_dim]``: entry l is what layer l is selected with, so
entry 0 is layer 0's ``q_curr`` and entry l > 0 the ``q_future`` of layer l - 1. The ``q_future`` of the last layer,
which nothing reads, is not trained.
"""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.forecast import open_forecast, write_forecast
from sparda_jax.checkpoint.mapping import Q_CURR, Q_FUTURE, forecast_tensors
from sparda_jax.checkpoint.torch_save import write_torch
from sparda_jax.config import ModelConfig
from sparda_jax.foresight import ForecastDesign
from sparda_jax.model import Decoder, apply_rope, rope_tables
from sparda_jax.train._rows import dot

TORCH, SAFETENSORS, SIDECAR = ".pt", ".safetensors", ".json"
PUBLISHED_DESIGN = ForecastDesign()


class Start(enum.StrEnum):
    """What a run without a Forecast to start from begins with."""

    QUERIES = "queries"  # `query_weights`
    RANDOM = "random"  # `fresh_weights`


def query_weights(
    base: Decoder, design: ForecastDesign = PUBLISHED_DESIGN
) -> Float32[np.ndarray, "layers hidden outputs"]:
    """The queries of the layer that is selected for, averaged over each group, as far as the layer before can tell.

    A Forecast sees the normed input of the layer before. That layer's norm weights are exchanged for the layer's own;
    what the layer before adds to the stream is missing. For layer 0 nothing is. Of several heads for a group each
    averages its share of it, the first heads one query more where they don't divide evenly; where there are more than
    queries, queries repeat.
    """
    config = base.config
    norms = [np.asarray(layer.input_layernorm.weight[...], np.float32) for layer in base.layers]
    queries = slice(config.num_heads * config.head_dim)
    weights = []
    for index, layer in enumerate(base.layers):
        kernel = np.asarray(layer.self_attn.qkvf_proj.kernel[:, queries], np.float32)
        groups = kernel.reshape(config.hidden_size, config.num_kv_heads, -1, config.head_dim)
        if design.heads_per_group > config.group_size:
            groups = groups[:, :, np.arange(design.heads_per_group) % config.group_size]
        parts = np.array_split(groups, design.heads_per_group, axis=2)
        heads = np.stack([part.mean(axis=2) for part in parts], axis=2)
        seen = norms[design.source(index)]
        # Behind a norm weight of zero there is nothing to see.
        exchange = np.divide(norms[index], seen, out=np.zeros_like(seen), where=seen != 0)
        weights.append(heads.reshape(config.hidden_size, -1) * exchange[:, None])
    return np.stack(weights)


def fresh_weights(
    config: ModelConfig, seed: int, design: ForecastDesign = PUBLISHED_DESIGN
) -> Float32[np.ndarray, "layers hidden outputs"]:
    """Uniform within ``1 / sqrt(hidden)``, as the published trainer begins."""
    bound = config.hidden_size**-0.5
    shape = (config.num_layers, config.hidden_size, design.outputs(config))
    return np.random.default_rng([seed, 1]).uniform(-bound, bound, shape).astype(np.float32)


def predict(
    weight: Float[Array, "hidden outputs"],
    normed: Float[Array, "batch q_len hidden"],
    positions: Int[Array, "batch q_len"],
    config: ModelConfig,
) -> Float[Array, "batch q_len forecast_heads head_dim"]:
    """The Forecast in float32, after RoPE.

    Args:
        weight: of the layer that is to be selected for.
        normed: what its Forecast sees: the normed input of the layer before, or layer 0's own.
    """
    heads = dot("bqi,io->bqo", normed, weight).reshape(*normed.shape[:2], -1, config.head_dim)
    return apply_rope(heads, *rope_tables(config, positions))


def tensor_names(config: ModelConfig) -> list[str]:
    """The tensor behind each entry of the weights."""
    futures = [f"model.layers.{layer}.{Q_FUTURE}" for layer in range(config.num_layers - 1)]
    return [f"model.layers.0.{Q_CURR}", *futures]


def read_weights(path: Path, config: ModelConfig) -> Float32[np.ndarray, "layers hidden outputs"]:
    """The weights in a Forecast file, or in a folder that has one.

    Raises:
        CheckpointError: it is unreadable or belongs to another model.
    """
    entries = open_forecast(path, config).entries
    return np.stack([entries[name].read().astype(np.float32).T for name in tensor_names(config)])


def check_export(path: Path, *, overwrite: bool) -> None:
    """Refuses what `export` would, before the work is done.

    Raises:
        CheckpointError: the name ends otherwise, or the file or its sidecar exists.
    """
    if path.suffix not in (TORCH, SAFETENSORS):
        raise CheckpointError(f"{path.name} has to end in {SAFETENSORS}, or in {TORCH} for PyTorch programs")
    written = (path, path.with_suffix(SIDECAR)) if path.suffix == SAFETENSORS else (path,)
    for file in written:
        if file.is_dir():
            raise CheckpointError(f"{file} is a folder; give another name")
        if file.exists() and not overwrite:
            raise CheckpointError(f"{file} exists; give another name, or --overwrite to replace it")


def export(
    path: Path,
    weights: Float32[np.ndarray, "layers hidden outputs"],
    config: ModelConfig,
    *,
    step: int,
    base: str,
    overwrite: bool = False,
) -> None:
    """Writes a Forecast file in bfloat16: ``.safetensors`` with its JSON sidecar, or the published trainer's ``.pt``.

    The last layer's ``q_future`` is written as zeros, since other readers want every tensor.

    Args:
        step, base: recorded as ``step`` and ``base_model_path``.
        overwrite: replace an existing file.

    Raises:
        CheckpointError: see `check_export`.
    """
    check_export(path, overwrite=overwrite)
    trained = dict(zip(tensor_names(config), weights, strict=True))
    tensors = {
        tensor.name: np.ascontiguousarray(trained[tensor.name].T).astype(ml_dtypes.bfloat16)
        if tensor.name in trained
        else np.zeros(tensor.shape, ml_dtypes.bfloat16)
        for tensor in forecast_tensors(config)
    }
    metadata: Mapping[str, Any] = {
        "sparse_config": dataclasses.asdict(config.sparse),
        "base_model_path": base,
        "step": step,
    }
    if path.suffix == SAFETENSORS:
        write_forecast(path, tensors, metadata, overwrite=overwrite)
        return
    with atomic_file(path, overwrite=overwrite) as temporary:
        write_torch(temporary, {**metadata, "model_state_dict": tensors})
