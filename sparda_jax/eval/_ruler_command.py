"""``python -m sparda_jax.eval ruler``."""

from typing import Annotated

import typer

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench._options import at_least, one_of, whole_numbers
from sparda_jax.eval import options
from sparda_jax.eval.asking import ask, evaluate, make_prompter, sentences_of
from sparda_jax.eval.cells import Job
from sparda_jax.eval.ruler import NAMES, make_prompts, tasks

METHOD = (
    "RULER's thirteen tasks, made offline; greedy answers behind the answer's first words; scores are the share of the "
    "references in an answer (qa: whether any is), whatever their case. The same prompts for every mode. Intervals are "
    "95 %: of a task Wilson's; of averages over tasks, and of differences between modes on the same prompts, a "
    "bootstrap's that draws prompts within each task. width: blocks that a token of an answer reads per layer and KV "
    "head."
)


def ruler(
    model: options.ModelOption = BUNDLED_MODEL,
    forecast: options.ForecastOption = None,
    modes: options.ModesOption = options.MODES,
    lengths: options.LengthsOption = "4096",
    task: Annotated[str, typer.Option("--tasks", help=f"Comma-separated: {', '.join(NAMES)}.")] = ",".join(NAMES),
    samples: options.SamplesOption = 10,
    seeds: options.SeedsOption = "1",
    template: options.TemplateOption = "chat",
    essays: options.EssaysOption = None,
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
    """RULER: thirteen synthetic long-context tasks, made offline, for every mode on the same prompts."""
    at_least("--batch", batch, 1)
    at_least("--samples", samples, 1)
    names = [one_of("--tasks", name, NAMES) for name in dict.fromkeys(task.split(","))]
    sizes, drawn = whole_numbers("--lengths", lengths), list(dict.fromkeys(whole_numbers("--seeds", seeds, least=0)))
    known, prompter = tasks(sentences_of(essays)), make_prompter(model, template)
    asked = ask(
        prompter,
        model=model,
        forecast=forecast,
        modes=modes,
        max_model_len=max(sizes),
        dense_len=dense_len,
        batch=batch,
        url=url,
        chat=chat,
        api_key=api_key,
    )

    def make_job(length: int, name: str) -> Job:
        made = {"length": length, "samples": samples}
        prompts = [prompt for seed in drawn for prompt in make_prompts(name, known[name], prompter, seed=seed, **made)]
        return Job(task=name, length=length, prompts=prompts, score=known[name].score)

    evaluate(
        asked,
        lambda: [make_job(length, name) for length in dict.fromkeys(sizes) for name in names],
        what="RULER",
        method=METHOD,
        settings={"samples": samples, "seeds": drawn, "essays": None if essays is None else essays.name},
        json_out=json_out,
        markdown_out=markdown_out,
        answers=answers,
        commit=commit,
    )
