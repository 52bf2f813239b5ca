"""The picture of `bench step`: lanes for computing, copying and waiting, one profile above the other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparda_jax.bench._step_parts import Picture
from sparda_jax.bench._step_profile import Kind
from sparda_jax.bench.plot import figure, save

_COLORS = {
    Kind.PRODUCT: "#4c78a8",
    Kind.ATTENTION: "#f58518",
    Kind.SELECTION: "#54a24b",
    Kind.PLAN: "#b279a2",
    Kind.APPEND: "#9d755d",
    Kind.SMALL: "#9a9a9a",
    Kind.FETCH: "#72b7b2",
}
_WAIT, _IDLE = "#e45756", "#f3c9c9"
_LANES = {"compute": 0.0, "copy": 1.1, "wait": 2.2}
_HEIGHT = 0.8
_ROOM = 0.0043
"""Of the drawn time that a letter of a label needs."""


def draw(pictures: Sequence[tuple[str, Picture]], path: Path, title: str) -> None:
    """Writes the picture: for each name and step three lanes over µs since its first drawn layer began.

    Raises:
        typer.BadParameter: there is no matplotlib, or the file can't be written.
    """
    drawing = figure()
    panels = drawing.subplots(len(pictures), 1, squeeze=False, sharex=True)[:, 0]
    drawing.set_size_inches(12, 1.3 + 1.9 * len(pictures))
    longest = max(end - start for start, end in (picture.span for _, picture in pictures))
    for axes, (name, picture) in zip(panels, pictures, strict=True):
        _lanes(axes, picture, longest)
        axes.set_title(
            f"{name}: {picture.layer_us:.0f} µs a layer, {picture.wait:.0f} of them waiting", fontsize=10, loc="left"
        )
        axes.set_yticks([lane + _HEIGHT / 2 for lane in _LANES.values()], list(_LANES), fontsize=9)
        axes.set_ylim(max(_LANES.values()) + 1, -0.35)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
    panels[-1].set_xlabel("µs", fontsize=9)
    panels[0].set_xlim(-0.005 * longest, 1.005 * longest)
    handles = {kind.value: color for kind, color in _COLORS.items()}
    handles |= {"waits for a fetch": _WAIT, "idle otherwise": _IDLE}
    _legend(drawing, handles)
    drawing.suptitle(title, fontsize=10)
    save(drawing, path)


def _lanes(axes: Any, picture: Picture, longest: float) -> None:
    begin, end = picture.span
    for part in picture.parts:
        fetches = part.kind is Kind.FETCH
        bottom = _LANES["copy" if fetches else "compute"] + part.row * _HEIGHT / 2
        length = part.end - part.start
        # Fetches follow each other closely: a line between them, where kernels of 1 µs would disappear under it.
        line = {"edgecolor": "white", "linewidth": 0.8 if fetches else 0}
        axes.broken_barh([(part.start - begin, length)], (bottom, _HEIGHT / 2), facecolor=_COLORS[part.kind], **line)
        if part.label and length > _ROOM * longest * len(part.label):
            place = (part.start - begin + length / 2, bottom + _HEIGHT / 4)
            axes.text(*place, part.label, ha="center", va="center", fontsize=6, color="white")
    for color, spans in ((_WAIT, picture.waits), (_IDLE, picture.idle)):
        axes.broken_barh(
            [(start - begin, stop - start) for start, stop in spans],
            (_LANES["wait"], _HEIGHT),
            color=color,
            linewidth=0,
        )
    for layer in picture.layers:
        axes.axvline(layer.start - begin, color="black", linewidth=0.6, linestyle=":")
        axes.text(layer.start - begin + 0.003 * longest, -0.1, f"layer {layer.index}", fontsize=8, va="bottom")
    axes.axvline(end - begin, color="black", linewidth=0.6, linestyle=":")


def _legend(drawing: Any, colors: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=name) for name, color in colors.items()]
    drawing.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
