"""Where the numbers of a run go: ``metrics.jsonl``, TensorBoard's event file, and the console."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.event_file import EventFile
from sparda_jax.train.metrics import QUALITY, Record

METRICS_FILE, EVENTS_FOLDER = "metrics.jsonl", "tensorboard"


def read_metrics(file: Path) -> Iterator[Record]:
    """The records of a ``metrics.jsonl``; a last line that a killed process left unfinished is left out.

    Raises:
        TrainingError: there is no such file.
    """
    if not file.is_file():
        raise TrainingError(f"{file} does not exist; give the --out of a run")
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


class RunLog:
    """Takes every record of a run, and draws a progress bar with the time left; a context manager.

    Args:
        out: folder of the run.
        steps: of the whole run.
        console: where to draw.
        print_every: steps between two lines on the console.
    """

    def __init__(self, out: Path, *, steps: int, console: Console, print_every: int) -> None:
        self._out, self._steps, self._print_every = out, steps, print_every
        columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.description}"), console=console)
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self, step: int) -> None:
        """Opens the files. What they say of steps after ``step``, which an interrupted run lost, is removed."""
        file = self._out / METRICS_FILE
        kept = [record for record in read_metrics(file) if record["step"] <= step] if step and file.is_file() else []
        with atomic_file(file, overwrite=True) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._stream = self._opened.enter_context(file.open("a"))
        self._events = self._opened.enter_context(contextlib.closing(EventFile(self._out / EVENTS_FOLDER)))
        self._task = self._progress.add_task("", total=self._steps, completed=step)
        self._opened.enter_context(self._progress)

    def end(self) -> None:
        """Closes the files and leaves the bar as it is."""
        self._opened.close()

    def __call__(self, record: Record) -> None:
        """Files one record."""
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()
        self._events.write(record["step"], dict(_scalars(record)))
        if record["kind"] == "validation":
            self._progress.console.print(validation_table(record))
            return
        self._progress.update(self._task, completed=record["step"], description=f"loss {_loss(record['loss'])}")
        if record["step"] % self._print_every == 0:
            mfu = "" if record["mfu"] is None else f", MFU {_percent(record['mfu'])}"
            self._progress.console.print(
                f"step {record['step']}: loss {_loss(record['loss'])}, recall {_percent(record['teacher_recall'])}, "
                f"gradient {record['grad_norm']:.3g}, {record['tokens_per_s']:.0f} tokens/s{mfu}"
            )


class SilentLog:
    """In place of `RunLog` in the processes that do not write."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begin(self, step: int) -> None: ...

    def end(self) -> None: ...

    def __call__(self, record: Record) -> None: ...


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    """Names and numbers for TensorBoard."""
    for name, value in record.items():
        if name in ("kind", "step"):
            continue
        if isinstance(value, list):
            for layer, number in enumerate(value):
                if number is not None:
                    yield f"{record['kind']}_{name}/{layer}", number
        elif value is not None:
            yield f"{record['kind']}/{name}", value


def validation_table(record: Record) -> Table:
    """Loss and quality of every layer, and on average."""
    columns = ("loss", *QUALITY)
    table = Table(
        "layer", *(name.replace("_", " ") for name in columns), title=f"validation after step {record['step']}"
    )
    rows = [[record[f"layer_{name}"][layer] for name in columns] for layer in range(len(record["layer_loss"]))]
    for label, (loss, *shares) in [*enumerate(rows), ("all", [record[name] for name in columns])]:
        table.add_row(str(label), _loss(loss), *map(_percent, shares))
    return table


def _loss(loss: float | None) -> str:
    """Nothing to tell where no query of the rows had a block to choose."""
    return "-" if loss is None else f"{loss:.4f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
