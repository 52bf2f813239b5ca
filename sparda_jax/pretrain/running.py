"""What the training commands share: weights in, batches by a recipe, lines of the log, weights out."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from rich.console import Console

from sparda_jax.checkpoint import CheckpointError, load_model, save_hf
from sparda_jax.config import ConfigError
from sparda_jax.model import Decoder
from sparda_jax.pretrain.batches import Batch, BatchPool, LossWeights, StreamConfig
from sparda_jax.pretrain.recipe import Phase, Recipe

console = Console(soft_wrap=True)
_DESCRIPTIONS = ("config", "generation_config")


def scaled_recipe(recipe: Recipe, batch_tokens: int, scale: float, **changes: Any) -> Recipe:
    """As the options say; raises typer.BadParameter where a step can't hold a row."""
    longest = max(phase.seq_len for phase in recipe.phases)
    if batch_tokens < longest:
        raise typer.BadParameter(f"--batch-tokens {batch_tokens}: it must be at least {longest}, the longest sequence.")
    return dataclasses.replace(recipe, batch_tokens=batch_tokens, **changes).scaled(scale)


def load_start(start: Path, **options: Any) -> Decoder:
    """The weights to begin with; what is wrong with them ends the command."""
    try:
        return load_model(start, dtype=jnp.float32, **options)
    except (CheckpointError, ConfigError) as error:
        raise failure(error) from error


def failure(why: object) -> typer.Exit:
    """Says why the command can't go on; to be raised."""
    typer.echo(f"error: {why}", err=True)
    return typer.Exit(1)


def training_dtype() -> jnp.dtype:
    """Of activations and gradients."""
    return jnp.dtype(jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32)


def batches_by(pool: BatchPool, recipe: Recipe) -> Callable[[Phase, int, int], Iterator[Batch]]:
    """What `train` takes its batches from."""

    def batches_of(phase: Phase, start: int, steps: int) -> Iterator[Batch]:
        stream = StreamConfig(
            seq_len=phase.seq_len,
            batch_size=recipe.batch_tokens // phase.seq_len,
            seed=recipe.seed,
            text_fraction=recipe.text_fraction,
            long_fraction=recipe.long_fraction,
            weights=LossWeights(answer=recipe.answer_weight),
            spelling=recipe.spelling,
            mix=recipe.mix,
        )
        return pool.batches(stream, start, start + steps)

    return batches_of


def reporter(keep: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    """Prints each line of the log, with the seconds since now, and keeps it."""
    started = time.perf_counter()

    def report(values: dict[str, Any]) -> None:
        keep(values)
        numbers = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
        console.print(f"{time.perf_counter() - started:6.0f} s {numbers}")

    return report


def write_model(
    model: Decoder,
    tokenizer: Path,
    out: Path,
    description: Mapping[str, Any],
    generation: Mapping[str, Any],
    step: int,
) -> None:
    """A Hugging Face folder in bfloat16, in place of an earlier one."""
    graphdef, state = nnx.split(model)
    save_hf(
        nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)),
        tokenizer,
        out,
        description,
        generation_config=generation,
        forecast_metadata={
            "sparse_config": dataclasses.asdict(model.config.sparse),
            "base_model_path": out.absolute().name,
            "step": step,
        },
        overwrite=True,
    )


def read_description(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and ``generation_config.json`` of a checkpoint; what is missing ends the command."""
    try:
        config, generation = (json.loads((folder / f"{name}.json").read_text()) for name in _DESCRIPTIONS)
        return config, generation
    except (OSError, ValueError) as error:
        raise failure(f"{folder} is no Hugging Face checkpoint: {error}") from error
