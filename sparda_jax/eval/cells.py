"""Cells of a result (task, length, mode) with a score for each prompt, and the file that they are kept in."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparda_jax.bench._report import header, write_whole
from sparda_jax.config import ConfigError
from sparda_jax.eval.prompting import Prompt, fingerprint
from sparda_jax.eval.scoring import Score
from sparda_jax.eval.statistics import wilson
from sparda_jax.eval.subjects import Answer, Subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The prompts of one task and length, the same for every mode.

    Attributes:
        task, length: what they are; length in tokens, prompt and answer together.
        prompts: of all seeds.
        score: of an answer, from 0 to 1.
    """

    task: str
    length: int
    prompts: Sequence[Prompt]
    score: Score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What one mode made of one job.

    Attributes:
        task, length, mode: which.
        scores: of each prompt, from 0 to 1.
        prompts: fingerprint of the prompts.
        width: blocks that a token of the answers read, per layer and KV head, on average; None: not known.
        prefill_read: share of the visible blocks that the prompts' tokens read; None: not known.
    """

    task: str
    length: int
    mode: str
    scores: tuple[float, ...]
    prompts: str
    width: float | None
    prefill_read: float | None

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, see `wilson`."""
        return wilson(self.mean, len(self.scores))


class Record:
    """The cells found so far, in a file that is whole after each of them; a run that was stopped goes on from there.

    Args:
        file: where they are kept; None: nowhere.
        settings: what the prompts and answers depend on.
        what, method: sentences for the file.
        commit: to record where git can't tell.

    Raises:
        ConfigError: the file is there with other settings, or is no such file.
    """

    def __init__(
        self, file: Path | None, *, settings: Mapping[str, Any], what: str, method: str, commit: str | None
    ) -> None:
        self._file = file
        self._head = header(what=what, method=method, program="eval", commit=commit) | {"settings": dict(settings)}
        self.cells: list[Cell] = []
        if file is not None and file.exists():
            self.cells = _read(file, dict(settings))

    def add(self, cell: Cell) -> None:
        """Keeps a cell and writes the file."""
        self.cells.append(cell)
        self.write({})

    def write(self, summary: Mapping[str, Any]) -> None:
        """Writes the file with what was made of the cells."""
        if self._file is None:
            return
        rows = []
        for cell in self.cells:
            low, high = cell.interval
            shown = {"mean": round(cell.mean, 4), "interval": [round(low, 4), round(high, 4)]}
            rows.append(json.dumps(dataclasses.asdict(cell) | shown))
        # A line for each cell: an entry for each score would make the file unreadable.
        head = json.dumps(self._head | dict(summary), indent=1, ensure_ascii=False).removesuffix("\n}")
        listed = ",\n  ".join(rows)
        write_whole(self._file, f'{head},\n "cells": [\n  {listed}\n ]\n}}\n')

    def find(self, job: Job, mode: str) -> Cell | None:
        """The cell of a job and mode, if it is there.

        Raises:
            ConfigError: it is of other prompts, or another mode's is: they are compared prompt by prompt.
        """
        prints = fingerprint(job.prompts)
        there = [cell for cell in self.cells if (cell.task, cell.length) == (job.task, job.length)]
        if any(cell.prompts != prints for cell in there):
            raise ConfigError(
                f"json={self._file} holds {job.task} at {job.length} tokens of other prompts (another version of the "
                "code, tokenizer or text): give another file"
            )
        return next((cell for cell in there if cell.mode == mode), None)


def _read(file: Path, settings: dict[str, Any]) -> list[Cell]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        there, names = dict(record["settings"]), [field.name for field in dataclasses.fields(Cell)]
        rows: list[dict[str, Any]] = [{name: row[name] for name in names} for row in record["cells"]]
        cells = [_cell_of(row) for row in rows]
        _check_together(cells)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"json={file} is there and is no result of this command: give another file") from error
    for name in sorted(there.keys() | settings.keys()):
        if there.get(name) != settings.get(name):
            raise ConfigError(
                f"json={file} is there with {name}={there.get(name)}, and this run has {settings.get(name)}: give the "
                "same settings to go on, or another file"
            )
    return cells


def _cell_of(row: dict[str, Any]) -> Cell:
    """Raises ValueError or TypeError where the row holds something else than a cell does."""
    scores = tuple(map(_number, row["scores"]))
    if not scores or min(scores) < 0 or max(scores) > 1:
        raise ValueError(f"scores {scores}")
    for name, kind in (("task", str), ("length", int), ("mode", str), ("prompts", str)):
        if not isinstance(row[name], kind):
            raise TypeError(f"{name} {row[name]!r}")
    known: dict[str, Any] = {"scores": scores}
    for name in ("width", "prefill_read"):
        known[name] = None if row[name] is None else _number(row[name])
    return Cell(**(row | known))


def _check_together(cells: Sequence[Cell]) -> None:
    """Raises ValueError where a file, merged by hand, has a cell twice, or modes that were not asked the same."""
    asked: dict[tuple[str, int], tuple[str, int]] = {}
    for cell in cells:
        prompts = (cell.prompts, len(cell.scores))
        if asked.setdefault((cell.task, cell.length), prompts) != prompts:
            raise ValueError(f"{cell.task} at {cell.length} tokens is of unequal prompts")
    if len({(cell.task, cell.length, cell.mode) for cell in cells}) < len(cells):
        raise ValueError("a cell is there twice")


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no finite number")
    return value


def run(
    jobs: Sequence[Job],
    subjects: Mapping[str, Callable[[], Subject]],
    record: Record,
    *,
    shown: Callable[[Job, Cell, Sequence[Answer]], None],
) -> list[Cell]:
    """Every job with every subject, unless the record has it; shorter lengths first.

    Args:
        jobs: what is asked.
        subjects: who is asked, by mode; made when first needed.
        record: keeps the cells.
        shown: is called with each new cell and its answers, before the record keeps it.
    """
    made: dict[str, Subject] = {}
    found: list[Cell] = []
    for length in sorted({job.length for job in jobs}):
        for mode, make in subjects.items():
            for job in (job for job in jobs if job.length == length):
                cell = record.find(job, mode)
                if cell is None:
                    if mode not in made:
                        made[mode] = make()
                    answers = made[mode].answers(job.prompts)
                    cell = _cell(job, mode, answers)
                    shown(job, cell, answers)
                    record.add(cell)
                found.append(cell)
    return found


def _cell(job: Job, mode: str, answers: Sequence[Answer]) -> Cell:
    asked = zip(job.prompts, answers, strict=True)
    widths = [answer.width for answer in answers if answer.width is not None]
    read = [answer.prefill_read for answer in answers if answer.prefill_read is not None]
    return Cell(
        task=job.task,
        length=job.length,
        mode=mode,
        scores=tuple(round(job.score(answer.text, prompt.question.references), 6) for prompt, answer in asked),
        prompts=fingerprint(job.prompts),
        width=sum(widths) / len(widths) if widths else None,
        prefill_read=sum(read) / len(read) if read else None,
    )
