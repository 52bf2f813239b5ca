"""``python -m sparda_jax.bench``: one command for each benchmark."""

import runpy

import typer

from sparda_jax.bench.decode import decode
from sparda_jax.bench.host_dtype import host_dtype
from sparda_jax.bench.kernels import kernels
from sparda_jax.bench.map import map_
from sparda_jax.bench.overlap import overlap
from sparda_jax.bench.plot import plot
from sparda_jax.bench.predict import predict
from sparda_jax.bench.prefill import prefill
from sparda_jax.bench.step import step

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def main() -> None:
    """Benchmarks against floors, published times and targets; each can write its results as JSON."""


app.command()(kernels)
app.command()(decode)
app.command("map")(map_)
app.command()(prefill)
app.command()(overlap)
app.command("host-dtype")(host_dtype)
app.command()(plot)
app.command()(predict)
app.command()(step)


@app.command(
    "engine",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Time the server's engine, without HTTP: decode, first tokens, sequences that wait.",
)
def engine() -> None:
    """Found by name, since the server's code stands above everything else in the package."""
    runpy.run_module("sparda_jax.serve.bench", run_name="__main__", alter_sys=True)


@app.command(
    "train",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Time micro-steps of Forecast training and their parts.",
)
def train() -> None:
    """Found by name, since training stands above the rest of the package."""
    runpy.run_module("sparda_jax.train.bench", run_name="__main__", alter_sys=True)


@app.command(
    "serve",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    short_help="Send a server requests over HTTP at a given rate, whether it keeps up or not.",
)
def serve(context: typer.Context) -> None:
    """Imported only now: its HTTP client need not be there where kernels and models are measured."""
    from sparda_jax.bench.serve import serve as command

    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command()(command)
    alone(args=context.args, prog_name="python -m sparda_jax.bench serve")


if __name__ == "__main__":
    app()
