"""A conversion keeps every bit, appears whole or not at all, and what it wrote loads as the source does."""

import hashlib
import json
import os
import shutil
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from sparda_jax.checkpoint import CheckpointError, load_model, open_weights, save_hf, store
from sparda_jax.checkpoint.conversion import convert_checkpoint, export_forecast
from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder

from .checkpoints import (
    BFLOAT16,
    SPECIAL_BITS,
    base_shapes,
    bits,
    config,
    forecast_shapes,
    random_tensors,
    write_forecast,
    write_hf,
)

DATA = Path(__file__).parent.parent / "data"
Q_CURR = "model.layers.0.self_attn.q_curr_proj.weight"
LAST_Q_FUTURE = "model.layers.2.self_attn.q_future_proj.weight"


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    weights = open_weights(folder, check_hashes=True)
    parts: dict[str, np.ndarray] = {}
    for item in weights.items:
        values = weights.read_item(item)
        for parameter in weights.of_item(item):
            parts |= parameter.split(values[parameter.path])
    return parts


def assert_same_bits(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert value.shape == second[name].shape, name
        assert bits(value) == bits(second[name]), name


def assert_same_model(first: Decoder, second: Decoder) -> None:
    assert first.config == second.config
    pairs = zip(nnx.to_flat_state(nnx.state(first)), nnx.to_flat_state(nnx.state(second)), strict=True)
    for (path, value), (other_path, other) in pairs:
        assert path == other_path
        assert value[...].dtype == other[...].dtype
        assert np.array_equal(np.asarray(value[...]), np.asarray(other[...])), path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "source", random_tensors(base_shapes()), config(), shards=3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)])
def test_every_bit_survives(tmp_path: Path, tied: bool, dtype: np.dtype) -> None:
    generator = np.random.default_rng(0)
    bytes_of = {
        n: generator.integers(0, 256, (*s, dtype.itemsize), np.uint8) for n, s in base_shapes(tied=tied).items()
    }
    tensors = {name: value.view(dtype)[..., 0] for name, value in bytes_of.items()}
    write_hf(tmp_path / "source", tensors, config(tie_word_embeddings=tied), shards=2)
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert_same_bits(stored_tensors(tmp_path / "out"), tensors)


def test_special_values_survive_the_conversion_and_the_load(tmp_path: Path) -> None:
    tensors = random_tensors(base_shapes())
    for name, value in tensors.items():
        value.view(np.uint16).flat[: SPECIAL_BITS.size] = SPECIAL_BITS
        if name.endswith("up_proj.weight"):
            value.view(np.uint16)[...] = 0x8000  # all -0: must not come back as the storage's fill value 0
    write_hf(tmp_path / "source", tensors, config())
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert_same_bits(stored_tensors(tmp_path / "out"), tensors)
    for path in ("source", "out"):
        model = load_model(tmp_path / path, dtype=jnp.bfloat16)
        assert bits(np.asarray(model.embed_tokens[...])) == bits(tensors["model.embed_tokens.weight"])
        down = np.asarray(model.layers[1].mlp.down_proj.kernel[...])
        assert bits(down.T) == bits(tensors["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_converted_and_source_load_as_the_same_model(source: Path, tmp_path: Path, dtype: Any) -> None:
    forecast = write_forecast(tmp_path / "f.safetensors", random_tensors(forecast_shapes(), seed=1))
    convert_checkpoint(source, tmp_path / "out", forecast=forecast)
    assert_same_model(
        load_model(tmp_path / "out", dtype=dtype, require_forecast=True),
        load_model(source, dtype=dtype, forecast=forecast, require_forecast=True),
    )


def test_a_relative_path_will_do(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    convert_checkpoint(Path(os.path.relpath(source)), Path("out"))
    assert_same_model(load_model(Path("out"), dtype=jnp.bfloat16), load_model(source, dtype=jnp.bfloat16))


def test_default_dtype_on_a_cpu_is_float32(source: Path) -> None:
    model = load_model(source, device=jax.devices("cpu")[0])
    assert model.embed_tokens[...].dtype == jnp.float32
    assert model.embed_tokens[...].devices() == {jax.devices("cpu")[0]}


def test_loaded_weights_do_not_follow_the_file(source: Path) -> None:
    model = load_model(source, dtype=jnp.bfloat16)
    before = np.array(model.norm.weight[...])
    for path in source.glob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(-4096, os.SEEK_END)
            file.write(b"\0" * 4096)
    assert np.array_equal(np.asarray(model.norm.weight[...]), before)


def test_the_manifest_says_where_everything_came_from(tmp_path: Path) -> None:
    tensors = random_tensors(base_shapes()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    source = tmp_path / "models--openbmb--MiniCPM4.1-8B" / "snapshots" / "0123abcd"
    write_hf(source, tensors, config(sparse_config={"window_size": 512, "topk": 16}), shards=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (source / name).write_text("{}")
    convert_checkpoint(source, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["source"] == {"name": "openbmb/MiniCPM4.1-8B", "revision": "0123abcd"}
    assert manifest["dropped"] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert manifest["sparse_config"]["window_size"] == 512
    assert manifest["config"] == config(sparse_config={"window_size": 512, "topk": 16})
    assert manifest["forecast"] is None
    record = manifest["tensors"]["model.norm.weight"]
    assert record["sha256"] == hashlib.sha256(bits(tensors["model.norm.weight"])).hexdigest()
    assert (record["shape"], record["dtype"]) == ([64], "bfloat16")
    copied = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert copied == {
        *("config.json", "generation_config.json", "manifest.json"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }


def test_forecast_of_the_trainer_is_imported_and_exported(source: Path, tmp_path: Path) -> None:
    manifest = convert_checkpoint(source, tmp_path / "out", forecast=DATA / "torch_trainer.pt")
    assert manifest.forecast is not None
    assert manifest.forecast["step"] == 2000
    assert "optimizer_state_dict" in manifest.forecast["ignored"]
    weights = open_weights(tmp_path / "out")
    assert (weights.config.sparse.window_size, weights.config.sparse.dense_len) == (1024, 4096)
    export_forecast(tmp_path / "out", tmp_path / "back.safetensors")
    sidecar = json.loads((tmp_path / "back.json").read_text())
    assert sidecar["base_model_path"] == "openbmb/MiniCPM4.1-8B"
    assert sidecar["sparse_config"]["window_size"] == 1024
    exported = load_file(tmp_path / "back.safetensors")
    assert exported.keys() == forecast_shapes().keys()
    assert_same_model(
        load_model(source, forecast=tmp_path / "back.safetensors"),
        load_model(source, forecast=DATA / "torch_trainer.pt"),
    )


def test_forecast_columns_compute_the_forecast(source: Path, tmp_path: Path) -> None:
    forecast = random_tensors(forecast_shapes(), seed=1)
    model = load_model(source, forecast=write_forecast(tmp_path / "f.safetensors", forecast))
    x = np.random.default_rng(2).standard_normal((1, 5, 64)).astype(np.float32)
    unrotated = jnp.ones((1, 5, 8)), jnp.zeros((1, 5, 8))
    projections = model.layers[0].self_attn.project(jnp.asarray(x), *unrotated)
    for value, name in ((projections.q_curr, Q_CURR), (projections.q_future, Q_CURR.replace("curr", "future"))):
        expected = x @ forecast[name].astype(np.float32).T
        np.testing.assert_allclose(np.asarray(value).reshape(1, 5, -1), expected, atol=1e-5)
    assert model.layers[1].self_attn.project(jnp.asarray(x), *unrotated).q_curr is None


def test_float32_forecast_is_cast_and_a_missing_last_one_is_zero(source: Path, tmp_path: Path) -> None:
    forecast = random_tensors(forecast_shapes(), seed=1, dtype=np.dtype(np.float32))
    del forecast[LAST_Q_FUTURE]
    path = write_forecast(tmp_path / "f.safetensors", forecast | {"other.weight": np.ones(3, np.float32)})
    manifest = convert_checkpoint(source, tmp_path / "out", forecast=path)
    assert manifest.forecast is not None
    assert manifest.forecast["zero_filled"] == (LAST_Q_FUTURE,)
    assert manifest.forecast["ignored"] == ("other.weight",)
    record = manifest.tensors[Q_CURR]
    assert (record.dtype, record.stored_dtype) == ("float32", "bfloat16")
    assert record.sha256 == hashlib.sha256(bits(forecast[Q_CURR])).hexdigest()
    stored = stored_tensors(tmp_path / "out")
    assert not stored[LAST_Q_FUTURE].view(np.uint16).any()
    assert bits(stored[Q_CURR]) == bits(forecast[Q_CURR].astype(BFLOAT16))


def test_forecast_beside_or_among_the_weights_is_found(tmp_path: Path) -> None:
    base, forecast = random_tensors(base_shapes()), random_tensors(forecast_shapes(), seed=1)
    beside = write_hf(tmp_path / "beside", base, config())
    write_forecast(beside / "forecast.safetensors", forecast, sparse_config={"topk": 40})
    assert load_model(beside, require_forecast=True).config.sparse.topk == 40
    among = write_hf(tmp_path / "among", base | forecast, config())
    convert_checkpoint(among, tmp_path / "out")
    assert_same_bits(stored_tensors(tmp_path / "out"), base | forecast)


@pytest.mark.parametrize("has_stored", [False, True])
def test_a_given_forecast_replaces_that_of_a_converted_folder(source: Path, tmp_path: Path, has_stored: bool) -> None:
    old = write_forecast(tmp_path / "old.safetensors", random_tensors(forecast_shapes(), seed=1))
    new = write_forecast(
        tmp_path / "new.safetensors", random_tensors(forecast_shapes(), seed=2), sparse_config={"topk": 40}
    )
    convert_checkpoint(source, tmp_path / "out", forecast=old if has_stored else None)
    assert_same_model(load_model(tmp_path / "out", forecast=new), load_model(source, forecast=new))


def test_export_without_a_forecast_fails(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no Forecast to export"):
        export_forecast(source, tmp_path / "f.safetensors")


def test_a_failure_midway_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_item = store.write_item

    def fail_at_layer_1(folder: Path, item: str, arrays: dict[str, np.ndarray]) -> None:
        if item == "layers.1":
            raise OSError("No space left on device")
        write_item(folder, item, arrays)

    monkeypatch.setattr(store, "write_item", fail_at_layer_1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        convert_checkpoint(source, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.undo()
    convert_checkpoint(source, tmp_path / "out")
    good = stored_tensors(tmp_path / "out")
    monkeypatch.setattr(store, "write_item", fail_at_layer_1)
    with pytest.raises(OSError, match="No space left"):
        convert_checkpoint(source, tmp_path / "out", overwrite=True)
    assert_same_bits(stored_tensors(tmp_path / "out"), good)


def test_a_killed_conversion_does_not_load(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill leaves: the folder under its temporary name, with some items and no manifest."""
    leftover = tmp_path / "leftover"

    def keep_a_copy(folder: Path) -> None:
        shutil.copytree(folder, leftover)
        (leftover / "manifest.json").unlink()

    convert_checkpoint(source, tmp_path / "out", check=keep_a_copy)
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_model(leftover)


def test_existing_folders_are_replaced_only_on_request_and_only_converted_ones(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"out exists; .*--overwrite"):
        convert_checkpoint(source, tmp_path / "out")
    convert_checkpoint(source, tmp_path / "out", overwrite=True)
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match=r"is not replaced: it holds no manifest\.json"):
        convert_checkpoint(source, precious, overwrite=True)
    assert (precious / "letter.txt").read_text() == "dear"
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", "home"}


def test_a_converted_folder_is_no_source(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"out is converted already: serve it as it is .*--forecast"):
        convert_checkpoint(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_source_inside_of_what_is_replaced_stays(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out")
    inner = shutil.copytree(source, tmp_path / "out" / "inner")
    with pytest.raises(CheckpointError, match=r"it holds .*inner, which is read"):
        convert_checkpoint(inner, tmp_path / "out", overwrite=True)
    assert (inner / "config.json").is_file()


def test_a_link_stays_and_its_target_is_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):  # dangling at first
        convert_checkpoint(source, tmp_path / "link", overwrite=True)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "manifest.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real", "source"]


def test_too_small_a_disk_is_seen_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes, its disk has 10 free"):
        convert_checkpoint(source, tmp_path / "out")


def test_a_changed_value_is_found_by_its_hash(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out")
    arrays = store.read_item(tmp_path / "out", "layers.1")
    arrays["layers.1.mlp.down_proj.kernel"].view(np.uint16)[7, 7] ^= 1
    shutil.rmtree(tmp_path / "out" / "weights" / "layers.1")
    store.write_item(tmp_path / "out", "layers.1", arrays)
    load_model(tmp_path / "out")
    message = r"1 problem:\n  changed: model\.layers\.1\.mlp\.down_proj\.weight does not have the hash"
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "out", check_hashes=True)


def _damage_data(out: Path) -> None:
    path = max((out / "weights" / "layers.1").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _edit(out: Path, name: str, **changes: Any) -> None:
    path = out / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_damage_data, r"the item 'layers\.1' cannot be read"),
        (lambda out: shutil.rmtree(out / "weights" / "head"), r"the item 'head' cannot be read"),
        (lambda out: _edit(out, "manifest.json", format_version=2), r"format_version=2, this version .* reads 1"),
        (lambda out: _edit(out, "manifest.json", tensors={}), r"30 problems:\n  missing: model\.embed"),
        (lambda out: _edit(out, "manifest.json", tensors=None), r"manifest\.json is incomplete"),
        (lambda out: _edit(out, "manifest.json", forecast=[]), r"manifest\.json is incomplete \(forecast is neither"),
        (lambda out: (out / "manifest.json").write_text("{"), r"manifest\.json is not valid JSON"),
        (lambda out: _edit(out, "config.json", num_hidden_layers=2), r"unexpected: model\.layers\.2\.input_layernorm"),
        (
            lambda out: _edit(out, "config.json", hidden_size=128),
            r"misshaped: model\.embed_tokens\.weight is \[80, 64\]",
        ),
    ],
)
def test_damaged_folders_do_not_load(source: Path, tmp_path: Path, damage: Any, message: str) -> None:
    convert_checkpoint(source, tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "out")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("has_forecast", [False, True])
def test_save_hf_is_the_inverse_of_load_model(tmp_path: Path, tied: bool, has_forecast: bool) -> None:
    data = config(tie_word_embeddings=tied)
    model_config = ModelConfig.from_hf(data)
    model = Decoder(model_config, has_forecast=has_forecast, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    save_hf(model, tokenizer, tmp_path / "out", data, generation_config={"eos_token_id": [2]})
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == base_shapes(tied=tied).keys()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == data
    assert_same_model(load_model(tmp_path / "out", dtype=jnp.bfloat16, require_forecast=has_forecast), model)
    with pytest.raises(CheckpointError, match="exists"):
        save_hf(model, None, tmp_path / "out", data)


def test_save_hf_refuses_the_config_of_another_model(tmp_path: Path) -> None:
    model = Decoder(ModelConfig.from_hf(config()), has_forecast=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(CheckpointError, match=r"config_json gives embedding_scale=1\.0, the model has 12\.0"):
        save_hf(model, None, tmp_path / "out", config(scale_emb=1))
