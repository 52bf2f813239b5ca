"""The benchmarks' parts: rows and files, chains of calls, sweeps. The times themselves need a GPU."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from sparda_jax.bench import _kernel_cases as cases
from sparda_jax.bench import kernels as bench
from sparda_jax.bench.__main__ import app
from sparda_jax.bench._kernel_cases import Size
from sparda_jax.bench._report import Row, print_rows, write_json
from sparda_jax.bench._timing import Chain
from sparda_jax.pallas_kernels.backend import Backend
from sparda_jax.pallas_kernels.record_copy import unpack_plan
from sparda_jax.pallas_kernels.residency import plan_residency
from sparda_jax.pallas_kernels.sparse_attention import triton as attention_kernels

SMALL = Size(batch=1, context=64 * 200, calls=16, pool_bytes=1 << 20)


def test_time_meets_its_target_from_below_and_rate_from_above() -> None:
    assert Row(name="a", backend="triton", value=9, target=10).met is True
    assert Row(name="a", backend="triton", value=11, target=10).met is False
    assert Row(name="a", backend="triton", value=9).met is None
    assert Row(name="a", backend="triton", unit="GB/s", value=48, target=47).met
    assert not Row(name="a", backend="triton", unit="GB/s", value=46, target=47).met
    assert Row(name="a", backend="triton", error="does not compile", target=10).met is False


def test_ratio_is_of_durations() -> None:
    assert Row(name="a", backend="triton", value=30).times(20) == 1.5
    assert Row(name="a", backend="triton", unit="GB/s", value=20).times(30) == 1.5
    assert Row(name="a", backend="triton", value=30).times(None) is None


def test_json_says_how_and_on_what(tmp_path: Path) -> None:
    row = Row(name="fetch", backend="triton", settings={"batch": 16}, value=48.0, unit="GB/s", floor=54.0, target=47.0)
    write_json(tmp_path / "new" / "rows.json", [row], what="kernels", method="by clock", commit="abc")
    record = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert record["commit"] == "abc"
    assert record["versions"]["jax"] == jax.__version__
    assert record["machine"]["device"] == jax.devices()[0].device_kind
    assert record["command"].startswith("python -m sparda_jax.bench")
    (written,) = record["rows"]
    assert written["met"] is True
    assert (written["name"], written["value"], written["unit"], written["floor"]) == ("fetch", 48.0, "GB/s", 54.0)
    assert {"reference", "target", "backend", "settings"} <= set(written)


def test_commit_is_asked_of_git_and_changes_are_told(tmp_path: Path) -> None:
    write_json(tmp_path / "rows.json", [], what="kernels", method="by clock")
    commit = json.loads((tmp_path / "rows.json").read_text())["commit"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=True, text=True).stdout.strip()
    assert re.fullmatch(rf"{head}( and changes)?", commit)


def test_table_shows_a_failure_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row(name="plan", backend="triton", settings={"batch": 1}, value=12.34, floor=5, target=13),
        Row(name="plan", backend="mosaic_gpu", error="it [does] not compile", target=13),
    ]
    print_rows(rows, Console(width=200, no_color=True))
    shown = capsys.readouterr().out
    assert re.search(r"plan .*triton .*batch=1 .*12.34 µs .*5 .*2.47 .*13 .*yes", shown)
    assert re.search(r"plan .*mosaic_gpu .*failed .*no", shown)
    assert "it [does] not compile" in shown


def test_plan_chain_misses_ten_blocks_a_call() -> None:
    chain = cases.plan(SMALL, partial(plan_residency, backend="reference"))
    # After one round every slot is in use.
    state, _ = jax.jit(chain.calls)(chain.state, chain.shared, chain.inputs)
    step = jax.jit(chain.step)
    for own in chain.inputs:
        state, (slot_ids, plan) = step(state, chain.shared, own)
        counts, _ = unpack_plan(plan, SMALL.segments)
        np.testing.assert_array_equal(counts, cases.MISSES)
        assert np.all(np.asarray(slot_ids) >= 0)


def test_calls_read_different_pages_and_records() -> None:
    _, calls = cases._selection_operands(SMALL, bench.Scorer.FORECAST)
    tables = [np.asarray(own["block_table"]).ravel() for own in calls[:4]]
    assert len(np.unique(np.concatenate(tables))) == 4 * SMALL.batch * SMALL.blocks
    attention = cases.attention(SMALL, lambda **own: own["q"])
    lists = [np.asarray(ids).ravel() for ids in attention.inputs[:4]]
    assert len(np.unique(np.concatenate(lists))) == 4 * SMALL.segments * cases.WIDTH
    assert np.concatenate(lists).max() < attention.shared["slots"].shape[0]


@pytest.mark.parametrize(
    "name", [pytest.param("select+plan forecast", marks=pytest.mark.slow), "attention", "write back"]
)
def test_reference_is_timed_also_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparda_jax.bench._timing.SAMPLES", 1)
    row = bench.measure(name, Backend.REFERENCE, SMALL, {})
    assert row.error is None
    assert row.value is not None
    assert row.value > 0
    assert (row.target, row.reference) == (None, None), "these are for another context"


def test_row_of_what_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(size: Size, backend: Backend) -> Chain:
        raise NotImplementedError(f"no {backend} kernel\nat all")

    monkeypatch.setitem(bench.BENCHMARKS, "plan", dataclasses.replace(bench.BENCHMARKS["plan"], chain=chain))
    row = bench.measure("plan", Backend.TRITON, SMALL, {})
    assert (row.value, row.error) == (None, "NotImplementedError: no triton kernel")


def test_sweep_changes_a_kernels_default_for_a_while() -> None:
    modules = bench._kernel_modules(bench.BENCHMARKS["attention"], Backend.TRITON)
    defaults = inspect.unwrap(attention_kernels.slot_attention).__kwdefaults__
    assert defaults is not None
    before = dict(defaults)
    with bench._defaults(modules, {"part": 17, "slot_attention.num_warps": 2}):
        assert (defaults["part"], defaults["num_warps"]) == (17, 2)
    assert defaults == before


def test_sweeps_are_combined_where_the_kernel_has_them() -> None:
    sweeps = {"part": [4, 6], "num_warps": [4, 8], "ctas": [2]}
    combined = [*bench._combinations(bench.BENCHMARKS["attention"], Backend.TRITON, sweeps)]
    assert len(combined) == 4
    assert {tuple(settings) for settings in combined} == {("part", "num_warps")}
    assert [*bench._combinations(bench.BENCHMARKS["attention"], Backend.REFERENCE, sweeps)] == [{}]


def test_filter_chooses_rows() -> None:
    assert [*bench._chosen(["attention/triton", "fetch/mosaic"])] == [
        ("attention", Backend.TRITON),
        ("fetch", Backend.MOSAIC_GPU),
    ]
    assert {name for name, _ in bench._chosen([""])} == set(bench.BENCHMARKS)


def test_short_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context=4096 is too short"):
        Size(batch=1, context=4096)
    with pytest.raises(ValueError, match="calls=15 are too few: use at least 16"):
        Size(batch=1, context=131072, calls=15)


def test_without_a_gpu_it_says_so() -> None:
    done = CliRunner().invoke(app, ["kernels"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "needs an NVIDIA GPU, and JAX sees none here" in done.output


def test_commands_are_listed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sparda_jax.bench", "kernels", "--help"], capture_output=True, check=True, text=True
    )
    assert {"--batch", "--context", "--filter", "--sweep", "--json"} <= set(re.findall(r"--[a-z]+", done.stdout))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "backend"), [row for row in bench._chosen([""]) if row[1] is not Backend.REFERENCE])
def test_kernels_are_timed_on_a_gpu(name: str, backend: Backend) -> None:
    """Mosaic's are for Hopper. That it runs is tested, how fast is the benchmark's to say."""
    row = bench.measure(name, backend, Size(batch=2, context=bench.CONTEXT), {})
    assert row.error is None
    assert row.value is not None


def test_a_run_that_is_killed_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, backend: Backend, size: Size, settings: dict) -> Row:
        if backend is Backend.TRITON:
            raise KeyboardInterrupt
        return Row(name=name, backend=backend, value=1.0)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "gpu")
    file = tmp_path / "rows.json"
    CliRunner().invoke(app, ["kernels", "--filter", "plan/", "--batch", "1", "--json", str(file)])
    assert [row["backend"] for row in json.loads(file.read_text())["rows"]] == ["reference"]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_a_result_file_as_a_picture(tmp_path: Path) -> None:
    rows = [
        Row(name="fetch", backend="triton", settings={"batch": 16}, value=48.0, unit="GB/s", floor=54.0, target=47.0),
        Row(name="attention", backend="triton", settings={"batch": 1}, value=9.0, floor=1.5, reference=17),
        Row(name="attention", backend="reference", settings={"batch": 1}, error="does not compile"),
    ]
    write_json(tmp_path / "rows.json", rows, what="kernels", method="by clock", commit="abc")
    for name in ("rows.png", "rows.svg"):
        result = CliRunner().invoke(app, ["plot", str(tmp_path / "rows.json"), str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert "2 rows" in result.output
    text = (tmp_path / "rows.svg").read_text()
    assert text.count("<!-- fetch/triton, batch 16: 48 -->") == text.count("<!-- attention/triton, batch 1: 9 -->") == 1
    assert "<!-- target -->" in text
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "message"), [("rows.xyz", "has to end in .png or .svg"), ("missing/rows.png", "can't be written")]
)
def test_a_picture_that_cannot_be_written(tmp_path: Path, name: str, message: str) -> None:
    row = Row(name="fetch", backend="triton", settings={"batch": 16}, value=48.0, unit="GB/s")
    write_json(tmp_path / "rows.json", [row], what="kernels", method="by clock", commit="abc")
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "rows.json"), str(tmp_path / name)])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"rows": [{}]}', "[" * 100_000])
def test_what_is_no_result_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    result = CliRunner().invoke(app, ["plot", str(tmp_path / "rows.json"), str(tmp_path / "rows.png")])
    assert result.exit_code == 2
    assert "rows.json" in result.output


@pytest.mark.parametrize(
    ("of_file", "of_row"),
    [
        ({"machine": None}, {}),
        ({"versions": 1}, {}),
        ({}, {"settings": None}),
        ({}, {"value": float("nan")}),
        ({}, {"value": "much"}),
        ({}, {"unit": []}),
        ({"picture": "map"}, {}),
    ],
)
def test_odd_result_files_are_refused(tmp_path: Path, of_file: dict[str, Any], of_row: dict[str, Any]) -> None:
    file = tmp_path / "rows.json"
    row = Row(name="fetch", backend="triton", settings={"batch": 16}, value=48.0, unit="GB/s")
    write_json(file, [row], what="kernels", method="by clock", commit="abc")
    whole = json.loads(file.read_text())
    file.write_text(json.dumps(whole | {"rows": [whole["rows"][0] | of_row]} | of_file))
    result = CliRunner().invoke(app, ["plot", str(file), str(tmp_path / "rows.png")])
    assert (result.exit_code, "is no result file of a benchmark" in " ".join(result.output.split())) == (2, True)
