"""Every kind of wrong checkpoint, and the sentence that it gets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sparda_jax.checkpoint import CheckpointError, load_model
from sparda_jax.config import ConfigError

from .checkpoints import (
    BFLOAT16,
    HIDDEN,
    KV_SIZE,
    base_shapes,
    config,
    forecast_shapes,
    random_tensors,
    write_forecast,
    write_hf,
)

Tensors = dict[str, np.ndarray]
ATTENTION = "model.layers.1.self_attn"


def _write(folder: Path, change: Callable[[Tensors], Any], **config_changes: Any) -> Path:
    tensors = random_tensors(base_shapes())
    change(tensors)
    return write_hf(folder, tensors, config(**config_changes))


def _set(name: str, *shape: int, dtype: Any = BFLOAT16) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: np.ones(shape, dtype)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), r"missing: lm_head\.weight \[80, 64\]"),
        (lambda t: t.pop("model.norm.weight"), r"missing: model\.norm\.weight \[64\]"),
        (_set("model.layers.3.mlp.up_proj.weight", 96, 64), r"unexpected: model\.layers\.3\.mlp\.up_proj\.weight"),
        (
            _set(f"{ATTENTION}.k_proj.weight", 64, 64),
            r"misshaped: .*k_proj\.weight is \[64, 64\], the model asks for \[32, 64\]",
        ),
        (_set("model.norm.weight", 64, dtype=np.float64), r"wrong dtype: model\.norm\.weight is F64; only bfloat16"),
        (
            _set(f"{ATTENTION}.k_proj.weight", 32, 64, dtype=np.float32),
            r"wrong dtype: .*q_proj\.weight is bfloat16, .*k_proj",
        ),
        (_set(f"{ATTENTION}.A", 2), r"unsupported: .*self_attn\.A: NOSA's eviction head"),
        (_set(f"{ATTENTION}.delta.weight", 2, 32), r"unsupported: .*self_attn\.delta\.weight: NOSA's eviction head"),
        (_set(f"{ATTENTION}.q_proj.bias", 64), r"unsupported: .*q_proj\.bias: projections with a bias"),
        (_set(f"{ATTENTION}.q_norm.weight", 16), r"unsupported: .*q_norm\.weight: norms of q and k"),
    ],
)
def test_one_wrong_tensor(tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"1 problem:\n  {message}"):
        load_model(_write(tmp_path / "model", change))


def test_all_wrong_tensors_are_listed_at_once(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.0.mlp.gate_proj.weight"]
        tensors["extra"] = np.ones(2, np.float32)
        tensors["model.layers.2.self_attn.o_proj.weight"] = np.ones((3, 3), np.float32)

    with pytest.raises(CheckpointError) as caught:
        load_model(_write(tmp_path / "model", change))
    message = str(caught.value)
    assert "3 problems" in message
    assert all(
        kind in message
        for kind in ("missing: model.layers.0.mlp.gate", "unexpected: extra", "misshaped: model.layers.2")
    )


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model", random_tensors(base_shapes()), config(), shards=2)
    first, second = sorted(folder.glob("*.safetensors"))
    save_file(load_file(second) | {"model.embed_tokens.weight": load_file(first)["model.embed_tokens.weight"]}, second)
    message = rf"duplicate: model\.embed_tokens\.weight in {first.name} and {second.name}"
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_an_index_that_its_shards_contradict(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model", random_tensors(base_shapes()), config(), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = next(
        file for file in content["weight_map"].values() if file != content["weight_map"]["model.norm.weight"]
    )
    index.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"index: model\.norm\.weight is said to be in .*, which does not hold it"
    ):
        load_model(folder)


def test_an_index_must_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model", random_tensors(base_shapes()), config(), shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of", "../model-00001-of"))
    with pytest.raises(CheckpointError, match=r"names files outside of its folder: \.\./model-00001"):
        load_model(folder)


def test_tied_head(tmp_path: Path) -> None:
    tensors = random_tensors(base_shapes(tied=True))
    table = tensors["model.embed_tokens.weight"]
    tied = config(tie_word_embeddings=True)
    absent = load_model(write_hf(tmp_path / "absent", tensors, tied))
    assert not hasattr(absent, "lm_head")
    load_model(write_hf(tmp_path / "equal", tensors | {"lm_head.weight": table}, tied))
    other = table.copy()
    other[3, 4] = -other[3, 4]
    folder = write_hf(tmp_path / "different", tensors | {"lm_head.weight": other}, tied)
    with pytest.raises(CheckpointError, match=r"tied head: .*lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_model(folder)


def test_rotary_buffers_are_harmless(tmp_path: Path) -> None:
    load_model(_write(tmp_path / "model", _set(f"{ATTENTION}.rotary_emb.inv_freq", 8, dtype=np.float32)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_curr_proj.weight"), r"missing: .*q_curr_proj"),
        (lambda t: t.pop("model.layers.1.self_attn.q_future_proj.weight"), r"missing: .*1\.self_attn\.q_future_proj"),
        (_set("model.layers.7.self_attn.q_future_proj.weight", KV_SIZE, HIDDEN), r"unexpected: .*layers\.7"),
        (_set("model.layers.2.self_attn.q_curr_proj.weight", KV_SIZE, HIDDEN), r"unexpected: .*2\.self_attn\.q_curr"),
        (_set("model.layers.0.self_attn.q_curr_proj.weight", KV_SIZE, 8), r"misshaped: .*q_curr.* is \[32, 8\]"),
    ],
)
def test_a_wrong_forecast(tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    forecast = random_tensors(forecast_shapes())
    change(forecast)
    folder = write_hf(tmp_path / "model", random_tensors(base_shapes()), config())
    with pytest.raises(CheckpointError, match=rf"Forecast f\.safetensors: 1 problem:\n  {message}"):
        load_model(folder, forecast=write_forecast(tmp_path / "f.safetensors", forecast))


def test_a_forecast_that_is_also_among_the_weights_is_a_duplicate(tmp_path: Path) -> None:
    forecast = random_tensors(forecast_shapes())
    folder = write_hf(tmp_path / "model", random_tensors(base_shapes()) | forecast, config())
    with pytest.raises(CheckpointError, match=r"4 problems:\n  duplicate: .* in model\.safetensors and f\.safetensors"):
        load_model(folder, forecast=write_forecast(tmp_path / "f.safetensors", forecast))


def test_a_missing_forecast_says_how_to_get_one(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model", random_tensors(base_shapes()), config())
    with pytest.raises(CheckpointError, match=r"has no Forecast, which mode 'sparda' needs: .*--forecast FILE"):
        load_model(folder, require_forecast=True)


def test_folders_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        load_model(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    with pytest.raises(CheckpointError, match=r"holds no weights; looked for model\.safetensors"):
        load_model(tmp_path)


def test_a_truncated_safetensors_file(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model", random_tensors(base_shapes()), config())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file .* fetch it again"):
        load_model(folder)


def test_single_and_sharded_weights_side_by_side_are_ambiguous(tmp_path: Path) -> None:
    tensors = random_tensors(base_shapes())
    write_hf(tmp_path, tensors, config())
    write_hf(tmp_path, tensors, config(), shards=2)
    with pytest.raises(CheckpointError, match=r"holds both model\.safetensors and model\.safetensors\.index\.json"):
        load_model(tmp_path)
