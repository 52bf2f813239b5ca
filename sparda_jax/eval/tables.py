"""Cells as tables: mode x task x length with averages, 95 % intervals and paired differences, in Markdown."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparda_jax.eval.cells import Cell
from sparda_jax.eval.statistics import Estimate, mean_of_tasks


def averages(cells: Sequence[Cell], baseline: str) -> list[dict[str, Any]]:
    """For each length and mode, and for all lengths together, the average over tasks and its difference to a mode's.

    Args:
        cells: of all tasks, lengths and modes.
        baseline: the mode that is compared with, on the same prompts.

    Returns:
        Rows with `length` (None: all), `mode`, `mean`, `interval`, `minus` (the baseline), `minus_interval`, and
        `width`; scores from 0 to 1. None for a mode that lacks cells which another one has there: an average over
        fewer tasks or lengths would be another quantity.
    """
    rows = []
    for length in [*_lengths(cells), *([None] if len(_lengths(cells)) > 1 else [])]:
        here = {(c.mode, c.task, c.length): c for c in cells if length in (None, c.length)}
        asked = {(task, size) for _, task, size in here}
        for mode in _modes(cells):
            mine = [cell for (name, _, _), cell in here.items() if name == mode]
            if {(cell.task, cell.length) for cell in mine} != asked:
                continue
            others = [here.get((baseline, cell.task, cell.length)) for cell in mine]
            paired = [
                np.array(cell.scores) - np.array(other.scores)
                for cell, other in zip(mine, others, strict=True)
                if other is not None
            ]
            widths = [cell.width for cell in mine if cell.width is not None]
            row = {"length": length, "mode": mode, "tasks": len(mine)}
            row |= _rounded("mean", "interval", mean_of_tasks([np.array(cell.scores) for cell in mine]))
            if len(paired) == len(mine):
                row |= _rounded("minus", "minus_interval", mean_of_tasks(paired))
            rows.append(row | {"width": round(sum(widths) / len(widths), 2) if widths else None})
    return rows


def markdown(cells: Sequence[Cell], baseline: str) -> str:
    """Averages by length, then a table of tasks for each length; scores in percent."""
    found = averages(cells, baseline)
    lengths = list(dict.fromkeys(row["length"] for row in found))
    by_place = {(row["mode"], row["length"]): row for row in found}
    lines = [f"Average over tasks in percent (95 %), and the difference to `{baseline}` on the same prompts.", ""]
    lines += _table(
        ["mode", *("all" if length is None else str(length) for length in lengths), "blocks a token"],
        [
            [
                f"`{mode}`",
                *(_average(by_place.get((mode, length)), baseline) for length in lengths),
                _widths([row for row in found if row["mode"] == mode]),
            ]
            for mode in _modes(cells)
        ],
    )
    for length in _lengths(cells):
        here = {(cell.mode, cell.task): cell for cell in cells if cell.length == length}
        tasks = list(dict.fromkeys(task for _, task in here))
        lines += [
            "",
            f"{length} tokens, {len(next(iter(here.values())).scores)} prompts a task, in percent (95 %):",
            "",
        ]
        rows = [[f"`{mode}`", *(_cell(here.get((mode, task))) for task in tasks)] for mode in _modes(cells)]
        lines += _table(["mode", *tasks], rows)
    return "\n".join(lines) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *rows)]


def _lengths(cells: Sequence[Cell]) -> list[int]:
    return sorted({cell.length for cell in cells})


def _modes(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.mode for cell in cells))


def _rounded(name: str, interval: str, found: Estimate) -> dict[str, Any]:
    return {name: round(found.mean, 4), interval: [round(found.low, 4), round(found.high, 4)]}


def _average(row: dict[str, Any] | None, baseline: str) -> str:
    if row is None:
        return ""
    low, high = row["interval"]
    text = f"{100 * row['mean']:.1f} ({100 * low:.0f}-{100 * high:.0f})"
    if row["mode"] == baseline or "minus" not in row:
        return text
    low, high = row["minus_interval"]
    return f"{text}, {100 * row['minus']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _widths(rows: Sequence[dict[str, Any]]) -> str:
    widths = sorted({row["width"] for row in rows if row["width"] is not None})
    return "" if not widths else f"{widths[0]:g}" if len(widths) == 1 else f"{widths[0]:g} to {widths[-1]:g}"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    low, high = cell.interval
    return f"{100 * cell.mean:.0f} ({100 * low:.0f}-{100 * high:.0f})"
