"""Results: the file that a stopped run goes on from, what it refuses, and the tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sparda_jax.config import ConfigError
from sparda_jax.eval.cells import Cell, Job, Record, run
from sparda_jax.eval.prompting import Prompt, Question
from sparda_jax.eval.scoring import share_matched
from sparda_jax.eval.subjects import Answer, check_width
from sparda_jax.eval.tables import averages, markdown
from sparda_jax.selection import Mode
from tests.eval.support import Known


def job(task: str, length: int, count: int = 4, first: int = 0) -> Job:
    prompts = [
        Prompt(ids=[first + i], question=Question(text="", prefix="", references=(f"x{i}",)), new_tokens=1)
        for i in range(count)
    ]
    return Job(task=task, length=length, prompts=prompts, score=share_matched)


def record(file: Path | None, **settings: Any) -> Record:
    return Record(file, settings=settings, what="w", method="m", commit="c")


def found(record: Record, jobs: Sequence[Job], subjects: dict[str, Known]) -> list[Cell]:
    def ignore(job: Job, cell: Cell, answers: Sequence[Answer]) -> None:
        assert len(answers) == len(job.prompts) == len(cell.scores)

    return run(jobs, {mode: lambda s=subject: s for mode, subject in subjects.items()}, record, shown=ignore)


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "new" / "r.json"
    jobs = [job("a", 20), job("b", 20), job("a", 10)]
    first = {"dense": Known(4, 9.0), "sparse": Known(2, 5.0)}
    part = found(record(file, seeds=[1]), jobs[:2], first)
    assert [(cell.length, cell.mode, cell.task) for cell in part] == [
        (20, "dense", "a"), (20, "dense", "b"), (20, "sparse", "a"), (20, "sparse", "b"),
    ]  # fmt: skip
    later = {"dense": Known(1), "sparse": Known(1)}
    whole = found(record(file, seeds=[1]), jobs, later)
    assert whole[2:] == part
    assert [(cell.length, cell.mode, cell.scores) for cell in whole[:2]] == [
        (10, "dense", (1.0, 0.0, 0.0, 0.0)), (10, "sparse", (1.0, 0.0, 0.0, 0.0)),
    ]  # fmt: skip
    assert [subject.asked for subject in later.values()] == [1, 1]
    kept = json.loads(file.read_text())
    assert kept["settings"] == {"seeds": [1]}
    assert kept["command"].startswith("python -m sparda_jax.eval ")
    assert [(row["task"], row["mean"], row["width"]) for row in kept["cells"][:3]] == [
        ("a", 1.0, 9.0), ("b", 1.0, 9.0), ("a", 0.5, 5.0),
    ]  # fmt: skip
    assert sum('"task"' in line for line in file.read_text().splitlines()) == 6


def test_other_settings_prompts_or_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    found(record(file, samples=4), [job("a", 20)], {"dense": Known(4)})
    with pytest.raises(ConfigError, match=r"samples=4, and this run has 5: give the same"):
        record(file, samples=5)
    with pytest.raises(ConfigError, match=r"a at 20 tokens of other prompts"):
        found(record(file, samples=4), [job("a", 20, first=7)], {"dense": Known(4)})
    with pytest.raises(ConfigError, match=r"a at 20 tokens of other prompts"):
        found(record(file, samples=4), [job("a", 20, first=7)], {"sparse": Known(4)})
    file.write_text("{}")
    with pytest.raises(ConfigError, match="no result of this command"):
        record(file, samples=4)


@pytest.mark.parametrize(
    "damage",
    [
        {"scores": []},
        {"scores": "abc"},
        {"scores": [None]},
        {"scores": [0.5, 7]},
        {"width": "x"},
        {"width": float("inf")},
        {"prefill_read": 10**400},
        {"length": "20"},
    ],
)
def test_damaged_cells_are_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    file = tmp_path / "r.json"
    found(record(file, samples=4), [job("a", 20)], {"dense": Known(4)})
    content = json.loads(file.read_text())
    for damaged in (content | {"cells": [content["cells"][0] | damage]}, content | {"settings": [1]}):
        file.write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match="no result of this command"):
            record(file, samples=4)


@pytest.mark.parametrize("change", [{}, {"mode": "sparse", "prompts": "x"}, {"mode": "sparse", "scores": [1.0]}])
def test_cells_that_do_not_belong_together_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """A file merged from two: a cell twice, other prompts, fewer of them."""
    file = tmp_path / "r.json"
    found(record(file, samples=4), [job("a", 20)], {"dense": Known(4)})
    content = json.loads(file.read_text())
    content["cells"].append(content["cells"][0] | change)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="no result of this command"):
        record(file, samples=4)


def test_unequal_widths_are_refused() -> None:
    check_width([24.0, 24.0], 24, 40, Mode.SPARSE)
    check_width([40.0], 24, 40, Mode.DENSE)
    check_width([20.0], 24, 20, Mode.SPARSE)  # a prompt of fewer blocks than the width
    with pytest.raises(ConfigError, match=r"mode=quest read 23\.5 to 24 blocks a token, and 24 are selected"):
        check_width([23.5, 24.0], 24, 40, Mode.QUEST)


def test_tables() -> None:
    jobs = [job(task, length) for length in (10, 20) for task in ("a", "b")]
    cells = found(record(None), jobs, {"dense": Known(4, 9.0), "sparse": Known(2, 5.0)})
    rows = averages(cells, "sparse")
    assert [(row["length"], row["mode"], row["mean"], row["minus"], row["width"]) for row in rows] == [
        (length, mode, mean, minus, width)
        for length in (10, 20, None)
        for mode, mean, minus, width in (("dense", 1.0, 0.5, 9.0), ("sparse", 0.5, 0.0, 5.0))
    ]
    low, high = rows[0]["minus_interval"]
    assert 0 < low < 0.5 < high < 1
    lines = markdown(cells, "sparse").splitlines()
    assert lines[2] == "| mode | 10 | 20 | all | blocks a token |"
    assert lines[4].startswith("| `dense` | 100.0 (100-100), +50.0 (+")
    assert lines[4].endswith("| 9 |")
    assert lines[5].startswith("| `sparse` | 50.0 (")
    assert "| mode | a | b |" in lines
    assert "| `sparse` | 50 (15-85) | 50 (15-85) |" in lines


def test_a_mode_without_all_cells_has_no_average_there() -> None:
    """An average over fewer lengths or tasks would stand beside those of other modes as if it were one of them."""
    jobs = [job(task, length) for length in (10, 20) for task in ("a", "b")]
    cells = found(record(None), jobs, {"dense": Known(4, 9.0), "sparse": Known(2, 5.0)})
    cells = [cell for cell in cells if (cell.mode, cell.length, cell.task) != ("dense", 20, "b")]
    assert [(row["length"], row["mode"]) for row in averages(cells, "sparse")] == [
        (10, "dense"), (10, "sparse"), (20, "sparse"), (None, "sparse")
    ]  # fmt: skip
    lines = markdown(cells, "sparse").splitlines()
    assert lines[4].endswith(" |  |  | 9 |")
    assert "| `dense` | 100 (51-100) |  |" in lines[-4:]
