"""The commands as a whole: what they print and write, what they refuse."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparda_jax.eval.__main__ import app
from sparda_jax.eval.options import MODES
from sparda_jax.selection import Mode

SHORT = ["--batch", "2", "--modes", "sparse,quest"]


def invoke(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    assert done.exit_code == code, done.output
    return done.output


def test_ruler_writes_tables_and_goes_on(tmp_path: Path) -> None:
    file, table, lines = tmp_path / "r.json", tmp_path / "r.md", tmp_path / "answers.jsonl"
    outputs = ["--json", str(file), "--markdown", str(table), "--answers", str(lines)]
    asked = [
        "ruler",
        "--lengths",
        "2048",
        "--samples",
        "1",
        "--seeds",
        "1,2,1",
        "--tasks",
        "niah_single_1",
        *SHORT,
        *outputs,
    ]
    printed = invoke(*asked)
    assert "2048 sparse niah_single_1: 100.0 % (34-100), 24.00 blocks a token" in printed
    assert table.read_text() in printed
    kept = json.loads(file.read_text())
    assert [(cell["mode"], len(cell["scores"]), cell["width"]) for cell in kept["cells"]] == [
        ("sparse", 2, 24.0), ("quest", 2, 24.0),
    ]  # fmt: skip
    assert kept["cells"][0]["prompts"] == kept["cells"][1]["prompts"]
    # Quest reads everything in the prompt.
    assert kept["cells"][0]["prefill_read"] < kept["cells"][1]["prefill_read"] == 1.0
    assert kept["baseline"] == "sparse"
    assert [row["mode"] for row in kept["averages"]] == ["sparse", "quest"]
    settings = {"samples": 1, "seeds": [1, 2], "dense_len": -1, "selected_blocks": 24, "template": "chat"}
    assert settings.items() <= kept["settings"].items()
    answers = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["mode"] for line in answers] == ["sparse", "sparse", "quest", "quest"]
    assert all(line["references"][0] in line["answer"] for line in answers[:2])
    # Nothing is asked again.
    again = invoke(*asked)
    assert "niah_single_1:" not in again
    assert json.loads(file.read_text())["cells"] == kept["cells"]
    assert "samples=1, and this run has 3" in invoke(*asked, "--samples", "3", code=2)
    # The file's comparisons stay when one mode is asked alone.
    invoke(*asked, "--modes", "quest")
    after = json.loads(file.read_text())
    assert (after["baseline"], after["averages"]) == (kept["baseline"], kept["averages"])


@pytest.mark.slow
def test_needle_draws_depths_and_lengths(tmp_path: Path) -> None:
    file, picture = tmp_path / "n.json", tmp_path / "n.png"
    printed = invoke(
        "needle",
        "--lengths",
        "2048,2000",
        "--depths",
        "2",
        "--samples",
        "1",
        *SHORT,
        "--json",
        str(file),
        "--plot",
        str(picture),
    )
    assert "| mode | 0 % | 100 % |" in printed
    cells = json.loads(file.read_text())["cells"]
    assert {(cell["length"], cell["mode"], cell["task"]) for cell in cells} == {
        (length, mode, depth) for length in (2000, 2048) for mode in ("sparse", "quest") for depth in ("0 %", "100 %")
    }
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_longbench_reads_its_files(tmp_path: Path) -> None:
    row = {"context": "The key is 42. " * 30, "input": "What is the key?", "answers": ["42"]}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
    options = ("--lengths", "512", "--batch", "1", "--modes", "dense", "--json", str(tmp_path / "r.json"))
    printed = invoke("longbench", str(tmp_path), "--tasks", "hotpotqa", *options)
    assert "| mode | hotpotqa |" in printed
    assert json.loads((tmp_path / "r.json").read_text())["what"] == "LongBench"
    assert "narrativeqa.jsonl can't be read" in invoke(
        "longbench", str(tmp_path), "--tasks", "narrativeqa", "--modes", "dense", code=2
    ).replace("\n", "")
    assert "HELMET" in invoke("helmet", "--help")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--modes", "sparse,best"), "--modes 'best': give one of dense, sparse"),
        (("--tasks", "niah"), "--tasks 'niah': give one of niah_single_1"),
        (("--template", "llama"), "--template 'llama': give one of chat, minicpm4, plain"),
        (("--lengths", "4k"), "--lengths '4k': give whole numbers"),
        (("--samples", "0"), "--samples 0: it must be at least 1"),
        (("--lengths", "100", "--modes", "dense"), "at length=100: the smallest prompt takes"),
        (("--essays", "absent.txt", "--modes", "dense"), "essays=absent.txt can't be read"),
        (("--markdown", "/", "--modes", "dense"), "--markdown / can't be written"),
        (("--answers", "/", "--modes", "dense"), "--answers / can't be written"),
        (("--url", "localhost"), "begin it with http:// or https://"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str) -> None:
    # Click breaks lines where it likes.
    assert said.replace(" ", "") in "".join(invoke("ruler", *arguments, code=2).replace("│", "").split())


def test_depths_that_would_have_equal_names_are_refused() -> None:
    assert "at most 101" in invoke("needle", "--depths", "102", code=2)


def test_every_mode_but_one_is_compared_by_default() -> None:
    assert set(MODES.split(",")) == {mode.value for mode in Mode} - {"sparda-decode-only"}
