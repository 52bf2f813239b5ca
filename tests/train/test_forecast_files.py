"""Forecast weights from and to files, and what a file gives when it is served."""

import io
import json
import pickle
import zipfile
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from sparda_jax.checkpoint import CheckpointError, load_model, save_hf
from sparda_jax.checkpoint.tensor_files import open_tensors
from sparda_jax.checkpoint.torch_save import write_torch
from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder, rope_tables
from sparda_jax.train.forecast import (
    check_export,
    export,
    fresh_weights,
    predict,
    query_weights,
    read_weights,
    tensor_names,
)
from tests.train.support import tiny_model

LAYERS = 3


@pytest.fixture
def config() -> ModelConfig:
    return tiny_model(layers=LAYERS).config


@pytest.fixture
def weights(config: ModelConfig) -> np.ndarray:
    return fresh_weights(config, seed=5)


def test_fresh_weights_are_uniform_and_seeded(config: ModelConfig, weights: np.ndarray) -> None:
    assert weights.shape == (LAYERS, 32, 32)
    assert weights.dtype == np.float32
    bound = 32**-0.5
    assert np.abs(weights).max() <= bound
    assert weights.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    np.testing.assert_array_equal(weights, fresh_weights(config, seed=5))
    assert not np.array_equal(weights, fresh_weights(config, seed=6))


def test_the_queries_of_the_next_layer_as_a_forecast() -> None:
    """Where both layers see the same stream, the Forecast is the mean of the group's queries, whatever the norms."""
    base = nnx.clone(tiny_model(layers=LAYERS))
    rng = np.random.default_rng(1)
    for layer in base.layers:
        layer.input_layernorm.weight[...] = jnp.asarray(rng.uniform(-2, 2, 32), jnp.float32)
    base.layers[1].input_layernorm.weight[...] = base.layers[1].input_layernorm.weight[...].at[3].set(0)
    weights = query_weights(base)
    assert weights.shape == (LAYERS, 32, 32)
    assert np.isfinite(weights).all()
    stream = rng.standard_normal((2, 5, 32)).astype(np.float32)
    stream[..., 3] = 0
    x = jnp.asarray(stream)
    positions = jnp.arange(10).reshape(2, 5)
    cos, sin = rope_tables(base.config, positions)
    for index, layer in enumerate(base.layers):
        before = base.layers[max(index - 1, 0)].input_layernorm(x)
        found = predict(jnp.asarray(weights[index]), before, positions, base.config)
        queries = layer.self_attn.project_query(layer.input_layernorm(x), cos, sin)
        expected = np.asarray(queries).reshape(2, 5, 2, 2, 16).mean(axis=3)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)


def test_entries_are_named_after_the_layer_that_computes_them(config: ModelConfig) -> None:
    assert tensor_names(config) == [
        "model.layers.0.self_attn.q_curr_proj.weight",
        "model.layers.0.self_attn.q_future_proj.weight",
        "model.layers.1.self_attn.q_future_proj.weight",
    ]


@pytest.mark.parametrize("name", ["f.safetensors", "f.pt"])
def test_exported_and_read_back(tmp_path: Path, config: ModelConfig, weights: np.ndarray, name: str) -> None:
    export(tmp_path / name, weights, config, step=12, base="someone/model")
    rounded = weights.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(read_weights(tmp_path / name, config), rounded)
    tensors = open_tensors(tmp_path / name).entries
    assert len(tensors) == LAYERS + 1
    assert not tensors[f"model.layers.{LAYERS - 1}.self_attn.q_future_proj.weight"].read().any()
    np.testing.assert_array_equal(
        tensors["model.layers.0.self_attn.q_curr_proj.weight"].read().astype(np.float32), rounded[0].T
    )


def test_metadata(tmp_path: Path, config: ModelConfig, weights: np.ndarray) -> None:
    export(tmp_path / "f.safetensors", weights, config, step=12, base="someone/model")
    export(tmp_path / "f.pt", weights, config, step=12, base="someone/model")
    sidecar = json.loads((tmp_path / "f.json").read_text())
    assert sidecar == open_tensors(tmp_path / "f.pt").metadata
    assert sidecar["step"] == 12
    assert sidecar["base_model_path"] == "someone/model"
    assert sidecar["sparse_config"]["topk"] == config.sparse.topk


def test_a_served_model_has_the_forecast_of_training(tmp_path: Path, config: ModelConfig, weights: np.ndarray) -> None:
    """`q_curr` and `q_future` of the loaded decoder are the trainer's students of the right layers."""
    base = tiny_model(layers=LAYERS)
    description = {
        "model_type": "minicpm", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "scale_emb": 1.0,
        "scale_depth": 1.4, "dim_model_base": 32,
    }  # fmt: skip
    save_hf(base, None, tmp_path / "base", description)
    export(tmp_path / "f.safetensors", weights, config, step=1, base="base")
    served: Decoder = load_model(tmp_path / "base", forecast=tmp_path / "f.safetensors", dtype=jnp.float32)
    assert served.config.sparse == config.sparse
    rounded = read_weights(tmp_path / "f.safetensors", config)
    positions = jnp.arange(40)[None]
    normed = jnp.asarray(np.random.default_rng(0).standard_normal((1, 40, 32)), jnp.float32)
    cos, sin = rope_tables(config, positions)
    for layer in range(LAYERS):
        projections = served.layers[layer].self_attn.project(normed, cos, sin)
        if layer == 0:
            found = np.asarray(projections.q_curr)
            np.testing.assert_allclose(found, predict(rounded[0], normed, positions, config), atol=1e-5)
        if layer + 1 < LAYERS:
            expected = predict(rounded[layer + 1], normed, positions, config)
            np.testing.assert_allclose(np.asarray(projections.q_future), expected, atol=1e-5)


def test_files_that_are_refused(tmp_path: Path, config: ModelConfig, weights: np.ndarray) -> None:
    with pytest.raises(CheckpointError, match=r"has to end in \.safetensors, or in \.pt"):
        check_export(tmp_path / "f.bin", overwrite=False)
    export(tmp_path / "f.pt", weights, config, step=1, base="x")
    with pytest.raises(CheckpointError, match="--overwrite"):
        export(tmp_path / "f.pt", weights, config, step=2, base="x")
    export(tmp_path / "f.pt", weights, config, step=2, base="x", overwrite=True)
    assert open_tensors(tmp_path / "f.pt").metadata["step"] == 2
    with pytest.raises(CheckpointError, match="misshaped"):
        read_weights(tmp_path / "f.pt", tiny_model(layers=LAYERS, num_kv_heads=4).config)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_weights(tmp_path / "missing.pt", config)


class _Loader(pickle.Unpickler):
    """What PyTorch's own loader does with the pickle: the same calls, with these stand-ins for its functions."""

    def find_class(self, module_name: str, global_name: str) -> object:
        return {
            ("torch", "BFloat16Storage"): ml_dtypes.bfloat16,
            ("torch", "FloatStorage"): np.float32,
            ("torch._utils", "_rebuild_tensor_v2"): self.rebuild,
            ("collections", "OrderedDict"): dict,
        }[module_name, global_name]

    def rebuild(self, storage, offset, size, stride, requires_grad, hooks):
        assert (offset, requires_grad, hooks) == (0, False, {})
        return np.lib.stride_tricks.as_strided(storage, size, [s * storage.itemsize for s in stride])

    def persistent_load(self, pid: tuple) -> np.ndarray:
        kind, dtype, key, location, count = pid
        assert (kind, location) == ("storage", "cpu")
        values = np.frombuffer(self.archive.read(f"archive/data/{key}"), dtype)
        assert len(values) == count
        return values

    archive: zipfile.ZipFile


def test_a_torch_file_holds_what_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    content = {
        "step": 70000, "none": None, "flags": [True, False, -3, 2.5], "shape": (2, "é"), "empty": {},
        "tensors": {"a": rng.standard_normal((3, 4, 5)).astype(ml_dtypes.bfloat16), "b": np.ones(2, np.float32)},
    }  # fmt: skip
    write_torch(tmp_path / "x.pt", content)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.read("archive/version") == b"3\n"
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        loader = _Loader(io.BytesIO(archive.read("archive/data.pkl")))
        loader.archive = archive
        found = loader.load()
    for name, value in content["tensors"].items():
        assert found["tensors"][name].dtype == value.dtype
        np.testing.assert_array_equal(found["tensors"].pop(name), value)
    assert found == content | {"tensors": {}}
    with pytest.raises(CheckpointError, match="float64"):
        write_torch(tmp_path / "y.pt", np.zeros(3))
    with pytest.raises(CheckpointError, match="set"):
        write_torch(tmp_path / "y.pt", {"a": {1}})
