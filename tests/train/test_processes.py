"""Two processes that share weights train as one process with two devices, and a run goes on on other devices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparda_jax.checkpoint.tensor_files import open_tensors
from sparda_jax.train.log import METRICS_FILE, read_metrics
from tests.train.test_command import ROOT, arguments, call, error_of, folder

__all__ = ["folder"]  # the fixture


def start(folder: Path, out: Path, *more: str, devices: int = 1) -> subprocess.Popen[str]:
    options = ["--micro-batch-size", "2", "--steps", "3", "--save-every", "2", "--seed", "3"]
    export = ["--export-forecast", str(out / "forecast.safetensors"), "--validation-rows", "3"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-m", "sparda_jax.train", *arguments(folder, out, *options, *export, *more)]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_two_processes_train_as_one(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
    running = [start(folder, tmp_path / "two", "--fsdp", "2", *together, str(i)) for i in range(2)]
    printed = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(printed)
    assert "the Forecast of step" in " ".join(printed[0].split())
    assert "validation" not in printed[1]
    alone = start(folder, tmp_path / "one", devices=2)
    text = alone.communicate(timeout=500)[0]
    assert alone.returncode == 0, text

    one, two = (list(read_metrics(tmp_path / name / METRICS_FILE)) for name in ("one", "two"))
    assert [(r["kind"], r["step"]) for r in one] == [(r["kind"], r["step"]) for r in two]
    for a, b in zip(one, two, strict=True):
        assert a["layer_loss"] == pytest.approx(b["layer_loss"], rel=1e-5)
        assert a.get("tokens") == b.get("tokens")
    found, expected = (open_tensors(tmp_path / name / "forecast.safetensors").entries for name in ("two", "one"))
    for name, entry in expected.items():
        np.testing.assert_allclose(
            found[name].read().astype(np.float32), entry.read().astype(np.float32), rtol=0.01, atol=1e-5
        )


@pytest.mark.slow
def test_one_device_goes_on_where_four_stopped(folder: Path, tmp_path: Path) -> None:
    """Weights and tokens were shared out before; the end is that of one device alone, but for rounding."""
    shared = ("--fsdp", "2", "--sequence-shards", "2", "--steps", "2")
    for name, more, devices in (("moved", shared, 4), ("moved", ("--resume", "--overwrite"), 1), ("alone", (), 1)):
        # A constant rate, which does not depend on where a run is to end.
        process = start(folder, tmp_path / name, "--final-learning-rate", "5e-4", *more, devices=devices)
        text = process.communicate(timeout=500)[0]
        assert process.returncode == 0, text
        config = json.loads((tmp_path / name / "config.json").read_text())
        shards = 2 if more is shared else 1
        assert [config[key] for key in ("devices", "fsdp", "sequence_shards")] == [devices, shards, shards]
    moved, alone = (list(read_metrics(tmp_path / name / METRICS_FILE)) for name in ("moved", "alone"))
    assert [(r["kind"], r["step"]) for r in moved if r["step"] == 3] == [("train", 3), ("validation", 3)]
    for a, b in zip(moved[-2:], alone[-2:], strict=True):
        assert a["layer_loss"] == pytest.approx(b["layer_loss"], rel=1e-4)
        assert a["teacher_recall"] == pytest.approx(b["teacher_recall"], abs=2e-3)


def test_numbers_without_a_coordinator_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "need --coordinator" in error_of(call(folder, tmp_path / "out", "--process-id", "1"))
