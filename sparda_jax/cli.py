"""The console script `sparda-jax`: one name for the commands that are also run as `python -m sparda_jax.COMMAND`."""

import runpy
import sys
from typing import Annotated

import typer

from sparda_jax import __version__

app = typer.Typer(name="sparda-jax", no_args_is_help=True, add_completion=False, help="SparDA on JAX.")

# The command that is called parses its own options, --help included, so nothing is loaded before it is needed.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """SparDA on JAX: convert a checkpoint, plan its memory, serve, train a Forecast, pretrain, evaluate, measure."""


def _run(command: str, arguments: list[str]) -> None:
    """Does exactly what `python -m sparda_jax.COMMAND ARGUMENTS` does, in this process."""
    sys.argv = [f"sparda-jax {command}", *arguments]
    runpy.run_module(f"sparda_jax.{command}", run_name="__main__", alter_sys=True)


@app.command("convert", add_help_option=False, context_settings=_PASS_ON)
def convert(ctx: typer.Context) -> None:
    """Convert a Hugging Face checkpoint for serving."""
    _run("convert", ctx.args)


@app.command("plan", add_help_option=False, context_settings=_PASS_ON)
def plan(ctx: typer.Context) -> None:
    """Say what a model takes of device and host memory, and the most that fits."""
    _run("plan", ctx.args)


@app.command("serve", add_help_option=False, context_settings=_PASS_ON)
def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API."""
    _run("serve", ctx.args)


@app.command("train", add_help_option=False, context_settings=_PASS_ON)
def train(ctx: typer.Context) -> None:
    """Train the Forecast of a frozen model."""
    _run("train", ctx.args)


@app.command("pretrain", add_help_option=False, context_settings=_PASS_ON)
def pretrain(ctx: typer.Context) -> None:
    """Train the small bundled model from scratch."""
    _run("pretrain", ctx.args)


@app.command("eval", add_help_option=False, context_settings=_PASS_ON)
def evaluate(ctx: typer.Context) -> None:
    """RULER, needles, LongBench and HELMET, for a checkpoint in every mode or a server."""
    _run("eval", ctx.args)


@app.command("bench", add_help_option=False, context_settings=_PASS_ON)
def bench(ctx: typer.Context) -> None:
    """Measure kernels, decode, prefill and the engine on this machine's GPU, or a server over HTTP."""
    _run("bench", ctx.args)
