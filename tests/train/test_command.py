"""``python -m sparda_jax.train`` from files to a Forecast that serves, and every way in which it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from sparda_jax.checkpoint import load_model
from sparda_jax.checkpoint.tensor_files import open_tensors
from sparda_jax.config import ModelConfig
from sparda_jax.library import SparDA
from sparda_jax.train.__main__ import app
from sparda_jax.train.forecast import query_weights, read_weights
from sparda_jax.train.log import METRICS_FILE, read_metrics
from sparda_jax.train.metrics import Record
from tests.serve.tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[2]
SPARSE = {"init_blocks": 1, "window_size": 64, "topk": 4, "dense_len": 256}
WORDS = "the special magic number for quick brown fox is hello world there what user grass green sky blue sun".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context of 1024 tokens, and texts of 100 to 600 words."""
    folder = tmp_path_factory.mktemp("train")
    write_checkpoint(folder, sparse_config=SPARSE)
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, rng.integers(100, 600)))}) for _ in range(30)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    given = ["--model", str(folder / "tiny"), "--data", str(folder / "texts.jsonl"), "--out", str(out)]
    return [*given, "--cache", str(folder / "tokens"), "--seq-len", "512", "--batch-size", "2", *more]


def call(folder: Path, out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, arguments(folder, out, *more))


def error_of(result: Result) -> str:
    """The one line that a refused command prints."""
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


class TestWholeRun:
    def test_from_text_to_a_served_forecast(self, folder: Path, tmp_path: Path) -> None:
        out, target = tmp_path / "out", tmp_path / "forecast.safetensors"
        result = call(folder, out, "--steps", "4", "--save-every", "2", "--export-forecast", str(target))
        assert result.exit_code == 0, result.output
        records = list(read_metrics(out / METRICS_FILE))
        expected = [
            ("validation", 0),
            ("train", 1),
            ("train", 2),
            ("validation", 2),
            ("train", 3),
            ("train", 4),
            ("validation", 4),
        ]
        assert [(r["kind"], r["step"]) for r in records] == expected
        assert json.loads((out / "config.json").read_text())["steps"] == 4
        sidecar = json.loads(target.with_suffix(".json").read_text())
        losses = {r["step"]: r["loss"] for r in records if r["kind"] == "validation" and r["step"]}
        assert sidecar["step"] == min(losses, key=losses.__getitem__)
        assert sidecar["base_model_path"] == "tiny"
        served = SparDA.from_pretrained(folder / "tiny", mode="sparda", forecast=target)
        assert served.generate([" ".join(WORDS * 20)], max_new_tokens=4)[0].tokens

        # The finished run trains no more, and gives the same Forecast in the other format.
        again = call(
            folder, out, "--steps", "4", "--save-every", "2", "--resume", "--export-forecast", str(tmp_path / "f.pt")
        )
        assert again.exit_code == 0, again.output
        assert list(read_metrics(out / METRICS_FILE)) == records
        assert "nothing to train: 4 steps are done" in again.output
        a, b = (open_tensors(path).entries for path in (target, tmp_path / "f.pt"))
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name].read(), b[name].read())

        # A further run can begin with it, and validates as it ended.
        begun = call(folder, tmp_path / "further", "--steps", "1", "--init-forecast", str(tmp_path / "f.pt"))
        assert begun.exit_code == 0, begun.output
        first = next(read_metrics(tmp_path / "further" / METRICS_FILE))
        assert first["loss"] == pytest.approx(min(losses.values()), rel=0.05)

        assert "--resume goes on with it" in error_of(call(folder, out, "--steps", "6"))
        for other in (("--learning-rate", "1e-3"), ("--objective", "blocks")):
            assert "another run" in error_of(call(folder, out, "--steps", "6", "--resume", *other))
        assert "no step 3; there are 2, 4" in error_of(call(folder, out, "--steps", "6", "--resume-step", "3"))
        assert list(read_metrics(out / METRICS_FILE)) == records

    def test_a_separate_validation_set(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "validation.txt").write_text(" ".join(WORDS * 20))
        result = call(folder, tmp_path / "out", "--steps", "1", "--validation", str(tmp_path / "validation.txt"))
        assert result.exit_code == 0, result.output
        assert "validation documents: 1" in " ".join(result.output.split())

    def test_too_few_documents_to_hold_one_out(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "one.txt").write_text(" ".join(WORDS * 20))
        command = arguments(folder, tmp_path / "out", "--steps", "1")
        command[command.index("--data") + 1] = str(tmp_path / "one.txt")
        said = " ".join(CliRunner().invoke(app, command).output.split())
        assert "validation documents: 0 (of ten documents of 193 tokens or more one is held out" in said

    def test_a_layer_on_its_own(self, folder: Path, tmp_path: Path) -> None:
        """From activations that the first of two runs leaves; the other layer stays as it was."""
        kept = tmp_path / "kept"
        runs: list[list[Record]] = []
        exports, files = [], []
        for name in ("first", "second"):
            target = tmp_path / f"{name}.safetensors"
            more = ("--activations", str(kept), "--layers", "1", "--steps", "2", "--export-forecast", str(target))
            result = call(folder, tmp_path / name, *more, "--peak-tflops", "1", "--validation-rows", "1")
            assert result.exit_code == 0, result.output
            runs.append(list(read_metrics(tmp_path / name / METRICS_FILE)))
            exports.append({name: entry.read() for name, entry in open_tensors(target).entries.items()})
            files.append({file: file.stat().st_mtime_ns for file in kept.rglob("*.npy")})
        assert files[0]
        assert files[0] == files[1]
        records, again = runs
        assert [r["layer_loss"] for r in records] == [r["layer_loss"] for r in again]
        assert all(r["layer_loss"][0] is None and r["layer_loss"][1] > 0 for r in records)
        assert 0 < records[-2]["mfu"] < 1
        assert 0 < records[-1]["hit_rate"] <= records[-1]["hit_rate_of_twice"] <= 1
        for name, tensor in exports[0].items():
            np.testing.assert_array_equal(tensor, exports[1][name])
        for file in files[0]:
            file.write_bytes(file.read_bytes()[:90])
        damaged = call(folder, tmp_path / "third", "--activations", str(kept), "--layers", "1", "--steps", "1")
        assert ".npy is damaged: " in error_of(damaged)

        start = query_weights(load_model(folder / "tiny"))
        trained = read_weights(tmp_path / "second.safetensors", ModelConfig.from_pretrained(folder / "tiny"))
        np.testing.assert_array_equal(trained[0], start[0].astype(ml_dtypes.bfloat16).astype(np.float32))
        assert (trained[1] != start[1].astype(ml_dtypes.bfloat16).astype(np.float32)).mean() > 0.5


class TestStopping:
    def test_sigterm_saves_and_exits_in_peace(self, folder: Path, tmp_path: Path) -> None:
        command = [sys.executable, "-W", "error", "-m", "sparda_jax.train"]
        command += arguments(
            folder, tmp_path / "out", "--steps", "100000", "--save-every", "100000", "--validation-rows", "0"
        )
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
            metrics = tmp_path / "out" / METRICS_FILE
            deadline = time.monotonic() + 100
            while not (metrics.is_file() and metrics.read_text().count("\n") > 2):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        steps = [r["step"] for r in read_metrics(metrics)]
        assert steps == list(range(1, len(steps) + 1))
        assert [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()] == [str(steps[-1])]
        assert f"stopped after step {steps[-1]}; --resume goes on from there" in output


class TestRefusals:
    """Each ends in one line that names what is wrong, before anything is trained."""

    def refused(self, folder: Path, tmp_path: Path, *more: str) -> str:
        line = error_of(call(folder, tmp_path / "out", "--steps", "1", *more))
        assert not (tmp_path / "out" / "checkpoints" / "1").exists()
        return line

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--seq-len", "500"], "seq_len=500 must be a multiple of the block size, 64"),
            (["--seq-len", "192"], "seq_len=192 must lie between 193"),
            (["--seq-len", "2048"], "max_position_embeddings=1024"),
            (["--batch-size", "3", "--micro-batch-size", "2"], "micro_batch_size=2 must divide batch_size=3"),
            (["--steps", "0"], "steps=0: it must be at least 1"),
            (["--learning-rate", "nan"], "learning_rate=nan: it must be positive"),
            (["--weight-decay", "-1"], "weight_decay=-1.0: it must not be negative"),
            (["--dtype", "float16"], "--dtype float16: use float32 or bfloat16"),
            (["--export-forecast", "x.bin"], "has to end in .safetensors, or in .pt"),
            (["--resume"], "holds no checkpoint"),
            (["--resume", "--init-forecast", "x.pt"], "can't be combined with --init-forecast"),
            (["--init-forecast", "missing.pt"], "missing.pt does not exist"),
            (["--data", "missing.txt"], "missing.txt does not exist"),
            (["--model", "missing"], "missing is no folder"),
            (["--fsdp", "2"], "fsdp=2 times sequence_shards=1 must divide the number of devices, 1"),
            (["--fsdp", "0"], "fsdp=0: it must be at least 1"),
            (["--sequence-shards", "0"], "sequence_shards=0: it must be at least 1"),
            (["--sequence-shards", "2", "--seq-len", "320"], "the block size, 64 times 4, since sequence_shards=2"),
            (["--layers", "1"], "--layers needs --activations"),
            (["--activations", "kept", "--layers", "one"], "--layers one: give whole numbers"),
            (["--activations", "kept", "--layers", "1,1"], "layers=(1, 1): name at least one, and each once"),
            (["--activations", "kept", "--layers", "9"], "layers=9: the model has layers 0 to 1"),
            (["--peak-tflops", "0"], "--peak-tflops 0.0: it must be positive"),
        ],
    )
    def test_options(self, folder: Path, tmp_path: Path, more: Sequence[str], message: str) -> None:
        assert message in self.refused(folder, tmp_path, *more)

    def test_texts(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "short.txt").write_text("hello world")
        (tmp_path / "empty.txt").write_text("\n")
        for name, message in (("short", "the longest of 1 documents has"), ("empty", "no text in")):
            command = arguments(folder, tmp_path / "out")
            command[command.index("--data") + 1] = str(tmp_path / f"{name}.txt")
            assert message in error_of(CliRunner().invoke(app, command))

    def test_files_that_the_export_would_replace(self, folder: Path, tmp_path: Path) -> None:
        """The sidecar, too, before hours of training."""
        (tmp_path / "f.json").write_text("{}")
        (tmp_path / "folder.pt").mkdir()
        export = ("--export-forecast", str(tmp_path / "f.safetensors"))
        assert "f.json exists; give another name" in self.refused(folder, tmp_path, *export)
        for_folder = ("--overwrite", "--export-forecast", str(tmp_path / "folder.pt"))
        assert "folder.pt is a folder" in self.refused(folder, tmp_path, *for_folder)

    def test_nothing_is_made_where_there_is_nothing_to_resume(self, folder: Path, tmp_path: Path) -> None:
        assert "or name the --out of a run" in self.refused(folder, tmp_path, "--resume")
        assert not (tmp_path / "out").exists()

    def test_a_model_without_weights(self, folder: Path, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, sparse_config=SPARSE)
        (tmp_path / "tiny" / "model.safetensors").unlink()
        assert "holds no weights" in self.refused(folder, tmp_path, "--model", str(tmp_path / "tiny"))

    def test_a_tokenizer_of_another_model(self, folder: Path, tmp_path: Path) -> None:
        write_checkpoint(tmp_path, sparse_config=SPARSE, vocab_size=300)
        assert "it belongs to another model" in self.refused(folder, tmp_path, "--model", str(tmp_path / "tiny"))

    def test_a_model_with_nothing_to_choose(self, folder: Path, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        assert "would have nothing to choose" in self.refused(folder, tmp_path, "--model", str(tmp_path / "tiny"))

    def test_curves_without_matplotlib(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert "curves need matplotlib" in self.refused(folder, tmp_path, "--plot")
