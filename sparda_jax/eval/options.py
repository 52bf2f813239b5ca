"""The options that the commands share."""

from pathlib import Path
from typing import Annotated

import typer

from sparda_jax.eval.prompting import Template
from sparda_jax.selection import Mode

MODES = ",".join(mode.value for mode in Mode if mode is not Mode.SPARDA_DECODE_ONLY)

ModelOption = Annotated[
    Path, typer.Option(help="A checkpoint; with --url only its tokenizer is read. The bundled model if left out.")
]
ForecastOption = Annotated[Path | None, typer.Option(help="Forecast file, in place of the checkpoint's own.")]
ModesOption = Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(Mode)}. Not with --url.")]
LengthsOption = Annotated[str, typer.Option(help="Tokens of prompt and answer together, comma-separated.")]
SamplesOption = Annotated[int, typer.Option(help="Prompts of each task, length and seed.")]
SeedsOption = Annotated[str, typer.Option(help="Seeds of the prompts, comma-separated.")]
TemplateOption = Annotated[str, typer.Option(help=f"One of {', '.join(Template)}.")]
EssaysOption = Annotated[
    Path | None, typer.Option(help="Text for needles to lie in, such as RULER's essays; a grammar's if left out.")
]
DenseLenOption = Annotated[
    int, typer.Option(help="Shorter requests attend to everything; -1: none, as published evaluations have it.")
]
BatchOption = Annotated[int, typer.Option(help="Prompts that go through the model together.")]
UrlOption = Annotated[str | None, typer.Option(help="Ask this server, http://HOST:PORT, in place of a checkpoint.")]
ChatOption = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Send the server conversations: for those that take no token ids. The answer's first words stay out.",
    ),
]
ApiKeyOption = Annotated[str | None, typer.Option(envvar="SPARDA_API_KEY", help="For the server.")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Keep results here, after each cell; a run that was stopped goes on.")
]
MarkdownOption = Annotated[Path | None, typer.Option("--markdown", help="Also write the tables here.")]
AnswersOption = Annotated[Path | None, typer.Option("--answers", help="Append each answer here, a JSON line each.")]
CommitOption = Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")]
