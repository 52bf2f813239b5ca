"""The picture of `bench overlap`: for each mode shared blocks against distance, and hit rates against slots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparda_jax.bench._overlap_rows import MISSING, SHARED
from sparda_jax.bench._report import Row
from sparda_jax.bench.plot import figure, save


def draw(rows: Sequence[Row], picture: Path, title: str) -> None:
    """Writes the picture: a line for each layer, a thick one for all.

    Raises:
        typer.BadParameter: there is no matplotlib, or the file can't be written.
    """
    drawing = figure()
    modes = list(dict.fromkeys(row.backend for row in rows))
    panels = drawing.subplots(len(modes), 2, squeeze=False, sharey="col")
    drawing.set_size_inches(10, 0.5 + 3.2 * len(modes))
    for mode, (left, right) in zip(modes, panels, strict=True):
        mine = [row for row in rows if row.backend == mode]
        _lines(left, [(row, row.settings["distance"], row.value) for row in mine if row.name == SHARED])
        left.set(xlabel="tokens apart", ylabel="shared free blocks", title=mode)
        rates = [(row, row.settings["of_selected"], row.settings["hit_rate"]) for row in mine if row.name == MISSING]
        _lines(right, rates)
        right.set(xlabel="slots over selected blocks", ylabel="hit rate", title=mode)
    drawing.suptitle(title, fontsize=10)
    save(drawing, picture)


def _lines(axes: Any, points: Sequence[tuple[Row, float, float | None]]) -> None:
    for layer in dict.fromkeys(row.settings["layer"] for row, _, _ in points):
        x, y = zip(*((x, y) for row, x, y in points if row.settings["layer"] == layer), strict=True)
        label = {"all": "all layers", "at random": "at random"}.get(layer, f"layer {layer}")
        style = {"color": "black", "linewidth": 2.5} if layer == "all" else {}
        axes.plot(x, y, marker="o", markersize=3, label=label, **style)
    if points:
        ticks = sorted({x for _, x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
