"""Recall of a trained model on held-out prompts, in several selection modes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sparda_jax.checkpoint import load_model
from sparda_jax.eval.statistics import wilson
from sparda_jax.library import SparDA
from sparda_jax.pretrain.tasks import EvalPrompt
from sparda_jax.selection import Mode
from sparda_jax.tokenizer import Tokenizer

# Prompts that go through the model together.
EVAL_BATCH = 25
EVAL_NEW_TOKENS = 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallResult:
    """Recall of one (task, length, mode).

    Attributes:
        kind, length, mode: what was asked, tokens of the longest prompt allowed, and how blocks were selected.
        prompts, right: how many were asked, and how many answers hold every expected value.
        values_found: fraction of all expected values that the answers hold.
        read_fraction: blocks read over blocks visible, over the decode steps.
    """

    kind: str
    length: int
    mode: str
    prompts: int
    right: int
    values_found: float
    read_fraction: float

    @property
    def recall(self) -> float:
        return self.right / self.prompts

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the recall, which stays sensible at 0 and 1."""
        return wilson(self.recall, self.prompts)


def evaluate_recall(model: SparDA, kind: str, length: int, prompts: Sequence[EvalPrompt]) -> RecallResult:
    """Greedy answers to ``prompts``; an answer is right when every expected value stands in it, as RULER counts."""
    right, found, total, fractions = 0, 0, 0, []
    for start in range(0, len(prompts), EVAL_BATCH):
        batch = prompts[start : start + EVAL_BATCH]
        answers = model.generate([p.ids.tolist() for p in batch], max_new_tokens=EVAL_NEW_TOKENS, return_stats=True)
        for prompt, answer in zip(batch, answers, strict=True):
            hits = [value in answer.text for value in prompt.expected]
            right += all(hits)
            found += sum(hits)
            total += len(hits)
            if answer.stats is not None:
                fractions.append(answer.stats.decode.read_fraction)
    return RecallResult(
        kind=kind,
        length=length,
        mode=model.runner.mode.value,
        prompts=len(prompts),
        right=right,
        values_found=found / total,
        read_fraction=sum(fractions) / len(fractions),
    )


def load_modes(path: Path, modes: Sequence[Mode], max_model_len: int, *, forecast: Path | None = None) -> list[SparDA]:
    """One copy of the weights, a runner for each mode.

    Args:
        path: a checkpoint folder.
        max_model_len: longest prompt and answer together.
        forecast: a Forecast file for the sparda modes, in place of the folder's own.

    Raises:
        CheckpointError: a tensor is missing or damaged, or a mode needs a Forecast that is not there.
    """
    needed = any(mode.needs_forecast for mode in modes)
    weights = load_model(path, forecast=forecast, require_forecast=needed)
    tokenizer = Tokenizer.from_pretrained(path)
    return [SparDA(weights, tokenizer, mode=mode, max_model_len=max_model_len) for mode in modes]
