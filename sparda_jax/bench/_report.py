"""What every benchmark reports: rows of a table, and a file that says how and on what they were measured."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured number beside what it is to be compared with, all in the same unit.

    Attributes:
        name: what was measured.
        backend: what did it.
        settings: what tells the row from others of the same name.
        value: the measured number; None if it failed.
        unit: of all numbers. More is better of what is per second, less of everything else.
        floor: the bound that the hardware sets.
        reference: what the PyTorch implementation takes on the same machine.
        target: what was aimed at.
        error: why there is no value.
    """

    name: str
    backend: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    value: float | None = None
    unit: str = "µs"
    floor: float | None = None
    reference: float | None = None
    target: float | None = None
    error: str | None = None

    @property
    def more_is_better(self) -> bool:
        return self.unit.endswith("/s")

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        if self.value is None:
            return False
        return self.value >= self.target if self.more_is_better else self.value <= self.target

    def times(self, other: float | None) -> float | None:
        """How many times as long as ``other`` it took, also where the numbers are rates."""
        if self.value is None or other is None:
            return None
        return other / self.value if self.more_is_better else self.value / other


def print_rows(rows: Sequence[Row], console: Console, *, device: str | None = None) -> None:
    """Prints the rows as a table, in their order; ``device``, where another process has measured on one."""
    table = Table(title=device or f"{_device()}, jax {jax.__version__}")
    for heading in ("what", "backend", "settings"):
        table.add_column(heading)
    for heading in ("value", "floor", "x floor", "reference", "x reference", "target", "met"):
        table.add_column(heading, justify="right")
    for row in rows:
        settings = " ".join(f"{key}={value}" for key, value in row.settings.items())
        value = "failed" if row.value is None else f"{row.value:.4g} {row.unit}"
        numbers = (row.floor, row.times(row.floor), row.reference, row.times(row.reference), row.target)
        met = {None: "", True: "yes", False: "no"}[row.met]
        table.add_row(row.name, row.backend, settings, value, *(_short(n) for n in numbers), met)
    console.print(table)
    for row in rows:
        if row.error:
            console.print(f"{row.name}, {row.backend} {row.settings}: {row.error}", markup=False)


def write_json(
    file: Path,
    rows: Sequence[Row],
    *,
    what: str,
    method: str,
    commit: str | None = None,
    device: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Writes the rows with the command, the commit, the machine and the versions; the file is whole at any time.

    Args:
        file: where they go.
        rows: what was measured.
        what, method: sentences about it.
        commit: if left out, git is asked.
        device: if left out, JAX is asked, which takes most of a GPU's memory for this process.
        details: further entries of the file.
    """
    record = (
        header(what=what, method=method, program="bench", commit=commit, device=device)
        | {
            "rows": [dataclasses.asdict(row) | {"met": row.met} for row in rows],
        }
        | dict(details or {})
    )
    write_whole(file, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def header(*, what: str, method: str, program: str, commit: str | None, device: str | None = None) -> dict[str, Any]:
    """What a result file begins with; arguments as of `write_json`, ``program`` is the command of the package."""
    return {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m sparda_jax.{program} {shlex.join(sys.argv[1:])}",
        "commit": commit or _commit(),
        "machine": _machine(device),
        "versions": _versions(),
        "method": method,
    }


def write_whole(file: Path, text: str) -> None:
    """Writes a file that is whole at any time; makes its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.3g}"


def _device() -> str:
    return jax.devices()[0].device_kind


def _ask(*command: str) -> str | None:
    """The first line that a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def _commit() -> str | None:
    commit = _ask("git", "rev-parse", "HEAD")
    return f"{commit} and changes" if commit and _ask("git", "status", "--porcelain") else commit


def _machine(device: str | None) -> dict[str, Any]:
    return {
        "device": device or _device(),
        "driver": _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "system": platform.platform(terse=True),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
