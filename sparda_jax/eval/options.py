"""The options that the commands share, and what they ask for."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench._options import check_writable, one_of
from sparda_jax.checkpoint import CheckpointError, load_model
from sparda_jax.config import ConfigError
from sparda_jax.eval.cells import Cell, Job
from sparda_jax.eval.essays import Sentences, from_file, generated
from sparda_jax.eval.prompting import Prompter, Template
from sparda_jax.eval.subjects import Answer, Checkpoint, Endpoint, EndpointError, Subject, check_width
from sparda_jax.selection import Mode
from sparda_jax.tokenizer import Tokenizer, TokenizerError

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

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """Who is asked, and how.

    Attributes:
        subjects: by mode, made when first needed; one, by the model's name, for a server.
        prompter: how questions become tokens.
        settings: of what is asked, for the record.
        width: blocks that a mode selects; None for a server.
    """

    subjects: dict[str, Callable[[], Subject]]
    prompter: Prompter
    settings: dict[str, Any]
    width: int | None


def failure(error: Exception) -> typer.BadParameter:
    """What a command ends with."""
    return typer.BadParameter(str(error))


def make_prompter(model: Path, template: str) -> Prompter:
    """Reads the tokenizer; raises typer.BadParameter where it can't be used."""
    chosen = Template(one_of("--template", template, list(Template)))
    try:
        return Prompter(tokenizer=Tokenizer.from_pretrained(model), template=chosen)
    except (ConfigError, TokenizerError) as error:
        raise failure(error) from None


def ask(
    prompter: Prompter,
    *,
    model: Path = BUNDLED_MODEL,
    forecast: Path | None,
    modes: str,
    max_model_len: int,
    dense_len: int,
    batch: int,
    url: str | None,
    chat: bool,
    api_key: str | None,
) -> Asked:
    """What the options ask for; a checkpoint is loaded once for all modes.

    Raises:
        typer.BadParameter: it can't be; the message says why.
    """
    about: dict[str, Any] = {"model": model.resolve().name, "template": prompter.template.value}
    if url is not None:
        try:
            endpoint = Endpoint(url, prompter, chat=chat, api_key=api_key, parallel=batch)
        except EndpointError as error:
            raise failure(error) from None
        about |= {"served": endpoint.model, "chat": chat}
        return Asked(subjects={endpoint.model: lambda: endpoint}, prompter=prompter, settings=about, width=None)
    chosen = [Mode(one_of("--modes", name, list(Mode))) for name in dict.fromkeys(modes.split(","))]
    needed = any(mode.needs_forecast for mode in chosen)
    try:
        weights = load_model(model, forecast=forecast, require_forecast=needed)
    except (CheckpointError, ConfigError) as error:
        raise failure(error) from None
    sparse = dataclasses.replace(weights.config.sparse, dense_len=dense_len)
    weights.config = dataclasses.replace(weights.config, sparse=sparse)

    def maker(mode: Mode) -> Callable[[], Subject]:
        return lambda: Checkpoint(weights, prompter.tokenizer, mode=mode, max_model_len=max_model_len, batch=batch)

    about |= {
        "forecast": None if forecast is None else forecast.name,
        "dtype": str(weights.embed_tokens.dtype),
        "dense_len": dense_len,
        "selected_blocks": sparse.num_selected_blocks,
        "block_size": sparse.block_size,
    }
    subjects = {mode.value: maker(mode) for mode in chosen}
    return Asked(subjects=subjects, prompter=prompter, settings=about, width=sparse.num_selected_blocks)


def sentences_of(essays: Path | None) -> Sentences:
    """The running text; raises typer.BadParameter where the file can't be read."""
    try:
        return generated if essays is None else from_file(essays)
    except ConfigError as error:
        raise failure(error) from None


def shower(asked: Asked, answers_file: Path | None) -> Callable[[Job, Cell, Sequence[Answer]], None]:
    """Prints each cell as it is found, refuses unequal widths, and appends the answers to a file."""
    check_writable(answers_file)

    def show(job: Job, cell: Cell, answers: Sequence[Answer]) -> None:
        low, high = cell.interval
        width = "" if cell.width is None else f", {cell.width:.2f} blocks a token"
        console.print(
            f"{cell.length} {cell.mode} {cell.task}: {100 * cell.mean:.1f} % ({100 * low:.0f}-{100 * high:.0f}){width}",
            markup=False,
            highlight=False,
        )
        if asked.width is not None:
            widths = [answer.width for answer in answers if answer.width is not None]
            shortest = min(len(prompt.ids) for prompt in job.prompts) // asked.settings["block_size"] + 1
            check_width(widths, asked.width, shortest, Mode(cell.mode))
        if answers_file is not None:
            with answers_file.open("a", encoding="utf-8") as lines:
                for prompt, answer, score in zip(job.prompts, answers, cell.scores, strict=True):
                    line = {"task": cell.task, "length": cell.length, "mode": cell.mode, "answer": answer.text}
                    line |= {"references": prompt.question.references, "score": score}
                    lines.write(json.dumps(line) + "\n")

    return show
