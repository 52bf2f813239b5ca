"""One ablation: its rows, measured or found in the folder of an earlier call, and the file that they go into."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sparda_jax.bench._report import header, write_whole
from sparda_jax.checkpoint import open_weights
from sparda_jax.train.ablate.answers import Questioner
from sparda_jax.train.ablate.cases import TITLES, VARIANTS, Ablation, Case, cases_of
from sparda_jax.train.ablate.config import AblateConfig
from sparda_jax.train.ablate.training import train_variant
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.forecast import PUBLISHED_DESIGN

METHOD = (
    "Trained: every variant on the same frozen base, rows, seed and number of steps; validation by the published loss "
    "and the fine teacher, whatever a variant was trained with (docs/semantics.md 11.4 and 11.7). Answers: greedy, to "
    "held-out prompts in RULER's wording, the same for every row; an answer is right when every expected value stands "
    "in it; recall with Wilson's 95 % interval; read_fraction: blocks read over blocks visible in decode."
)
TOPK_METHOD = (
    " By confidence: in decode, as many of the best free blocks as together hold `share` of the softmax over the free "
    "blocks' scores, one at least and `most` at most; share is found by halving on the first 25 prompts, by "
    "what is read and not by what is answered, so that read_fraction is that of the constant. In the prompt the number "
    "is constant."
)
LOOKAHEAD_METHOD = (
    " Two layers: answers come from contiguous caches, in which nothing is fetched; what a second layer of lead is "
    "worth in time is not measured."
)
PREDICTOR_METHOD = (
    " Nothing is trained: the Forecast is the checkpoint's own. InfiniGen selects as `sparse` in the prompt, so "
    "`sparda-decode-only` is the one to compare it with. Throughput: rows of `bench decode`, whose ways share the copy "
    "path and miss the same number of blocks; its command and machine stand beside them."
)
_MORE = {
    Ablation.TOPK: TOPK_METHOD,
    Ablation.LOOKAHEAD: LOOKAHEAD_METHOD,
    Ablation.PREDICTOR: PREDICTOR_METHOD,
}


def run_ablation(
    ablation: Ablation,
    config: AblateConfig,
    console: Console,
    *,
    only: Sequence[str] = (),
    throughput: Path | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Measures what is not measured yet, and returns the record of a result file.

    Args:
        only: labels of rows; the others are left out. Empty: all.
        throughput: a file that ``bench decode --json`` wrote, of which the rows become part of the record.
        commit: to record where git can't tell.

    Raises:
        TrainingError: what is in ``config.out`` belongs to other settings, or a label is unknown.
    """
    sparse = open_weights(config.model).config.sparse
    cases = cases_of(ablation, sparse.num_selected_blocks - sparse.init_blocks - sparse.local_blocks - 1)
    unknown = set(only) - {case.label for case in cases}
    if unknown:
        raise TrainingError(
            f"rows={', '.join(sorted(unknown))}: {ablation} has {', '.join(case.label for case in cases)}"
        )
    record = header(what=f"ablation: {TITLES[ablation]}", method=METHOD, program="train.ablate", commit=commit)
    record["method"] += _MORE.get(ablation, "")
    record |= {"ablation": ablation.value, "trained_with": config.trained_with(), "asked": config.asked(), "rows": []}
    if throughput is not None:
        record["throughput"] = _throughput(throughput)
    questioner: Questioner | None = None
    for case in cases:
        if only and case.label not in only:
            continue
        row: dict[str, Any] = {"label": case.label, "variant": case.variant, "mode": case.mode.value}
        trained, design = None, PUBLISHED_DESIGN
        if case.variant is not None:
            variant = VARIANTS[case.variant]
            trained, design = train_variant(case.variant, variant, config, console), variant.design
            row["trained"] = dataclasses.asdict(variant)
            row |= {"steps": trained.steps, "begun": trained.begun, "validation": trained.ended}
        row["answers"] = []
        record["rows"].append(row)
        for kind in config.kinds if config.prompts else ():
            for length in config.lengths:
                if (cell := _known(case, kind, length, config)) is None:
                    questioner = questioner or Questioner(config)
                    cell = questioner.ask(case, None if trained is None else trained.weights, design, kind, length)
                    _keep(case, cell, config)
                row["answers"].append(cell)
                low, high = (100 * end for end in cell["interval"])
                console.print(
                    f"{ablation}, {case.label}, {kind} {length}: {100 * cell['recall']:.1f} % ({low:.0f}-{high:.0f}), "
                    f"{100 * cell['read_fraction']:.1f} % read",
                    markup=False,
                )
    return record


def write_record(record: dict[str, Any], file: Path) -> None:
    """Writes a result file."""
    write_whole(file, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def _cell_file(case: Case, kind: str, length: int, config: AblateConfig) -> Path:
    name = "-".join([case.variant or "own", case.mode.value, *([] if case.most is None else [f"most-{case.most}"])])
    return config.out / "answers" / f"{name}-{kind}-{length}.json"


def _known(case: Case, kind: str, length: int, config: AblateConfig) -> dict[str, Any] | None:
    file = _cell_file(case, kind, length, config)
    if not file.is_file():
        return None
    found = json.loads(file.read_text())
    if found["asked"] != config.asked():
        raise TrainingError(f"{file} was asked with {found['asked']}, not {config.asked()}; give another --out")
    return found["cell"]


def _keep(case: Case, cell: dict[str, Any], config: AblateConfig) -> None:
    file = _cell_file(case, cell["kind"], cell["length"], config)
    write_whole(file, json.dumps({"asked": config.asked(), "cell": cell}, indent=1) + "\n")


def _throughput(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text())
        kept = {name: record[name] for name in ("command", "commit", "machine", "versions", "date", "method", "rows")}
        _ = [(row["settings"]["batch"], row["value"]) for row in kept["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{file} is no result file of `bench decode --json`: {error}") from None
    return kept
