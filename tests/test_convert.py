"""The command line of ``python -m sparda_jax.convert``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from sparda_jax.checkpoint import load_model
from sparda_jax.convert import app
from tests.checkpoint.checkpoints import base_shapes, config, forecast_shapes, random_tensors, write_forecast, write_hf

DATA = Path(__file__).parent / "data"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "source", random_tensors(base_shapes()), config(), shards=2)


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_converts_verifies_and_exports(source: Path, tmp_path: Path) -> None:
    trainer, out, back = DATA / "torch_trainer.pt", tmp_path / "out", tmp_path / "back.safetensors"
    output = run(source, out, "--forecast", trainer, "--verify", "--export-forecast", back)
    assert "top-1 agreement 100.0%" in output
    assert "34 tensors, every one accounted for" in output
    assert "Forecast from torch_trainer.pt" in output
    assert "ignored in the Forecast's file: micro_batches_seen" in output
    assert load_file(back).keys() == forecast_shapes().keys()
    load_model(out, require_forecast=True, check_hashes=True)


def test_as_a_module_it_says_what_is_missing(source: Path, tmp_path: Path) -> None:
    (source / "model-00002-of-00002.safetensors").unlink()
    command = [sys.executable, "-m", "sparda_jax.convert", str(source), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"})
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "model-00002-of-00002.safetensors" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_exports_only(source: Path, tmp_path: Path) -> None:
    output = run(source, "--forecast", DATA / "torch_trainer.pt", "--export-forecast", tmp_path / "f.safetensors")
    assert "f.safetensors: the Forecast, with its sparse_config in f.json" in output
    assert json.loads((tmp_path / "f.json").read_text())["step"] == 2000


def test_export_does_not_replace_a_file_unasked(source: Path, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text("mine")
    arguments = (source, "--forecast", DATA / "torch_trainer.pt", "--export-forecast", tmp_path / "f.safetensors")
    assert "f.json exists; give another name" in run(*arguments, code=1)
    assert (tmp_path / "f.json").read_text() == "mine"
    assert not (tmp_path / "f.safetensors").exists()
    run(*arguments, "--overwrite")
    assert json.loads((tmp_path / "f.json").read_text())["step"] == 2000


def test_says_what_was_left_out(tmp_path: Path) -> None:
    tensors = random_tensors(base_shapes(tied=True))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_hf(tmp_path / "source", tensors, config(tie_word_embeddings=True))
    forecast = random_tensors(forecast_shapes())
    del forecast["model.layers.2.self_attn.q_future_proj.weight"]
    path = write_forecast(tmp_path / "f.safetensors", forecast)
    output = run(tmp_path / "source", tmp_path / "out", "--forecast", path)
    assert "left out (not needed): lm_head.weight" in output
    assert "filled with zeros (nothing reads it): model.layers.2.self_attn.q_future_proj.weight" in output


def test_a_failed_check_leaves_no_folder(tmp_path: Path) -> None:
    tensors = random_tensors(base_shapes())
    tensors["model.norm.weight"][:] = float("nan")
    write_hf(tmp_path / "source", tensors, config())
    assert "does not compute what" in run(tmp_path / "source", tmp_path / "out", "--verify", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SRC"], "there is nothing to do: give DST"),
        (["SRC", "--verify", "--export-forecast", "f.safetensors"], "--verify compares SRC"),
        (["SRC", "--export-forecast", "f.pt"], "has to end in .safetensors"),
        (["absent", "DST"], "holds no config.json"),
        (["SRC", "DST", "--forecast", "absent.pt"], "absent.pt does not exist"),
        (["SRC", "FULL"], "exists; give another folder, or --overwrite"),
        (["SRC", "FULL", "--overwrite"], "is not replaced: it holds no manifest.json"),
        (["SRC", "SRC", "--overwrite"], "which is read; give another folder"),
    ],
)
def test_wrong_options_end_in_a_sentence(source: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("not a checkpoint")
    places = {"SRC": str(source), "DST": str(tmp_path / "out"), "FULL": str(full)}
    output = run(*(places.get(argument, argument) for argument in arguments), code=1)
    assert output.startswith("error: ")
    assert message in output
