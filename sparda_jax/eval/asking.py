"""What the commands do with their options: who is asked, each cell as it is found, the tables at the end."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from sparda_jax.bench._options import check_writable, one_of
from sparda_jax.checkpoint import CheckpointError, load_model
from sparda_jax.config import ConfigError
from sparda_jax.eval.cells import Cell, Job, Record, run
from sparda_jax.eval.endpoint import Endpoint, EndpointError
from sparda_jax.eval.essays import Sentences, from_file, generated
from sparda_jax.eval.fitting import TooShortError
from sparda_jax.eval.prompting import Prompter, Template
from sparda_jax.eval.subjects import Answer, Checkpoint, Subject, check_width
from sparda_jax.eval.tables import averages, markdown
from sparda_jax.selection import Mode
from sparda_jax.tokenizer import Tokenizer, TokenizerError

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


def make_prompter(model: Path, template: str) -> Prompter:
    """Reads the tokenizer; raises typer.BadParameter where it can't be used."""
    chosen = Template(one_of("--template", template, list(Template)))
    try:
        return Prompter(tokenizer=Tokenizer.from_pretrained(model), template=chosen)
    except (ConfigError, TokenizerError) as error:
        raise typer.BadParameter(str(error)) from None


def ask(
    prompter: Prompter,
    *,
    model: Path,
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
            raise typer.BadParameter(str(error)) from None
        about |= {"served": endpoint.model, "chat": chat}
        return Asked(subjects={endpoint.model: lambda: endpoint}, prompter=prompter, settings=about, width=None)
    chosen = [Mode(one_of("--modes", name, list(Mode))) for name in dict.fromkeys(modes.split(","))]
    needed = any(mode.needs_forecast for mode in chosen)
    try:
        weights = load_model(model, forecast=forecast, require_forecast=needed)
    except (CheckpointError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None
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
        raise typer.BadParameter(str(error)) from None


def evaluate(
    asked: Asked,
    make_jobs: Callable[[], Sequence[Job]],
    *,
    what: str,
    method: str,
    settings: Mapping[str, Any],
    json_out: Path | None,
    markdown_out: Path | None,
    answers: Path | None,
    commit: str | None,
) -> list[Cell]:
    """Makes the prompts, asks, prints and writes.

    Args:
        asked: who.
        make_jobs: the prompts.
        what, method: sentences for the file.
        settings: what the prompts depend on.
        json_out, markdown_out, answers: files for the cells, the tables, and each answer.
        commit: to record where git can't tell.

    Raises:
        typer.BadParameter: something can't be done; the message says what.
    """
    for option, file in (("--json", json_out), ("--markdown", markdown_out), ("--answers", answers)):
        check_writable(file, option)
    began = time.perf_counter()
    try:
        about = dict(settings) | asked.settings
        record = Record(json_out, settings=about, what=what, method=method, commit=commit)
        jobs = make_jobs()
        _say(f"{sum(len(job.prompts) for job in jobs)} prompts after {time.perf_counter() - began:.0f} s")
        cells = run(jobs, asked.subjects, record, shown=_shower(asked, answers, began))
    except (ConfigError, EndpointError, TooShortError) as error:
        raise typer.BadParameter(str(error)) from None
    # The file may hold modes that this run was not asked for.
    kept = _baseline(record.cells)
    record.write({"baseline": kept, "averages": averages(record.cells, kept)})
    tables = markdown(cells, _baseline(cells))
    if markdown_out:
        markdown_out.write_text(tables, encoding="utf-8")
    _say(tables)
    return cells


def _baseline(cells: Sequence[Cell]) -> str:
    """The mode that others are compared with: sparse, or the first one if it is not there."""
    modes = [cell.mode for cell in cells]
    return Mode.SPARSE.value if Mode.SPARSE.value in modes else modes[0]


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _shower(asked: Asked, answers_file: Path | None, began: float) -> Callable[[Job, Cell, Sequence[Answer]], None]:
    """Prints each cell as it is found, refuses unequal widths, and appends the answers to a file."""

    def show(job: Job, cell: Cell, answers: Sequence[Answer]) -> None:
        low, high = cell.interval
        width = "" if cell.width is None else f", {cell.width:.2f} blocks a token"
        score = f"{100 * cell.mean:.1f} % ({100 * low:.0f}-{100 * high:.0f})"
        _say(f"{cell.length} {cell.mode} {cell.task}: {score}{width} [{time.perf_counter() - began:.0f} s]")
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
