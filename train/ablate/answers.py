"""Answers of a case to needle questions, and the threshold of confidence at which it reads as much as the constant."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from sparda_jax.adaptive import Budget
from sparda_jax.checkpoint import load_model
from sparda_jax.foresight import ForecastDesign, Foresight
from sparda_jax.library import SparDA
from sparda_jax.pretrain.evaluate import EVAL_NEW_TOKENS, RecallResult, evaluate_recall
from sparda_jax.pretrain.tasks import EvalPrompt, eval_prompts, load_eval_tasks
from sparda_jax.tokenizer import Tokenizer
from sparda_jax.train.ablate.cases import Case
from sparda_jax.train.ablate.config import AblateConfig
from sparda_jax.train.errors import TrainingError

# The threshold is found on so many of the prompts that are asked: by how much is read, not by what is answered.
CALIBRATION_PROMPTS, HALVINGS = 25, 8


class Questioner:
    """Asks one model the same questions in every case."""

    def __init__(self, config: AblateConfig) -> None:
        self._config = config
        self._model = load_model(config.model, dtype=config.dtype)
        self._tokenizer = Tokenizer.from_pretrained(config.model)
        self._tasks = load_eval_tasks(config.prompts_data)
        self._asked: dict[tuple[str, int], Sequence[EvalPrompt]] = {}

    def ask(
        self,
        case: Case,
        weights: Float32[np.ndarray, "layers hidden outputs"] | None,
        design: ForecastDesign,
        kind: str,
        length: int,
    ) -> dict[str, Any]:
        """One cell: a case's answers to questions of a kind and length, as plain JSON.

        Args:
            weights, design: of the Forecast; None: the checkpoint's own.
        """
        found: dict[str, Any] = {}
        budget = None
        if case.most is not None:
            budget, found = self._equal_budget(case, weights, design, kind, length)
        runner = self._runner(case, weights, design, budget)
        result = evaluate_recall(runner, kind, length, self._prompts(kind, length))
        return dataclasses.asdict(result) | {"recall": result.recall, "interval": result.interval} | found

    def _prompts(self, kind: str, length: int) -> Sequence[EvalPrompt]:
        if (kind, length) not in self._asked:
            config = self._config
            self._asked[kind, length] = eval_prompts(kind, length, config.prompts, config.seed, tasks=self._tasks)
        return self._asked[kind, length]

    def _equal_budget(
        self,
        case: Case,
        weights: Float32[np.ndarray, "layers hidden outputs"] | None,
        design: ForecastDesign,
        kind: str,
        length: int,
    ) -> tuple[Budget, dict[str, Any]]:
        """At which case and constant read the same share of the visible blocks, found by halving."""
        prompts = self._prompts(kind, length)[:CALIBRATION_PROMPTS]
        most = case.most
        assert most is not None

        def read(budget: Budget | None) -> RecallResult:
            return evaluate_recall(self._runner(case, weights, design, budget), kind, length, prompts)

        def at(share: float) -> float:
            return read(Budget(share=jnp.float32(share), most=most)).read_fraction

        constant = read(None).read_fraction
        share, reached = halve(at, constant)
        if abs(reached / constant - 1) > 0.05:
            raise TrainingError(
                f"topk by confidence reads {reached:.4f} of the blocks at share={share:.4f}, where the constant reads "
                f"{constant:.4f}: no share makes them equal within 5 %"
            )
        found = {"share": share, "most": most, "calibration": {"constant": constant, "by_confidence": reached}}
        return Budget(share=jnp.float32(share), most=most), found

    def _runner(
        self,
        case: Case,
        weights: Float32[np.ndarray, "layers hidden outputs"] | None,
        design: ForecastDesign,
        budget: Budget | None,
    ) -> SparDA:
        model = self._model
        foresight = None
        if weights is not None:
            dtype = model.embed_tokens.dtype
            # Rounded as a served Forecast is (docs/semantics.md section 8.3).
            rounded = jnp.asarray(weights).astype(jnp.bfloat16).astype(dtype)
            foresight = Foresight(weights=rounded, design=design)
        return SparDA(
            model,
            self._tokenizer,
            mode=case.mode,
            max_model_len=max(self._config.lengths) + EVAL_NEW_TOKENS,
            foresight=foresight,
            budget=budget,
        )


def halve(function: Callable[[float], float], target: float) -> tuple[float, float]:
    """Where a function that rises from 0 to 1 comes nearest to a target, and what it is there."""
    low, high = 0.0, 1.0
    tried = []
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tried.append((middle, function(middle)))
        if tried[-1][1] < target:
            low = middle
        else:
            high = middle
    return min(tried, key=lambda pair: abs(pair[1] - target))
