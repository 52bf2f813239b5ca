"""``python -m sparda_jax.pretrain``: the bundled model from nothing.

1. ``python -m sparda_jax.pretrain.prepare`` downloads the corpus and trains the tokenizer (needs a Debian system);
2. ``python -m sparda_jax.pretrain train DENSE`` trains it from random weights (an H200: 10 minutes);
3. ``python -m sparda_jax.pretrain adapt DENSE SPARSE`` makes it good at sparse attention (4 minutes);
4. ``python -m sparda_jax.pretrain refine SPARSE OUT`` makes it copy more exactly (7 minutes);
5. ``python -m sparda_jax.pretrain forecast-texts TEXTS`` writes what ``python -m sparda_jax.train`` makes its Forecast
   from;
6. ``python -m sparda_jax.pretrain foresee OUT FORESEEN --forecast FILE`` trains the model and its Forecast together, so
   that a layer's input tells what the next layer looks for (4 minutes); then the Forecast is trained once more
   (scripts/train_forecast.sh runs all from 5 on);
7. ``python -m sparda_jax.pretrain grow FORESEEN GROWN`` adds layers that change nothing yet;
8. ``python -m sparda_jax.pretrain lengthen GROWN LONG --seconds N`` and ``lengthen LONG/model OUT --settle ...`` train
   them at up to 16K tokens, in pieces: the same command goes on;
9. ``python -m sparda_jax.pretrain evaluate OUT/model`` measures recall on held-out prompts.
"""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import typer
from flax import nnx
from rich.table import Table

from sparda_jax.checkpoint import CheckpointError
from sparda_jax.checkpoint.atomic import atomic_file
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.model import Decoder
from sparda_jax.pretrain._lengthen_commands import grow, lengthen, speed
from sparda_jax.pretrain.batches import BatchPool
from sparda_jax.pretrain.evaluate import EVAL_NEW_TOKENS, RecallResult, evaluate_recall, load_modes
from sparda_jax.pretrain.forecast_texts import DocumentConfig, write_texts
from sparda_jax.pretrain.recipe import (
    ADAPTATION,
    FORESIGHT,
    PRETRAINING,
    REFINEMENT,
    SETTLING,
    Recipe,
    hf_config,
)
from sparda_jax.pretrain.running import (
    batches_by,
    console,
    failure,
    load_start,
    reporter,
    scaled_recipe,
    training_dtype,
    write_model,
)
from sparda_jax.pretrain.tasks import EVAL_KINDS, eval_prompts, load_eval_tasks
from sparda_jax.pretrain.trainer import train as run_training
from sparda_jax.selection import Mode
from sparda_jax.tokenizer import Tokenizer

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help=__doc__)

DataOption = Annotated[Path, typer.Option(help="Folder that sparda_jax.pretrain.prepare wrote.")]
WorkersOption = Annotated[int, typer.Option(min=1, help="Processes that make batches.")]
ScaleOption = Annotated[float, typer.Option(min=0, help="Multiplies the length of every phase.")]
BatchOption = Annotated[int, typer.Option(help="Tokens of a step.")]
WORKERS = max(1, (os.cpu_count() or 2) - 2)


@app.command()
def train(
    out: Annotated[Path, typer.Argument(help="Folder to write, a Hugging Face checkpoint.")],
    data: DataOption = Path(".data/pretrain"),
    workers: WorkersOption = WORKERS,
    seed: Annotated[int, typer.Option(help="Of the initial weights and of the batches.")] = 0,
    scale: ScaleOption = 1.0,
    batch_tokens: BatchOption = Recipe.batch_tokens,
) -> None:
    """First stage: train from random weights."""
    recipe = scaled_recipe(PRETRAINING, batch_tokens, scale, seed=seed)
    description, generation = _description(data)
    config = ModelConfig.from_hf(description, generation)
    model = Decoder(config, has_forecast=False, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    _run(model, recipe, description, generation, data, out, workers)


@app.command()
def adapt(
    start: Annotated[Path, typer.Argument(help="The folder that `train` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, a Hugging Face checkpoint.")],
    data: DataOption = Path(".data/pretrain"),
    workers: WorkersOption = WORKERS,
    seed: Annotated[int, typer.Option(help="Of the batches.")] = 1,
    scale: ScaleOption = 1.0,
    batch_tokens: BatchOption = Recipe.batch_tokens,
) -> None:
    """Second stage: mostly sparse attention, with the loss that teaches selection."""
    recipe = scaled_recipe(ADAPTATION, batch_tokens, scale, seed=seed)
    described = _description(data)
    _run(load_start(start), recipe, *described, data, out, workers)


@app.command()
def refine(
    start: Annotated[Path, typer.Argument(help="The folder that `adapt` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, a Hugging Face checkpoint.")],
    data: DataOption = Path(".data/pretrain"),
    workers: WorkersOption = WORKERS,
    seed: Annotated[int, typer.Option(help="Of the batches.")] = 2,
    scale: ScaleOption = 1.0,
    batch_tokens: BatchOption = Recipe.batch_tokens,
) -> None:
    """Third stage: words and numbers that can only be copied token by token, dense and sparse."""
    recipe = scaled_recipe(REFINEMENT, batch_tokens, scale, seed=seed)
    described = _description(data)
    _run(load_start(start), recipe, *described, data, out, workers)


@app.command()
def foresee(
    start: Annotated[Path, typer.Argument(help="The folder that `refine` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, a Hugging Face checkpoint with a Forecast.")],
    forecast: Annotated[
        Path | None, typer.Option(help="Forecast file to start from, in place of the checkpoint's own.")
    ] = None,
    settle: Annotated[
        bool, typer.Option("--settle", help="Its second half, from what the first wrote: lower rates.")
    ] = False,
    data: DataOption = Path(".data/pretrain"),
    workers: WorkersOption = WORKERS,
    seed: Annotated[int, typer.Option(help="Of the batches.")] = 3,
    scale: ScaleOption = 1.0,
    batch_tokens: BatchOption = Recipe.batch_tokens,
) -> None:
    """Fourth stage: the model and its Forecast together, half of the steps routed by the Forecast."""
    recipe = scaled_recipe(SETTLING if settle else FORESIGHT, batch_tokens, scale, seed=seed)
    described = _description(data)
    _run(load_start(start, forecast=forecast, require_forecast=True), recipe, *described, data, out, workers)


def _description(data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``generation_config.json`` of the model for this tokenizer."""
    file = data / "tokenizer" / "generation_config.json"
    if not file.is_file():
        raise failure(
            f"--data {data} holds no tokenizer/{file.name}: give the folder that "
            "`python -m sparda_jax.pretrain.prepare` wrote"
        )
    generation = json.loads(file.read_text())
    vocab_size = Tokenizer.from_pretrained(data / "tokenizer").vocab_size
    return hf_config(vocab_size, generation["bos_token_id"], generation["eos_token_id"]), generation


def _run(
    model: Decoder,
    recipe: Recipe,
    description: dict[str, Any],
    generation: dict[str, Any],
    data: Path,
    out: Path,
    workers: int,
) -> None:
    started = time.perf_counter()
    log: list[dict[str, Any]] = []
    with BatchPool(data, num_workers=workers) as pool:
        model, _ = run_training(
            model, recipe, batches_by(pool, recipe), dtype=training_dtype(), report=reporter(log.append)
        )
    write_model(model, data / "tokenizer", out, description, generation, recipe.total_steps)
    record = {"recipe": dataclasses.asdict(recipe), "seconds": time.perf_counter() - started, "log": log}
    (out / "training_log.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"wrote {out}")


@app.command()
def forecast_texts(
    out: Annotated[Path, typer.Argument(help="Folder to write: train.jsonl and validation.jsonl.")],
    data: DataOption = Path(".data/pretrain"),
    documents: Annotated[int, typer.Option(help="To train on.")] = 6000,
    validation: Annotated[int, typer.Option(help="Documents to validate with, of held-out words and prose.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens of the longest documents.")] = 8192,
    workers: WorkersOption = WORKERS,
    seed: Annotated[int, typer.Option(help="Of the documents.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of an earlier run.")] = False,
) -> None:
    """Texts to train the Forecast on: long recall documents and prose."""
    try:
        config = DocumentConfig(length=length, seed=seed)
        for name, split, count in (("train", "train", documents), ("validation", "eval", validation)):
            file = out / f"{name}.jsonl"
            write_texts(data, file, split, count, config, num_workers=workers, overwrite=overwrite)
            console.print(f"{file}: {count} documents, {file.stat().st_size / 1e6:.1f} MB")
    except (CheckpointError, OSError, ValueError) as error:
        raise failure(error) from error


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    data: DataOption = Path(".data/pretrain"),
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "4096",
    kinds: Annotated[str, typer.Option(help=f"Tasks, comma-separated: {', '.join(EVAL_KINDS)}.")] = "single",
    modes: Annotated[str, typer.Option(help="Selection modes, comma-separated.")] = "dense,sparse,random",
    forecast: Annotated[
        Path | None, typer.Option(help="Forecast file for the sparda modes, in place of the checkpoint's own.")
    ] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts of each task and length.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 1,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Also write the results here, anew after each of them.")
    ] = None,
) -> None:
    """Measure recall on held-out prompts."""
    tasks = load_eval_tasks(data)
    sizes = [int(n) for n in lengths.split(",")]
    chosen = [Mode(m) for m in modes.split(",")]
    asked = {(k, n): eval_prompts(k, n, prompts, seed, tasks=tasks) for n in sizes for k in kinds.split(",")}
    results: list[RecallResult] = []
    try:
        runners = load_modes(model, chosen, max(sizes) + EVAL_NEW_TOKENS, forecast=forecast)
    except (CheckpointError, ConfigError) as error:
        raise failure(error) from error
    for runner in runners:
        for (kind, length), questions in asked.items():
            started = time.perf_counter()
            results.append(evaluate_recall(runner, kind, length, questions))
            console.print(f"{_row(results[-1])} ({time.perf_counter() - started:.0f} s)")
            if json_out:
                _write_results(json_out, results, seed)
    table = Table(
        *("task", "tokens", "mode", "recall", "95 %", "values found", "blocks read"),
        title=f"{model}, {prompts} prompts",
    )
    for result in results:
        table.add_row(*_row(result).split(maxsplit=6))
    console.print(table)


def _write_results(file: Path, results: list[RecallResult], seed: int) -> None:
    rows = [dataclasses.asdict(r) | {"recall": r.recall, "interval": r.interval} for r in results]
    with atomic_file(file, overwrite=True) as temporary:
        temporary.write_text(json.dumps({"seed": seed, "rows": rows}, indent=1) + "\n")


def _row(result: RecallResult) -> str:
    low, high = (round(100 * end) for end in result.interval)
    found, read = f"{100 * result.values_found:.0f}%", f"{100 * result.read_fraction:.0f}%"
    return f"{result.kind} {result.length} {result.mode} {100 * result.recall:.1f}% {low}-{high}% {found} {read}"


app.command()(grow)
app.command()(speed)
app.command()(lengthen)

if __name__ == "__main__":
    app()
