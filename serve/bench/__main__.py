"""``python -m sparda_jax.bench engine``: the server's engine without HTTP, beside the bare decode lanes."""

import sys
import time
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from rich.console import Console

from sparda_jax.bench._options import at_least, check_writable, geometry, one_of, slots_of, whole_numbers
from sparda_jax.bench._report import Row, print_rows, write_json
from sparda_jax.checkpoint import CheckpointError, load_model
from sparda_jax.config import ConfigError
from sparda_jax.model import Decoder
from sparda_jax.selection import Mode
from sparda_jax.serve.bench.rows import METHOD, measure
from sparda_jax.serve.bench.runs import LEAST_ANSWER
from sparda_jax.serve.bench.subject import Load, make_subject
from sparda_jax.serve.engine import SWITCH_SECONDS
from sparda_jax.shapes import SHAPES

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
# InfiniGen's sequences share no blocks.
_MODES = [mode.value for mode in Mode if mode.in_lanes and mode is not Mode.INFINIGEN]
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.callback()
def main() -> None:
    """A command of ``python -m sparda_jax.bench``, which the server's code can't be part of."""


@app.command()
def engine(
    shape: Annotated[str, typer.Option(help=f"Model geometry, with random weights: {', '.join(SHAPES)}.")] = (
        "minicpm4.1-8b"
    ),
    model: Annotated[Path | None, typer.Option(help="A checkpoint in place of a geometry.")] = None,
    mode: Annotated[str | None, typer.Option(help="sparda where there is a Forecast, else sparse, if left out.")] = (
        None
    ),
    batch: Annotated[int, typer.Option(help="Decode lanes.")] = 16,
    context: Annotated[int, typer.Option(help="Tokens of the longest request.")] = 131072,
    slots: Annotated[
        str, typer.Option(help="HBM slots of a lane per layer and KV head; auto: as many as fit; least: few to spare.")
    ] = "auto",
    answer: Annotated[int, typer.Option(help="Tokens of an answer that keeps a lane busy.")] = 1024,
    hit: Annotated[int, typer.Option(help="Tokens in the cache before a first token.")] = 100_032,
    short: Annotated[int, typer.Option(help="Tokens of a short prompt.")] = 2048,
    long: Annotated[str, typer.Option(help="Tokens of the prompts beside it, comma-separated.")] = "32768",
    computed: Annotated[int, typer.Option(help="How many of those are not in the cache, at most.")] = 24576,
    steps: Annotated[int, typer.Option(help="Decode steps to time.")] = 128,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the geometry has, for a quick look.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Time the server's engine, without HTTP: decode beside the bare lanes, first tokens, sequences that wait."""
    began = time.perf_counter()

    def say(line: str) -> None:
        console.print(f"[{time.perf_counter() - began:6.1f} s] {line}", markup=False, highlight=False)

    sys.setswitchinterval(SWITCH_SECONDS)  # as the server does
    check_writable(json_out)
    slots_of(slots)
    for option, value, least in (
        ("--batch", batch, 1),
        ("--answer", answer, LEAST_ANSWER),
        ("--hit", hit, 0),
        ("--short", short, 1),
        ("--computed", computed, 0),
        ("--steps", steps, 1),
    ):
        at_least(option, value, least)
    longs = whole_numbers("--long", long)
    at_least("--context", context, short + 1)
    asked = None if mode is None else Mode(one_of("--mode", mode, _MODES))
    try:
        if model is None:
            decoder = Decoder(geometry(shape, layers), has_forecast=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        else:
            decoder = load_model(model)
        jax.block_until_ready(nnx.state(decoder))
        say("the weights are there")
        block_size = decoder.config.sparse.block_size
        # For a prefix of a block, and a block of a request's own.
        at_least("--context", context, answer + 2 * block_size)
        load = Load(
            batch=batch,
            context=context,
            answer=answer,
            hit=hit,
            short=short,
            longs=tuple(min(length, context - 1) for length in longs),
            computed=computed,
            steps=steps,
            block_size=block_size,
        )
        chosen = asked or (Mode.SPARDA if decoder.has_forecast else Mode.SPARSE)
        subject = make_subject(decoder, chosen, load, slots=slots)
    except (CheckpointError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None
    say(f"{load.prefix} tokens are in the cache; {subject.executor.lanes.shape}")
    rows: list[Row] = []
    for row in measure(subject, say, targets=jax.default_backend() == "gpu" and layers is None):
        rows.append(row)
        found = row.error if row.value is None else f"{row.value:.4g} {row.unit}"
        say(f"{row.name}, {row.backend} {row.settings}: {found}")
        if json_out:
            write_json(json_out, rows, what="the server's engine", method=METHOD, commit=commit)
    print_rows(rows, console)


if __name__ == "__main__":
    app(prog_name="python -m sparda_jax.bench")
