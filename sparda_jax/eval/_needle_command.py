"""``python -m sparda_jax.eval needle``: whether a fact is found, by its depth and the prompt's length."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench._options import at_least, whole_numbers
from sparda_jax.bench.plot import check_picture, figure, save
from sparda_jax.eval import options
from sparda_jax.eval.asking import ask, evaluate, make_prompter, sentences_of
from sparda_jax.eval.cells import Cell, Job
from sparda_jax.eval.ruler import needle_prompts
from sparda_jax.eval.scoring import share_matched

METHOD = (
    "one needle in running text, RULER's niah_single_2, at given depths: 0 is the beginning of the text, 100 its end; "
    "greedy answers; a score is 1 if the answer holds the number. The same prompts for every mode. width: blocks that "
    "a token of an answer reads per layer and KV head."
)


def needle(
    model: options.ModelOption = BUNDLED_MODEL,
    forecast: options.ForecastOption = None,
    modes: options.ModesOption = options.MODES,
    lengths: options.LengthsOption = "2048,4096",
    depths: Annotated[int, typer.Option(help="Depths, evenly spaced from the text's beginning to its end.")] = 11,
    samples: options.SamplesOption = 4,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 1,
    template: options.TemplateOption = "chat",
    essays: options.EssaysOption = None,
    dense_len: options.DenseLenOption = -1,
    batch: options.BatchOption = 8,
    url: options.UrlOption = None,
    chat: options.ChatOption = False,
    api_key: options.ApiKeyOption = None,
    json_out: options.JsonOption = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Also draw a heat map of each mode: .png or .svg.")
    ] = None,
    answers: options.AnswersOption = None,
    commit: options.CommitOption = None,
) -> None:
    """One needle at every depth and length: a heat map for each mode, on the same prompts."""
    check_picture(picture)
    if picture:
        figure()  # so that a missing matplotlib is told before minutes of work
    for option, value, least in (("--batch", batch, 1), ("--samples", samples, 1), ("--depths", depths, 2)):
        at_least(option, value, least)
    if depths > 101:
        raise typer.BadParameter(f"--depths {depths}: give at most 101, for a depth is named in whole percent.")
    sizes = whole_numbers("--lengths", lengths)
    text, prompter = sentences_of(essays), make_prompter(model, template)
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
    grid = [float(depth) for depth in np.linspace(0, 1, depths)]

    def make_jobs() -> list[Job]:
        jobs = []
        for length in dict.fromkeys(sizes):
            made = {"length": length, "depths": grid, "seed": seed, "samples": samples, "sentences": text}
            for depth, prompts in zip(grid, needle_prompts(prompter, **made), strict=True):
                jobs.append(Job(task=f"{100 * depth:.0f} %", length=length, prompts=prompts, score=share_matched))
        return jobs

    cells = evaluate(
        asked,
        make_jobs,
        what="needle by depth and length",
        method=METHOD,
        settings={"samples": samples, "seed": seed, "essays": None if essays is None else essays.name},
        json_out=json_out,
        markdown_out=None,
        answers=answers,
        commit=commit,
    )
    if picture:
        draw(cells, picture, f"needle in {asked.settings['model']}, {samples} prompts a cell")


def draw(cells: list[Cell], picture: Path, title: str) -> None:
    """Writes the heat maps, one for each mode: depth downwards, length to the right.

    Raises:
        typer.BadParameter: there is no matplotlib, or the file can't be written.
    """
    drawing = figure()
    modes, lengths, depths = (
        list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("mode", "length", "task")
    )
    panels = drawing.subplots(1, len(modes), squeeze=False, sharey=True)[0]
    drawing.set_size_inches(1.5 + (0.8 + 0.45 * len(lengths)) * len(modes), 1.6 + 0.3 * len(depths))
    image: Any = None
    for axes, mode in zip(panels, modes, strict=True):
        shares = {(cell.task, cell.length): cell.mean for cell in cells if cell.mode == mode}
        table = np.array([[shares[depth, length] for length in lengths] for depth in depths])
        image = axes.imshow(table, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length / 1024:g}K" for length in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), depths, fontsize=8)
        axes.set_title(mode, fontsize=9)
    panels[0].set_ylabel("depth of the needle")
    drawing.colorbar(image, ax=list(panels), label="found")
    drawing.suptitle(title, fontsize=10)
    save(drawing, picture)
