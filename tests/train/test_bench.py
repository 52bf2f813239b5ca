"""The training benchmark on a toy shape: it measures what its rows say. The times themselves need a GPU."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sparda_jax.config import ModelConfig
from sparda_jax.shapes import SHAPES
from sparda_jax.train.bench.__main__ import app
from sparda_jax.train.flops import Flops, peak_flops
from tests.train.support import tiny_model


def test_a_run_on_a_toy_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SHAPES, "tiny", tiny_model().config)
    file = tmp_path / "train.json"
    options = ["--shape", "tiny", "--seq-len", "512", "--steps", "1", "--json", str(file), "--commit", "none"]
    done = CliRunner().invoke(app, ["train", *options])
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["rows"]
    names = ["micro-step", "micro-step", "update", "base: norm, queries, keys, values", "teacher", "student"]
    assert [row["name"] for row in rows] == [*names, "base: attention", "base: output and MLP"]
    flops = Flops.of(tiny_model().config, np.arange(512))
    rate, spent = rows[:2]
    assert rate["value"] * 1e12 == pytest.approx(flops.total / (spent["value"] / 1e3))
    assert rate["target"] is None
    assert rate["settings"]["mfu"] is None
    parts = [row["floor"] for row in rows[3:]]
    assert sum(parts) == pytest.approx(spent["floor"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-len", "100"], "multiple of 128"),
        (["--devices", "9"], "--devices 9: JAX sees 1"),
        (["--fsdp", "2"], "must divide the number of devices, 1"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, options: list[str], message: str) -> None:
    monkeypatch.setitem(SHAPES, "tiny", tiny_model().config)
    done = CliRunner().invoke(app, ["train", "--shape", "tiny", *options], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert message in done.output


def test_a_large_shape_needs_a_gpu() -> None:
    """It would take all memory of a computer without one, and hours."""
    done = CliRunner().invoke(app, ["train"], env={"COLUMNS": "300"})
    assert (done.exit_code, "needs an NVIDIA GPU" in done.output) == (2, True)


def test_operations_are_those_of_the_specification() -> None:
    """At 64K a layer's teacher takes 35 TFLOP in two products, the linear layers of a pass about 1 PFLOP."""
    config = SHAPES["minicpm4.1-8b"]
    flops = Flops.of(config, np.arange(65536))
    assert flops.teacher / 32 == pytest.approx(35.2e12, rel=1e-2)
    assert flops.products == pytest.approx(0.97e15, rel=1e-2)
    two = Flops.of(config, np.tile(np.arange(32768), 2))
    assert two.teacher == pytest.approx(flops.teacher / 2, rel=1e-3)
    assert two.products == flops.products


def test_operations_of_a_small_model_by_hand() -> None:
    config: ModelConfig = dataclasses.replace(tiny_model().config, num_layers=2)
    flops = Flops.of(config, np.arange(3))
    # Hidden 32, MLP 48, 4 query and 2 KV heads of 16; tokens see 1, 2 and 3 keys, and one window.
    assert flops.products == 2 * 3 * (2 * 32 * (64 + 64) + 32 * (64 + 3 * 48))
    assert flops.attention == 4 * 64 * 6
    assert flops.teacher == 2 * 4 * 64 * 6
    assert flops.student == 2 * 4 * 32 * (32 * 3 + 3)
    assert (flops + flops).total == 2 * flops.total


def test_peaks() -> None:
    @dataclasses.dataclass(frozen=True)
    class Device:
        device_kind: str

    assert peak_flops([Device("NVIDIA H200")] * 2) == 2 * 989e12
    assert peak_flops([Device("NVIDIA H200"), Device("cpu")]) is None
