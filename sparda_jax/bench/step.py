"""``python -m sparda_jax.bench step``: a picture of a decode step from a profile, and what its layers' time goes to."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sparda_jax.bench._step_parts import Picture, picture
from sparda_jax.bench._step_plot import draw
from sparda_jax.bench._step_profile import Kind, ProfileError, read_profile

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def step(
    profile: Annotated[
        list[Path], typer.Argument(help="What `bench decode --profile` wrote: a row's folder, or a .xplane.pb file.")
    ],
    out: Annotated[Path, typer.Option(help="Where the pictures go; .png and .svg are added.")],
    layers: Annotated[
        str | None, typer.Option(help="The layers to draw, from 0, such as 2-4; the middle three if left out.")
    ] = None,
) -> None:
    """Draw some layers of a decode step: when it computes, copies and waits; several profiles on one time scale."""
    first, last = (None, None) if layers is None else _range(layers)
    pictures, machines = [], []
    for path in profile:
        try:
            found = read_profile(path)
            pictures.append((path.name.removesuffix(".xplane.pb"), picture(found.steps, first, last)))
        except ProfileError as error:
            raise typer.BadParameter(str(error)) from None
        machines.append(found.made_on)
    title = f"Layers of one decode step, profiled: {'; '.join(dict.fromkeys(machines))}"
    for ending in (".png", ".svg"):
        draw(pictures, out.with_name(out.name + ending), title)
    console.print(_table(pictures))


def _range(text: str) -> tuple[int, int]:
    ends = text.split("-")
    if not (len(ends) <= 2 and all(end.isdecimal() for end in ends)):
        raise typer.BadParameter(f"--layers {text!r}: give one layer, or the first and last such as 2-4.")
    return int(ends[0]), int(ends[-1])


def _table(pictures: list[tuple[str, Picture]]) -> Table:
    table = Table(title="µs in a layer, on average over those drawn")
    table.add_column("")
    for name, one in pictures:
        table.add_column(f"{name}, layers {one.layers[0].index} to {one.layers[-1].index}", justify="right")
    lines: dict[str, Callable[[Picture], str]] = {
        kind.value: lambda one, kind=kind: f"{one.per_layer(kind):.1f}" for kind in Kind
    }
    lines |= {
        "any fetch": lambda one: f"{one.fetching:.1f}",
        "waits for a fetch": lambda one: f"{one.wait:.1f}",
        "idle otherwise": lambda one: f"{one.idle_us:.1f}",
        "a layer": lambda one: f"{one.layer_us:.1f}",
        "of the fetches' time, hidden": lambda one: "" if one.hidden is None else f"{one.hidden:.0%}",
        "from step to step, whole": lambda one: "" if one.period is None else f"{one.period:.1f}",
    }
    for name, cell in lines.items():
        table.add_row(name, *(cell(one) for _, one in pictures))
    return table
