"""``python -m sparda_jax.pretrain grow``, ``speed`` and ``lengthen``."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from sparda_jax.checkpoint import CheckpointError
from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.pretrain.batches import BatchPool
from sparda_jax.pretrain.growth import deeper
from sparda_jax.pretrain.growth import grow as grow_model
from sparda_jax.pretrain.lengthening import LENGTHENING, LONG_FORESIGHT
from sparda_jax.pretrain.pieces import run_piece
from sparda_jax.pretrain.recipe import Recipe
from sparda_jax.pretrain.running import (
    batches_by,
    console,
    failure,
    load_start,
    read_description,
    reporter,
    scaled_recipe,
    training_dtype,
    write_model,
)
from sparda_jax.pretrain.speed import as_rows, seconds_of, time_steps

_GROWN_LAYERS = 8
LOG_FILE = "log.jsonl"

StartArgument = Annotated[Path, typer.Argument(help="A Hugging Face checkpoint with a Forecast.")]
BatchOption = Annotated[int, typer.Option(help="Tokens of a step.")]


def grow(
    start: StartArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write, a Hugging Face checkpoint.")],
    layers: Annotated[int, typer.Option(help="Of the grown model.")] = _GROWN_LAYERS,
) -> None:
    """Add layers that change nothing yet: behind the others, copies of the last ones with outputs of zero."""
    description, generation = read_description(start)
    model = load_start(start)
    try:
        description = deeper(description, layers)
        grown = grow_model(model, ModelConfig.from_hf(description, generation))
        write_model(grown, start, out, description, generation, 0)
    except (CheckpointError, ConfigError) as error:
        raise failure(error) from error
    count = sum(x.size for x in jax.tree.leaves(grown))
    console.print(f"{out}: {layers} layers, {count / 1e6:.2f} M parameters, the Forecast's included")


def speed(
    start: StartArgument,
    fit: Annotated[float, typer.Option(help="Seconds that both stages together are to take.")],
    batch_tokens: BatchOption = Recipe.batch_tokens,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Time every kind of step of `lengthen`, and say which --scale fits into a time; the last line is that number."""
    model = load_start(start, require_forecast=True)
    stages = [scaled_recipe(recipe, batch_tokens, 1.0) for recipe in (LENGTHENING, LONG_FORESIGHT)]
    both = dataclasses.replace(stages[0], phases=stages[0].phases + stages[1].phases)
    times = []
    for found in time_steps(model, both, training_dtype()):
        times.append(found)
        peak = "" if found.peak_bytes is None else f", peak {found.peak_bytes / 2**30:.1f} GiB"
        rate = batch_tokens / found.seconds / 1e6
        console.print(
            f"{found.seq_len} {found.mode}: {1e3 * found.seconds:.0f} ms a step, {rate:.2f} M tokens/s, "
            f"{found.first_seconds:.0f} s the first{peak}"
        )
    needed = [seconds_of(stage, times) for stage in stages]
    scale = fit / sum(needed)
    if json_out:
        record = {"steps": as_rows(times, both), "stage_seconds": needed, "scale": scale}
        json_out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"{needed[0]:.0f} s and {needed[1]:.0f} s at --scale 1")
    console.print(f"{scale:.3f}")


def lengthen(
    start: StartArgument,
    folder: Annotated[Path, typer.Argument(help="Of this run: its state, its log, and `model`, a checkpoint.")],
    seconds: Annotated[float, typer.Option(min=0, help="Of training; the command given again goes on from there.")],
    settle: Annotated[
        bool, typer.Option("--settle", help="The sixth stage, from what the fifth wrote: routed by the Forecast, too.")
    ] = False,
    first_step: Annotated[
        int, typer.Option(min=0, help="Where a run stood whose state was lost and whose model START is.")
    ] = 0,
    data: Annotated[Path, typer.Option(help="Folder that sparda_jax.pretrain.prepare wrote.")] = Path(".data/pretrain"),
    workers: Annotated[int, typer.Option(min=1, help="Processes that make batches.")] = max(
        1, (os.cpu_count() or 2) - 2
    ),
    scale: Annotated[float, typer.Option(min=0, help="Multiplies the length of every phase.")] = 1.0,
    batch_tokens: BatchOption = Recipe.batch_tokens,
) -> None:
    """Fifth and sixth stage: rows of up to 16K tokens, in pieces of limited time."""
    recipe = scaled_recipe(LONG_FORESIGHT if settle else LENGTHENING, batch_tokens, scale)
    description, generation = read_description(start)
    model = load_start(start, require_forecast=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG_FILE

    def keep(values: dict[str, Any]) -> None:
        with log.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(values) + "\n")

    try:
        with BatchPool(data, num_workers=workers) as pool:
            piece = run_piece(
                model,
                recipe,
                batches_by(pool, recipe),
                folder,
                seconds=seconds,
                dtype=training_dtype(),
                report=reporter(keep),
                first_step=first_step,
            )
        write_model(piece.model, start, folder / "model", description, generation, piece.step)
    except (CheckpointError, OSError) as error:
        raise failure(error) from error
    if piece.finished:
        record = {
            "recipe": dataclasses.asdict(recipe),
            "log": [json.loads(line) for line in log.read_text().splitlines()],
        }
        with atomic_file(folder / "model" / "training_log.json", overwrite=True) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")
    end = "finished" if piece.finished else "to be gone on with"
    console.print(f"{folder / 'model'}: step {piece.step} of {recipe.total_steps}, {end}")
