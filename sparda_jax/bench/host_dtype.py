"""``python -m sparda_jax.bench host-dtype``: what int8 and fp8 records on the host do to logits and to answers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from jaxtyping import Float
from rich.console import Console

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench._host_dtype_runs import Answers, decode, lanes_for, prefill
from sparda_jax.bench._options import at_least, check_writable, one_of
from sparda_jax.bench._report import Row, write_json
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.checkpoint import CheckpointError
from sparda_jax.config import ConfigError
from sparda_jax.library import SparDA
from sparda_jax.pretrain.evaluate import EVAL_NEW_TOKENS, RecallResult
from sparda_jax.pretrain.tasks import EvalPrompt, eval_prompts, load_eval_tasks
from sparda_jax.selection import Mode

console = Console(soft_wrap=True)
RECALL_PROMPTS = 200
METHOD = (
    "single-needle prompts in RULER's wording, held out from training, the same for all formats. Each is prefilled on "
    "the device and then waits on the host, so that all its blocks come from the pool, in lanes with as few slots as a "
    "step can do with. recall: greedy answers that hold the value (interval: Wilson's, 95 %). logits: of the steps "
    "along the answers of auto, whose pool keeps the model's own numbers; differences from auto's logits, "
    "Kullback-Leibler divergence of the distributions in nats, and how often the likeliest token is the same one."
)


@dataclasses.dataclass
class Differences:
    """Of logits, summed up position by position."""

    positions: int = 0
    values: int = 0
    total: float = 0.0
    largest: float = 0.0
    divergence: float = 0.0
    largest_divergence: float = 0.0
    same_top: int = 0
    spread: float = 0.0
    """Standard deviations of the exact logits."""

    def add(self, ours: Float[np.ndarray, "rows vocab"], exact: Float[np.ndarray, "rows vocab"]) -> None:
        """Counts rows in."""
        ours, exact = ours.astype(np.float64), exact.astype(np.float64)
        off = np.abs(ours - exact)
        p, q = _log_softmax(exact), _log_softmax(ours)
        divergence = np.sum(np.exp(p) * (p - q), axis=1)
        self.positions += len(off)
        self.values += off.size
        self.total += float(off.sum())
        self.largest = max(self.largest, float(off.max()))
        self.divergence += float(divergence.sum())
        self.largest_divergence = max(self.largest_divergence, float(divergence.max()))
        self.spread += float(exact.std(1).sum())
        self.same_top += int((ours.argmax(1) == exact.argmax(1)).sum())

    def settings(self) -> dict[str, float]:
        """What a row says."""
        return {
            "positions": self.positions,
            "logit_std": float(f"{self.spread / self.positions:.4g}"),
            "logit_error_mean": float(f"{self.total / self.values:.4g}"),
            "logit_error_max": float(f"{self.largest:.4g}"),
            "kl_max": float(f"{self.largest_divergence:.4g}"),
            "same_top": round(self.same_top / self.positions, 5),
        }


def _log_softmax(x: Float[np.ndarray, "rows vocab"]) -> Float[np.ndarray, "rows vocab"]:
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def compare(forced: Answers, exact: Answers, into: Differences) -> None:
    """Adds the differences along the same tokens; of each prompt as many steps as its answer has."""
    for lane, tokens in enumerate(exact.tokens):
        if steps := len(tokens) - 1:
            into.add(*(np.stack([step[lane] for step in run.logits[:steps]]) for run in (forced, exact)))


def measure(model: SparDA, prompts: Sequence[EvalPrompt], *, length: int, batch: int) -> list[Row]:
    """Rows of each format: the recall, and, of all but auto, the logits."""
    ends = {*model.config.eos_token_ids, model.tokenizer.eos_token_id}
    ways = {"ends": [end for end in ends if end is not None], "most": EVAL_NEW_TOKENS}
    lanes = {kind: lanes_for(model.runner, batch, kind) for kind in KvHostDtype}
    right, found = dict.fromkeys(KvHostDtype, 0), dict.fromkeys(KvHostDtype, 0)
    differences = {kind: Differences() for kind in KvHostDtype}
    for start in range(0, len(prompts), batch):
        asked = prompts[start : start + batch]
        filled = [prefill(model.runner, prompt.ids.tolist()) for prompt in asked]
        exact: Answers | None = None
        for kind in KvHostDtype:  # auto is the first
            answers = decode(lanes[kind], filled, **ways)
            if exact is None:
                exact = answers
            else:
                forced = decode(lanes[kind], filled, forced=exact.tokens, **ways)
                compare(forced, exact, differences[kind])
            for prompt, tokens in zip(asked, answers.tokens, strict=True):
                text = model.tokenizer.decode(tokens)
                hits = [value in text for value in prompt.expected]
                right[kind] += all(hits)
                found[kind] += sum(hits)
        done = start + len(asked)
        console.print(f"{done} of {len(prompts)}: " + ", ".join(f"{kind} {right[kind]}" for kind in KvHostDtype))
    expected = sum(len(prompt.expected) for prompt in prompts)
    rows = []
    for kind in KvHostDtype:
        stats, mode = lanes[kind].return_stats(), model.runner.mode.value
        recall = RecallResult(
            kind="single",
            length=length,
            mode=mode,
            prompts=len(prompts),
            right=right[kind],
            values_found=found[kind] / expected,
            read_fraction=0.0,
        )
        settings = {
            "right": f"{right[kind]}/{len(prompts)}",
            "interval": [round(end, 4) for end in recall.interval],
            "length": length,
            "mode": mode,
            "dtype": model.runner.dtype.name,
            "record_bytes": stats.record_bytes,
            "fetched_of_attended": round(1 - (stats.hit_rate or 0), 3),
        }
        rows.append(Row(name="needle recall", backend=kind.value, settings=settings, value=recall.recall, unit=""))
        if kind is KvHostDtype.AUTO:
            continue
        parts = differences[kind]
        divergence = parts.divergence / parts.positions
        rows.append(
            Row(name="KL of auto", backend=kind.value, settings=parts.settings(), value=divergence, unit="nats")
        )
    return rows


def host_dtype(
    model: Annotated[
        Path, typer.Option(help="Checkpoint folder with the tokenizer of --data; the bundled model if left out.")
    ] = BUNDLED_MODEL,
    data: Annotated[Path, typer.Option(help="Folder that sparda_jax.pretrain.prepare wrote.")] = Path(".data/pretrain"),
    mode: Annotated[str, typer.Option(help=f"Selection mode: {', '.join(Mode)}.")] = "sparda",
    length: Annotated[int, typer.Option(help="Most tokens of a prompt and its answer.")] = 4096,
    prompts: Annotated[int, typer.Option(help="Held-out prompts.")] = 50,
    batch: Annotated[int, typer.Option(help="Prompts that decode together.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 11,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Compare int8 and fp8 records on the host with exact ones: logits, and recall of a needle; on a CPU, too."""
    check_writable(json_out)
    one_of("--mode", mode, list(Mode))
    for option, value in (("--length", length), ("--prompts", prompts), ("--batch", batch)):
        at_least(option, value, 1)
    if not (data / "eval.npy").is_file():
        raise typer.BadParameter(
            f"--data {data}: no eval.npy there; `python -m sparda_jax.pretrain.prepare` writes it."
        )
    try:
        # The first ones of those that docs/results/sparda-mini-recall.json was measured with.
        many = eval_prompts("single", length, max(prompts, RECALL_PROMPTS), seed, tasks=load_eval_tasks(data))
        served = SparDA.from_pretrained(model, mode=mode, max_model_len=length + EVAL_NEW_TOKENS)
        rows = measure(served, many[:prompts], length=length, batch=batch)
    except (CheckpointError, ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    for row in rows:
        console.print(f"{row.name}, {row.backend} {row.settings}: {row.value:.4g} {row.unit}", markup=False)
    if json_out:
        write_json(json_out, rows, what="int8 and fp8 records on the host", method=METHOD, commit=commit)
