"""``python -m sparda_jax.bench``: one command for each benchmark."""

import typer

from sparda_jax.bench.decode import decode
from sparda_jax.bench.kernels import kernels
from sparda_jax.bench.plot import plot

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def main() -> None:
    """Benchmarks against floors, published times and targets; each can write its results as JSON."""


app.command()(kernels)
app.command()(decode)
app.command()(plot)

if __name__ == "__main__":
    app()
