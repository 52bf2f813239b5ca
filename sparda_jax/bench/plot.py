"""``python -m sparda_jax.bench plot``: a picture of a result file, its numbers beside floors, references, targets."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from sparda_jax.bench._map_plot import MAP, SETTINGS, draw_map

# What tells rows of one name apart at a glance; other settings are in the file.
_SHOWN = ("batch", "misses", "length", "context", "end", "overlap", "rate", "percentile")
_PICTURES = (".png", ".svg")
_MARKS = {"floor": ("|", "black"), "reference": ("x", "C3"), "target": ("D", "C2")}


def plot(
    results: Annotated[list[Path], typer.Argument(help="Files that one benchmark wrote with --json.")],
    picture: Annotated[Path, typer.Argument(help="Where the picture goes: .png or .svg.")],
) -> None:
    """Draw results: a bar for each row, or for `map` lines; marks for floors, the published code, the target."""
    check_picture(picture)
    records = [read_results(file) for file in results]
    rows = [row for record in records for row in record["rows"] if row["value"] is not None]
    if not rows:
        raise typer.BadParameter(f"{', '.join(map(str, results))}: there is no measured row.")
    drawing = figure()
    if {record.get("picture") for record in records} == {MAP}:
        try:
            draw_map(drawing, rows)
        except (KeyError, TypeError, ValueError) as error:
            raise typer.BadParameter(f"{results[0]} is no result of `bench map`: {error}") from None
    else:
        _bars(drawing, rows)
    machines = dict.fromkeys(
        f"{record['machine']['device']}, jax {record['versions'].get('jax')}, {record['date']}" for record in records
    )
    drawing.suptitle(f"{records[0]['what']}: {'; '.join(machines)}", fontsize=10)
    save(drawing, picture)
    typer.echo(f"{picture}: {len(rows)} rows")


def read_results(file: Path) -> dict[str, Any]:
    """A file that a benchmark wrote.

    Raises:
        typer.BadParameter: it is none, or can't be read.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        _check(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise typer.BadParameter(f"{file} is no result file of a benchmark: {error}") from None
    return record


def _check(record: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError where something is not there that every result file has."""
    _ = record["what"], record["date"], record["machine"]["device"], dict(record["versions"])
    for row in record["rows"]:
        _ = hash((row["name"], row["backend"], row["unit"])), dict(row["settings"])
        if row["value"] is not None:
            finite(row["value"])
        if record.get("picture") == MAP:
            _ = [row["settings"][key] for key in SETTINGS]


def finite(value: Any) -> float:
    """A number of a result file, which may hold NaN.

    Raises:
        TypeError, ValueError: it is none, or not finite.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not finite")
    return number


def _bars(drawing: Any, rows: list[dict[str, Any]]) -> None:
    """A panel for each unit."""
    units = sorted({row["unit"] for row in rows})
    panels = drawing.subplots(
        len(units), 1, squeeze=False, height_ratios=[sum(row["unit"] == unit for row in rows) + 1 for unit in units]
    )
    drawing.set_size_inches(9, 1.5 + 0.28 * len(rows) + 0.6 * len(units))
    for axes, unit in zip(panels[:, 0], units, strict=True):
        _draw(axes, [row for row in rows if row["unit"] == unit], unit, _varied(rows))
    marks: dict[str, Any] = {}
    for axes in panels[:, 0]:
        handles, names = axes.get_legend_handles_labels()
        marks |= dict(zip(names, handles, strict=True))
    if marks:
        drawing.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=len(marks), fontsize=8)


def check_picture(picture: Path | None) -> None:
    """Refuses a picture of an unknown kind.

    Raises:
        typer.BadParameter: the name has another ending.
    """
    if picture is not None and picture.suffix not in _PICTURES:
        raise typer.BadParameter(f"{picture} has to end in {' or '.join(_PICTURES)}.")


def save(drawing: Any, picture: Path) -> None:
    """Writes a figure.

    Raises:
        typer.BadParameter: it can't be written.
    """
    try:
        drawing.savefig(picture, dpi=130)
    except OSError as error:
        raise typer.BadParameter(f"{picture} can't be written: {error}") from None


def figure() -> Any:
    """An empty matplotlib figure.

    Raises:
        typer.BadParameter: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise typer.BadParameter("plots need matplotlib: pip install matplotlib.") from None
    return Figure(layout="constrained")


def _varied(rows: list[dict[str, Any]]) -> list[str]:
    """Settings of `_SHOWN` that are not the same in all rows."""
    return [key for key in _SHOWN if len({str(row["settings"].get(key)) for row in rows}) > 1]


def _label(row: dict[str, Any], keys: list[str]) -> str:
    backend = "" if row["backend"] == "auto" else f"/{row['backend']}"
    own = {key: row["settings"].get(key) for key in keys}
    settings = "".join(f", {key} {value}" for key, value in own.items() if value is not None)
    return f"{row['name']}{backend}{settings}: {row['value']:.4g}"


def _draw(axes: Any, rows: list[dict[str, Any]], unit: str, keys: list[str]) -> None:
    places = range(len(rows))
    axes.barh(places, [row["value"] for row in rows], color="C0", height=0.6)
    for name, (marker, color) in _MARKS.items():
        points = [(row[name], place) for place, row in zip(places, rows, strict=True) if row.get(name) is not None]
        if points:
            size = 220 if marker == "|" else 30
            axes.scatter(*zip(*points, strict=True), marker=marker, s=size, color=color, label=name, zorder=3)
    axes.set_yticks(places, [_label(row, keys) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit}, {'more' if unit.endswith('/s') else 'less'} is better", fontsize=9)
