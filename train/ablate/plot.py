"""A picture of an ablation: what validation measures, the answers with their intervals, and throughput.

``python -m sparda_jax.train.ablate.plot FILE PICTURE`` draws a result file that was written elsewhere.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sparda_jax.bench.plot import check_picture, figure, save

_SHARES = ("teacher_recall", "selector_recall", "student_mass", "hit_rate")


def draw(record: dict[str, Any], picture: Path) -> None:
    """Writes it.

    Args:
        record: of `run_ablation`.

    Raises:
        typer.BadParameter: there is no matplotlib, or the file can't be written.
    """
    drawing, rows = figure(), record["rows"]
    parts = []
    if any("validation" in row for row in rows):
        parts += [_draw_shares, _draw_loss]
    if any(row["answers"] for row in rows):
        parts.append(_draw_answers)
    if "throughput" in record:
        parts.append(_draw_throughput)
    drawing.set_size_inches(4.2 * max(len(parts), 1), 3.8)
    panels = drawing.subplots(1, max(len(parts), 1), squeeze=False)[0]
    for axes, part in zip(panels, parts, strict=False):
        part(axes, record)
    machine = f"{record['machine']['device']}, jax {record['versions'].get('jax')}, {record['date']}"
    drawing.suptitle(f"{record['what']}: {record['asked']['model']}; {machine}", fontsize=9)
    save(drawing, picture)


def _bars(axes: Any, groups: list[str], series: dict[str, list[float | None]], errors: dict[str, Any] | None = None):
    """Bars side by side for each group, a colour for each series; a missing value has none."""
    width = 0.8 / max(len(series), 1)
    for number, (label, values) in enumerate(series.items()):
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(groups))]
        shown = [value if value is not None else float("nan") for value in values]
        bars = None if errors is None else errors[label]
        axes.bar(places, shown, width=width, label=label, color=f"C{number}", yerr=bars, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.legend(fontsize=7, loc="lower right")


def _draw_shares(axes: Any, record: dict[str, Any]) -> None:
    trained = [row for row in record["rows"] if "validation" in row]
    _bars(
        axes,
        [name.replace("_", "\n") for name in _SHARES],
        {row["label"]: [row["validation"].get(name) for name in _SHARES] for row in trained},
    )
    axes.set_ylim(0, 1)
    axes.set_title(f"validation after {trained[0]['steps']} steps, mean of layers", fontsize=8)


def _draw_loss(axes: Any, record: dict[str, Any]) -> None:
    trained = [row for row in record["rows"] if "validation" in row]
    layers = range(len(trained[0]["validation"]["layer_loss"]))
    for number, row in enumerate(trained):
        for when, style in (("begun", ":"), ("validation", "-")):
            label = row["label"] if style == "-" else None
            axes.plot(layers, row[when]["layer_loss"], style, marker=".", color=f"C{number}", label=label)
    axes.set_xticks(layers)
    axes.set_xlabel("layer that is selected for", fontsize=8)
    axes.set_title("published loss (dotted: before training)", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _draw_answers(axes: Any, record: dict[str, Any]) -> None:
    asked = [(cell["kind"], cell["length"]) for cell in record["rows"][0]["answers"]]
    series = {row["label"]: [cell["recall"] for cell in row["answers"]] for row in record["rows"]}
    errors = {row["label"]: _around(row["answers"]) for row in record["rows"]}
    _bars(axes, [f"{kind}\n{length}" for kind, length in asked], series, errors)
    axes.set_ylim(0, 1.02)
    axes.set_title(f"right answers of {record['asked']['prompts']}, 95 % intervals", fontsize=8)


def _around(cells: list[dict[str, Any]]) -> list[list[float]]:
    """How far the interval reaches below and above each recall; rounding must not make that negative."""
    ends = [(cell["recall"] - cell["interval"][0], cell["interval"][1] - cell["recall"]) for cell in cells]
    return [[max(distance, 0.0) for distance in side] for side in zip(*ends, strict=True)]


def _draw_throughput(axes: Any, record: dict[str, Any]) -> None:
    rows = record["throughput"]["rows"]
    settings = list(dict.fromkeys((row["settings"]["batch"], _missing(row)) for row in rows))
    ways = dict.fromkeys(row["name"] for row in rows)
    values = {(row["name"], row["settings"]["batch"], _missing(row)): row["value"] for row in rows}
    _bars(
        axes,
        [f"batch {batch}\n{missing} missing" for batch, missing in settings],
        {way: [values.get((way, *setting)) for setting in settings] for way in ways},
    )
    axes.set_title("decode, tokens/s (8B shape, random weights)", fontsize=8)


def _missing(row: dict[str, Any]) -> str:
    return f"{row['settings']['misses']:.0f}" if row["settings"].get("misses") is not None else "natural"


def main(
    result: Annotated[Path, typer.Argument(help="A file that `python -m sparda_jax.train.ablate --json` wrote.")],
    picture: Annotated[Path, typer.Argument(help="Where the picture goes: .png or .svg.")],
) -> None:
    """Draw the result of an ablation."""
    check_picture(picture)
    try:
        record = json.loads(result.read_text(encoding="utf-8"))
        _ = record["ablation"], [row["answers"] for row in record["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"{result} is no result file of an ablation: {error}") from None
    draw(record, picture)


if __name__ == "__main__":
    typer.run(main)
