"""The logit check passes a right conversion and catches the mistakes that keep every shape and hash."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.checkpoint import CheckpointError, mapping
from sparda_jax.checkpoint.conversion import convert_checkpoint
from sparda_jax.checkpoint.reference import numpy_logits, transformers_logits
from sparda_jax.checkpoint.tensor_files import open_tensors
from sparda_jax.checkpoint.verify import verify
from sparda_jax.config import ModelConfig

from .checkpoints import base_shapes, config, forecast_shapes, random_tensors, write_forecast, write_hf

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 512,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "source", random_tensors(base_shapes()), config(rope_scaling=LONGROPE), shards=2)


@pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, 2e-5), (jnp.bfloat16, 0.2)])
def test_a_right_conversion_agrees(source: Path, tmp_path: Path, dtype: Any, limit: float) -> None:
    forecast = write_forecast(tmp_path / "f.safetensors", random_tensors(forecast_shapes(), seed=1))
    convert_checkpoint(source, tmp_path / "out", forecast=forecast)
    calls: list[tuple[int, int]] = []
    result = verify(
        source, tmp_path / "out", dtype=dtype, use_reference="numpy", progress=lambda *call: calls.append(call)
    )
    assert 0 < result.max_difference < limit
    assert result.last_difference <= result.max_difference
    assert result.top1_agreement > 0.9
    assert calls[-1] == (5, 5)


def test_a_minicpm41_shaped_model_of_four_layers_agrees(tmp_path: Path) -> None:
    """The published model's heads (32 query, 2 KV) and a tied head, scaled down."""
    data = config(
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        bos_token_id=1,
    )
    shapes = base_shapes(tied=True, layers=4)
    for name in shapes:
        if "self_attn" in name:
            rows = {"q": (256, 64), "k": (16, 64), "v": (16, 64), "o": (64, 256)}
            shapes[name] = rows[name.split(".")[-2][0]]
    write_hf(tmp_path / "source", random_tensors(shapes), data)
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    result = verify(tmp_path / "source", tmp_path / "out", use_reference="numpy")
    assert result.top1_agreement == 1.0


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("mlp.gate_up_proj.kernel", ("mlp.up_proj.weight", "mlp.gate_proj.weight")),
        ("self_attn.qkvf_proj.kernel", tuple(f"self_attn.{name}_proj.weight" for name in "qvk")),
        ("input_layernorm.weight", ("post_attention_layernorm.weight",)),
        ("self_attn.o_proj.kernel", ("self_attn.q_proj.weight",)),
    ],
)
def test_tensors_in_the_wrong_place_are_caught(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, names: tuple[str, ...]
) -> None:
    swapped = dict(mapping._LAYER)
    displaced, swapped[path] = swapped[path], names
    for other, old in mapping._LAYER.items():
        if other != path and names[0] in old:
            swapped[other] = tuple(displaced[0] if name == names[0] else name for name in old)
    monkeypatch.setattr(mapping, "_LAYER", swapped)
    convert_checkpoint(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"does not compute what .* does: logits against numpy"):
        verify(source, tmp_path / "out", use_reference="numpy")


def test_a_missing_transpose_is_caught(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = mapping._copy_transposed

    def without_transpose(target: np.ndarray, values: np.ndarray) -> None:
        copy(target, values.T if values.shape[0] == values.shape[1] else values)

    monkeypatch.setattr(mapping, "_copy_transposed", without_transpose)
    convert_checkpoint(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="does not compute what"):
        verify(source, tmp_path / "out", use_reference="numpy")


@pytest.mark.parametrize(
    "change", [{"scale_emb": 11}, {"scale_depth": 1.5}, {"dim_model_base": 17}, {"rope_theta": 9e3}]
)
def test_a_changed_scale_is_caught(source: Path, tmp_path: Path, change: dict[str, float]) -> None:
    convert_checkpoint(source, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match="does not compute what"):
        verify(source, tmp_path / "out", use_reference="numpy")


def test_values_that_are_no_numbers_do_not_pass(tmp_path: Path) -> None:
    tensors = random_tensors(base_shapes())
    tensors["model.norm.weight"][0] = np.nan
    write_hf(tmp_path / "source", tensors, config())
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    with pytest.raises(CheckpointError, match="max abs difference nan"):
        verify(tmp_path / "source", tmp_path / "out", use_reference="numpy")


ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": LONGROPE,
    "longrope stretched": LONGROPE | {"original_max_position_embeddings": 128},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", ROPES)
def test_both_references_agree(tmp_path: Path, rope: str, tied: bool) -> None:
    """The one test that needs an optional package: transformers and torch are no dependencies of this project."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    data = config(rope_scaling=ROPES[rope], tie_word_embeddings=tied)
    entries = open_tensors(write_hf(tmp_path, random_tensors(base_shapes(tied=tied)), data)).entries
    model_config = dataclasses.replace(ModelConfig.from_hf(data), eos_token_ids=())
    tokens = np.random.default_rng(0).integers(0, model_config.vocab_size, 24)
    ours, theirs = (logits(model_config, entries, tokens) for logits in (numpy_logits, transformers_logits))
    np.testing.assert_allclose(theirs, ours, atol=2e-5)
