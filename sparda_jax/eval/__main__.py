"""``python -m sparda_jax.eval``: one command for each benchmark."""

import typer

from sparda_jax.eval._file_commands import helmet, longbench
from sparda_jax.eval._needle_command import needle
from sparda_jax.eval._ruler_command import ruler

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def main() -> None:
    """Does selection find what matters? Long-context benchmarks of a checkpoint in every mode, or of a server."""


app.command()(ruler)
app.command()(needle)
app.command()(longbench)
app.command()(helmet)


if __name__ == "__main__":
    app(prog_name="python -m sparda_jax.eval")
