"""``python -m sparda_jax.eval ruler``."""

import time
from typing import Annotated

import typer

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench._options import at_least, check_writable, one_of, whole_numbers
from sparda_jax.config import ConfigError
from sparda_jax.eval import options
from sparda_jax.eval.cells import Job, Record, run
from sparda_jax.eval.fitting import TooShortError
from sparda_jax.eval.options import console
from sparda_jax.eval.ruler import NAMES, make_prompts, tasks
from sparda_jax.eval.subjects import EndpointError
from sparda_jax.eval.tables import averages, markdown

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
    for file in (json_out, markdown_out):
        check_writable(file)
    at_least("--batch", batch, 1)
    at_least("--samples", samples, 1)
    names = [one_of("--tasks", name, NAMES) for name in dict.fromkeys(task.split(","))]
    sizes, drawn = whole_numbers("--lengths", lengths), whole_numbers("--seeds", seeds, least=0)
    prompter = options.make_prompter(model, template)
    asked = options.ask(
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
    known = tasks(options.sentences_of(essays))
    began = time.perf_counter()
    settings = {"samples": samples, "seeds": drawn, "essays": None if essays is None else essays.name} | asked.settings
    baseline = "sparse" if "sparse" in asked.subjects else next(iter(asked.subjects))
    try:
        record = Record(json_out, settings=settings, what="RULER", method=METHOD, commit=commit)
        jobs = []
        for length in dict.fromkeys(sizes):
            for name in names:
                made = [
                    make_prompts(name, known[name], prompter, length=length, seed=seed, samples=samples)
                    for seed in drawn
                ]
                prompts = [prompt for of_seed in made for prompt in of_seed]
                jobs.append(Job(task=name, length=length, prompts=prompts, score=known[name].score))
        console.print(f"{sum(len(job.prompts) for job in jobs)} prompts: {time.perf_counter() - began:.0f} s")
        cells = run(jobs, asked.subjects, record, shown=options.shower(asked, answers))
    except (ConfigError, EndpointError, TooShortError) as error:
        raise options.failure(error) from None
    record.write({"baseline": baseline, "averages": averages(record.cells, baseline)})
    tables = markdown(cells, baseline)
    if markdown_out:
        markdown_out.write_text(tables, encoding="utf-8")
    console.print(tables, markup=False, highlight=False)
    console.print(f"{time.perf_counter() - began:.0f} s", markup=False)
