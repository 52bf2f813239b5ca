"""``python -m sparda_jax.bench overlap``: what a model's selections share on texts, and what decode would fetch."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from jaxtyping import Int
from rich.console import Console
from rich.table import Table

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench._options import check_writable, one_of
from sparda_jax.bench._overlap_plot import draw
from sparda_jax.bench._overlap_replay import selections
from sparda_jax.bench._overlap_rows import DISTANCES, MISSING, SHARED, UNION, Measured, measure, rows
from sparda_jax.bench._overlap_sets import first_choice
from sparda_jax.bench._report import Row, write_json
from sparda_jax.bench.plot import check_picture, figure
from sparda_jax.checkpoint import CheckpointError, load_model
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.generate import Runner
from sparda_jax.selection import Mode
from sparda_jax.tokenizer import Tokenizer, TokenizerError

console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 200)
# Those that select in prefill as in decode: one forward pass says what each decode step would select.
_MODES = [mode.value for mode in (Mode.SPARDA, Mode.SPARSE, Mode.RANDOM)]
_COLUMNS = {SHARED: "distance", UNION: "tokens", MISSING: "slots"}
METHOD = (
    "one forward pass over each text's first tokens; counted are tokens that have a choice and are not dense. "
    f"{SHARED}: of a token's blocks that are not forced, the share that the token `distance` before it selected, too, "
    f"for the same KV head. {UNION}: blocks that some of them selected, forced ones included. At random: if each token "
    "drew its free blocks. Missing: records that a decode step copies, for one KV head and layer, when the text is "
    "replayed token by token over so many slots, empty at first, by the cache's own CLOCK policy; without layer 0, "
    "which is resident. p5, p95: percentiles over tokens (groups, steps) and heads of all texts; last_quarter: the "
    "mean over the last quarter of what is counted in each text; texts: each text's mean, in the order given."
)


def overlap(
    text: Annotated[list[Path], typer.Option(help="A UTF-8 text; give the option again for more.")],
    model: Annotated[Path, typer.Option(help="A checkpoint; the bundled model if left out.")] = BUNDLED_MODEL,
    tokens: Annotated[int, typer.Option(help="Tokens of each text, from its beginning.")] = 16384,
    modes: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(_MODES)}.")] = "sparda,sparse",
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Also draw them: .png or .svg.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Measure how much neighbouring tokens' blocks overlap on texts, and hit rates of decode against slots."""
    check_writable(json_out)
    check_picture(picture)
    if picture:
        figure()  # so that a missing matplotlib is told before minutes of work
    chosen = [Mode(one_of("--modes", name, _MODES)) for name in dict.fromkeys(modes.split(","))]
    try:
        decoder = load_model(model, require_forecast=Mode.SPARDA in chosen)
        tokenizer = Tokenizer.from_pretrained(model)
    except (CheckpointError, ConfigError, TokenizerError) as error:
        raise typer.BadParameter(str(error)) from None
    _check_tokens(tokens, decoder.config)
    prompts = [_read(file, tokenizer, tokens) for file in text]
    sparse = decoder.config.sparse
    found: list[Row] = []
    for mode in chosen:
        runner = Runner(decoder, mode=mode)
        measured: list[Measured] = []
        for file, prompt in zip(text, prompts, strict=True):
            began = time.perf_counter()
            measured.append(measure(selections(runner, prompt), sparse))
            console.print(f"{mode.value}, {file.name}: {time.perf_counter() - began:.0f} s", markup=False)
        found += rows(mode.value, measured, sparse)
    name, names = model.resolve().name, ", ".join(file.name for file in text)
    what = f"block overlap and hit rates of {name}, {tokens} tokens each of {names}"
    if json_out:
        write_json(json_out, found, what=what, method=METHOD, commit=commit)
    if picture:
        draw(found, picture, f"{name}, {len(text)} texts of {tokens} tokens, {sparse.num_selected_blocks} blocks")
    for kind, column in _COLUMNS.items():
        console.print(_table(kind, column, [row for row in found if row.name == kind]))


def _check_tokens(tokens: int, config: ModelConfig) -> None:
    sparse = config.sparse
    if sparse.topk == sparse.init_blocks + 1:
        raise typer.BadParameter(f"all {sparse.num_selected_blocks} blocks of this model are forced: none is chosen.")
    least = first_choice(sparse) + max(DISTANCES) + 1
    if not least <= tokens <= config.max_position_embeddings:
        raise typer.BadParameter(
            f"--tokens {tokens}: give {least} to {config.max_position_embeddings}; tokens before {least - 1} choose "
            "nothing, or have no pair."
        )


def _read(file: Path, tokenizer: Tokenizer, tokens: int) -> Int[np.ndarray, "tokens"]:
    try:
        ids = tokenizer.encode(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"--text {file} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"--text {file} is not UTF-8: {error.reason} at byte {error.start}.") from None
    if len(ids) < tokens:
        raise typer.BadParameter(f"--text {file} has {len(ids)} tokens: give a longer one, or a smaller --tokens.")
    return np.array(ids[:tokens], np.int32)


def _table(name: str, column: str, found: Sequence[Row]) -> Table:
    """A line for each mode and layer, a column for each value of one setting; 5th and 95th percentile in brackets."""
    table = Table(title=f"{name}, by {column}")
    headings = list(dict.fromkeys(row.settings[column] for row in found))
    for heading in ("mode", "layer", *(f"{heading:g}" for heading in headings)):
        table.add_column(heading, justify="right")
    for mode, layer in dict.fromkeys((row.backend, row.settings["layer"]) for row in found):
        mine = [row for row in found if (row.backend, row.settings["layer"]) == (mode, layer)]
        cells = {row.settings[column]: row for row in mine}
        table.add_row(mode, str(layer), *(_cell(cells.get(heading)) for heading in headings))
    return table


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row.value:.3g} ({row.settings['p5']:.2g}-{row.settings['p95']:.2g})"
