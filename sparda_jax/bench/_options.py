"""What the benchmarks' options may be; what they can't be is told in a sentence, before anything is allocated."""

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path

import typer

from sparda_jax.config import ModelConfig
from sparda_jax.shapes import SHAPES


def geometry(shape: str, layers: int | None, *, least_layers: int = 1) -> ModelConfig:
    """The model of ``--shape``, with as many layers as ``--layers`` says, if it says.

    Raises:
        typer.BadParameter: there is no such shape, or it has not so many layers.
    """
    one_of("--shape", shape, SHAPES)
    config = SHAPES[shape]
    if layers is None:
        return config
    if not least_layers <= layers <= config.num_layers:
        raise typer.BadParameter(f"--layers {layers}: give {least_layers} to {config.num_layers}.")
    return dataclasses.replace(config, num_layers=layers)


def one_of(option: str, value: str, known: Collection[str]) -> str:
    """The value, if it is known.

    Raises:
        typer.BadParameter: it is not.
    """
    if value not in known:
        raise typer.BadParameter(f"{option} {value!r}: give one of {', '.join(known)}.")
    return value


def at_least(option: str, value: int, least: int) -> int:
    """The value, if it is large enough.

    Raises:
        typer.BadParameter: it is not.
    """
    if value < least:
        raise typer.BadParameter(f"{option} {value}: it must be at least {least}.")
    return value


def whole_numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Comma-separated whole numbers.

    Raises:
        typer.BadParameter: the text is something else, or a number is too small.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} {text!r}: give whole numbers, separated by commas.") from None
    return [at_least(option, number, least) for number in numbers]


def slots_of(text: str) -> int | None:
    """What ``--slots`` says: a number, or None for ``auto`` and ``least``.

    Raises:
        typer.BadParameter: it says something else.
    """
    if text in ("auto", "least"):
        return None
    if not text.isdecimal() or not int(text):
        raise typer.BadParameter(f"--slots {text!r}: give a positive whole number, auto or least.")
    return int(text)


def check_writable(file: Path | None, option: str = "--json") -> None:
    """Makes the folder of a result file, which is first written when something has been measured.

    Raises:
        typer.BadParameter: it can't be made or written, or the file itself is a folder.
    """
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{option} {file} can't be written: {error.strerror}.") from None
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise typer.BadParameter(f"{option} {file} can't be written: give a file in a folder that can.")
