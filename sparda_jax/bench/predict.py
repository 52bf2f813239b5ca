"""``python -m sparda_jax.bench predict``: the throughput that measured hit rates stand for, by what a map measured."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from sparda_jax.bench._decode_cases import WAYS
from sparda_jax.bench._map_parts import LINK
from sparda_jax.bench._map_points import PAPER_CONTEXT, Curve
from sparda_jax.bench._options import one_of
from sparda_jax.bench._overlap_rows import SCALES
from sparda_jax.bench.plot import finite, read_results
from sparda_jax.cache.host_dtype import KvHostDtype

console = Console(soft_wrap=True)
_SELECTED = 96
"""Blocks that the shape of the map selects."""


def predict(
    map_file: Annotated[Path, typer.Argument(help="What `bench map` measured.")] = Path("docs/results/h200-map.json"),
    hit_rates: Annotated[Path, typer.Option(help="What `bench overlap` measured.")] = Path(
        "docs/results/hit-rates.json"
    ),
    way: Annotated[str, typer.Option(help="A way to decode that the map has.")] = "sparda",
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = PAPER_CONTEXT,
) -> None:
    """Predict tokens per second for caches of several sizes: the misses of natural text, the times of a map.

    If a model misses the measured share of its blocks, a step takes what `step_ms` makes of the map's points.
    """
    curve = Curve.read(hit_rates, WAYS[one_of("--way", way, list(WAYS))][0].value)
    points = _points(map_file, way, context)
    table = Table(title=f"{way}, {context} tokens: tokens/s predicted for slots over selected blocks")
    for heading in ("sequences", *(f"{scale:g} x" for scale in SCALES)):
        table.add_column(heading, justify="right")
    missing = [_SELECTED * curve.at(scale) for scale in SCALES]
    table.add_row(f"missing of {_SELECTED}", *(f"{count:.1f}" for count in missing))
    for batch, measured in sorted(points.items()):
        table.add_row(str(batch), *(f"{1e3 * batch / step_ms(measured, count):,.0f}" for count in missing))
    console.print(table)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A point of a map.

    Attributes:
        misses: blocks that a KV head missed in a layer.
        ms: of a step.
        link_ms: for which the copies kept the link busy; all of the step where the link decides its time.
    """

    misses: float
    ms: float
    link_ms: float


def step_ms(measured: Sequence[Measured], misses: float) -> float:
    """Milliseconds of a step that misses so many blocks per KV head and layer.

    A step computes beside its copies, so its time by misses is nearly flat until the link decides and proportional
    from there on. Between two measured points it is the lower of the line through them and of the flat line through
    the two points with the fewest misses; it is at least the link's time, in proportion to that of the last point.

    Args:
        measured: at least two points, by ascending misses, of which no two are equal.
        misses: may lie beyond the last point.
    """
    first, second, last = measured[0], measured[1], measured[-1]
    steepness = (second.ms - first.ms) / (second.misses - first.misses)
    flat = first.ms + steepness * (misses - first.misses)
    between = float(np.interp(misses, [point.misses for point in measured], [point.ms for point in measured]))
    return max(min(between, flat) if misses < last.misses else last.ms, last.link_ms * misses / last.misses)


def _points(file: Path, way: str, context: int) -> dict[int, list[Measured]]:
    """The points by batch.

    Raises:
        typer.BadParameter: the file is no map, or has no batch with three points there, of unequal misses.
    """
    found: dict[int, dict[float, Measured]] = {}
    try:
        for row in read_results(file)["rows"]:
            said: dict[str, Any] = row["settings"]
            if (row["name"], said["context"], said["kv_host_dtype"]) != (way, context, KvHostDtype.AUTO):
                continue
            if said["limit"] is None:  # its profile could not be read, so the link's time is not known
                continue
            link = said["tpot_ms"] if said["limit"] == LINK else said["parts_ms"]["copying"]
            point = Measured(misses=finite(said["misses"]), ms=finite(said["tpot_ms"]), link_ms=finite(link))
            if type(said["batch"]) is not int or said["batch"] < 1 or point.ms <= 0 or min(point.misses, link) < 0:
                raise ValueError(f"a point of batch {said['batch']!r} with {point}")
            # Of points that miss alike (two numbers of slots that both hold every block) the first is enough.
            found.setdefault(said["batch"], {}).setdefault(point.misses, point)
    except (KeyError, TypeError, ValueError) as error:
        raise typer.BadParameter(f"{file} is no result of `bench map`: {error}") from None
    points = {batch: [of[misses] for misses in sorted(of)] for batch, of in found.items() if len(of) > 2}
    if not points:
        raise typer.BadParameter(
            f"{file} has no batch with three numbers of slots that miss differently, for {way} at {context} tokens."
        )
    return points
