"""The course of a run as a PNG: loss, recall and attention mass over steps. Needs matplotlib (the extra ``plot``)."""

from pathlib import Path
from typing import Any

from sparda_jax.train.errors import TrainingError
from sparda_jax.train.log import METRICS_FILE, read_metrics

_PANELS = {
    "KL per pair": ("loss",),
    "recall of free blocks": ("teacher_recall", "selector_recall"),
    "attention mass of free blocks": ("student_mass", "selector_mass", "teacher_mass"),
    "gradient norm": ("grad_norm",),
}


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainingError(
            "curves need matplotlib, which is not installed: pip install matplotlib, or read metrics.jsonl"
        ) from error
    return Figure(figsize=(12, 8), layout="constrained")


def check_plot() -> None:
    """Refuses what `draw_curves` would, before the work is done.

    Raises:
        TrainingError: matplotlib is not installed.
    """
    _figure()


def draw_curves(out: Path, file: Path) -> None:
    """Draws the metrics of the run in ``out``: lines are training steps, dots validations.

    Raises:
        TrainingError: matplotlib is not installed, or there are no metrics.
    """
    records = list(read_metrics(out / METRICS_FILE))
    figure = _figure()
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        for number, name in enumerate(names):
            for kind, style in (("train", "-"), ("validation", "o")):
                points = [(r["step"], r[name]) for r in records if r["kind"] == kind and r.get(name) is not None]
                if points:
                    label = name.replace("_", " ") if kind == "train" else None
                    axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
        axes.set(title=title, xlabel="step")
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(file, dpi=120)
