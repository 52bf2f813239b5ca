"""``python -m sparda_jax.convert SRC DST``: a Hugging Face checkpoint, checked and stored by tensor with orbax."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from sparda_jax.checkpoint.conversion import convert_checkpoint, export_forecast
from sparda_jax.checkpoint.errors import CheckpointError
from sparda_jax.checkpoint.manifest import Manifest
from sparda_jax.checkpoint.verify import verify as verify_logits
from sparda_jax.config import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_console = Console(stderr=True)


def _check_options(dst: Path | None, export: Path | None, verify: bool, overwrite: bool) -> None:
    if dst is None and export is None:
        raise CheckpointError("there is nothing to do: give DST, the folder to write, or --export-forecast FILE")
    if dst is None and verify:
        raise CheckpointError("--verify compares SRC with what is converted from it, so it needs DST")
    if export is not None and export.suffix != ".safetensors":
        raise CheckpointError(f"--export-forecast {export} has to end in .safetensors")
    for path in () if export is None or overwrite else (export, export.with_suffix(".json")):
        if path.exists():
            raise CheckpointError(f"{path} exists; give another name, or --overwrite to replace it")


@contextlib.contextmanager
def _bar(name: str, amount: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with the time left, drawn from the first report to the last: an early error stands alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with contextlib.ExitStack() as drawn:
        bar = Progress(*columns, console=_console)
        task = bar.add_task(name)

        def progress(done: int, total: int) -> None:
            if not bar.live.is_started:
                drawn.enter_context(bar)
            bar.update(task, completed=done, total=total)
            if done == total:
                drawn.close()

        yield progress


def _convert(src: Path, dst: Path, forecast: Path | None, verify: bool, overwrite: bool) -> Manifest:
    def check(folder: Path) -> None:
        with _bar("verify", MofNCompleteColumn()) as progress:
            result = verify_logits(src, folder, progress=progress)
        typer.echo(str(result))

    with _bar("convert", DownloadColumn(binary_units=True)) as progress:
        return convert_checkpoint(
            src,
            dst,
            forecast=forecast,
            overwrite=overwrite,
            check=check if verify else None,
            progress=progress,
        )


def _summary(dst: Path, manifest: Manifest) -> str:
    lines = [f"{dst}: {len(manifest.tensors)} tensors, every one accounted for"]
    if manifest.dropped:
        lines.append(f"left out (not needed): {', '.join(manifest.dropped)}")
    if manifest.forecast is None:
        lines.append("no Forecast: mode sparse works, mode sparda needs one (--forecast FILE)")
    else:
        lines.append(f"Forecast from {manifest.forecast['file']}")
        if manifest.forecast["zero_filled"]:
            lines.append(f"filled with zeros (nothing reads it): {', '.join(manifest.forecast['zero_filled'])}")
        if manifest.forecast["ignored"]:
            lines.append(f"ignored in the Forecast's file: {', '.join(manifest.forecast['ignored'])}")
    return "\n".join(lines)


@app.command()
def convert(
    src: Annotated[Path, typer.Argument(help="Hugging Face folder (or, to export only, a converted one).")],
    dst: Annotated[Path | None, typer.Argument(help="Folder to write.")] = None,
    forecast: Annotated[Path | None, typer.Option(help="Forecast weights: .pt or .safetensors.")] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export-forecast", help="Write the Forecast as FILE.safetensors with a JSON sidecar."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare logits and hashes before DST gets its name.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run wrote.")] = False,
) -> None:
    """Convert a Hugging Face checkpoint (safetensors, .bin or .pt), and import or export a Forecast."""
    try:
        _check_options(dst, export, verify, overwrite)
        if dst is not None:
            typer.echo(_summary(dst, _convert(src, dst, forecast, verify, overwrite)))
        if export is not None:
            export_forecast(src, export, forecast=forecast, overwrite=overwrite)
            typer.echo(f"{export}: the Forecast, with its sparse_config in {export.with_suffix('.json').name}")
    except (CheckpointError, ConfigError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    # Conversion is host work: leave an accelerator to whatever else runs there.
    jax.config.update("jax_platforms", "cpu")
    app()
