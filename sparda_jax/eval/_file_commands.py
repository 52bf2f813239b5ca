"""``python -m sparda_jax.eval longbench`` and ``helmet``: benchmarks whose files the user has."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench._options import at_least, one_of, whole_numbers
from sparda_jax.eval import helmet as of_helmet
from sparda_jax.eval import longbench as of_longbench
from sparda_jax.eval import options
from sparda_jax.eval.asking import ask, evaluate, make_prompter

LONGBENCH_METHOD = (
    "LongBench's English tasks with the published prompts and metrics; prompts that are too long lose their middle; "
    "greedy answers. The same prompts for every mode. Intervals as of `ruler`."
)
HELMET_METHOD = (
    "HELMET's recall, RAG and re-ranking with the published prompts and metrics, two examples; greedy answers. The "
    "same prompts for every mode. Intervals as of `ruler`."
)
DataOption = Annotated[Path, typer.Argument(help="The benchmark's folder data.")]


def longbench(
    data: DataOption,
    model: options.ModelOption = BUNDLED_MODEL,
    forecast: options.ForecastOption = None,
    modes: options.ModesOption = options.MODES,
    lengths: options.LengthsOption = "16384",
    task: Annotated[str, typer.Option("--tasks", help=f"Comma-separated: {', '.join(of_longbench.TASKS)}.")] = ",".join(
        of_longbench.TASKS
    ),
    samples: Annotated[int | None, typer.Option(help="Rows of each file, from its beginning; all if left out.")] = None,
    template: options.TemplateOption = "chat",
    dense_len: options.DenseLenOption = -1,
    batch: options.BatchOption = 8,
    url: options.UrlOption = None,
    chat: options.ChatOption = False,
    api_key: options.ApiKeyOption = None,
    json_out: options.JsonOption = None,
    markdown_out: options.MarkdownOption = None,
    answers: options.AnswersOption = None,
    commit: options.CommitOption = None,
) -> None:
    """LongBench from its files, for every mode on the same prompts."""
    if samples is not None:
        at_least("--samples", samples, 1)
    names, sizes, prompter = (
        _names(task, of_longbench.TASKS),
        whole_numbers("--lengths", lengths),
        make_prompter(model, template),
    )
    asked = ask(
        prompter,
        model=model,
        forecast=forecast,
        modes=modes,
        max_model_len=max(sizes),
        dense_len=dense_len,
        batch=at_least("--batch", batch, 1),
        url=url,
        chat=chat,
        api_key=api_key,
    )
    evaluate(
        asked,
        lambda: [
            of_longbench.make_job(name, data, prompter, length=length, samples=samples)
            for length in dict.fromkeys(sizes)
            for name in names
        ],
        what="LongBench",
        method=LONGBENCH_METHOD,
        settings={"samples": samples},
        json_out=json_out,
        markdown_out=markdown_out,
        answers=answers,
        commit=commit,
    )


def helmet(
    data: DataOption,
    model: options.ModelOption = BUNDLED_MODEL,
    forecast: options.ForecastOption = None,
    modes: options.ModesOption = options.MODES,
    lengths: options.LengthsOption = "8192",
    task: Annotated[str, typer.Option("--tasks", help=f"Comma-separated: {', '.join(of_helmet.TASKS)}.")] = ",".join(
        of_helmet.TASKS
    ),
    samples: Annotated[int, typer.Option(help="Questions of each file.")] = 100,
    template: options.TemplateOption = "chat",
    dense_len: options.DenseLenOption = -1,
    batch: options.BatchOption = 8,
    url: options.UrlOption = None,
    chat: options.ChatOption = False,
    api_key: options.ApiKeyOption = None,
    json_out: options.JsonOption = None,
    markdown_out: options.MarkdownOption = None,
    answers: options.AnswersOption = None,
    commit: options.CommitOption = None,
) -> None:
    """HELMET's recall, RAG and re-ranking from its files, for every mode on the same prompts."""
    names, sizes, prompter = (
        _names(task, of_helmet.TASKS),
        whole_numbers("--lengths", lengths),
        make_prompter(model, template),
    )
    asked = ask(
        prompter,
        model=model,
        forecast=forecast,
        modes=modes,
        max_model_len=max(sizes),
        dense_len=dense_len,
        batch=at_least("--batch", batch, 1),
        url=url,
        chat=chat,
        api_key=api_key,
    )
    at_least("--samples", samples, 1)
    evaluate(
        asked,
        lambda: [
            of_helmet.make_job(name, data, prompter, length=length, samples=samples)
            for length in dict.fromkeys(sizes)
            for name in names
        ],
        what="HELMET",
        method=HELMET_METHOD,
        settings={"samples": samples},
        json_out=json_out,
        markdown_out=markdown_out,
        answers=answers,
        commit=commit,
    )


def _names(tasks: str, known: Collection[str]) -> list[str]:
    return [one_of("--tasks", name, known) for name in dict.fromkeys(tasks.split(","))]
