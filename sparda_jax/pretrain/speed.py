"""How long the steps of a recipe take, measured before it runs: a run of limited time is scaled to fit."""

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.model import Decoder
from sparda_jax.pretrain.batches import LossWeights
from sparda_jax.pretrain.recipe import Phase, Recipe
from sparda_jax.pretrain.trainer import TrainState, init_state, make_optimizer, make_train_step, step_scalars
from sparda_jax.selection import Mode

_TIMED_STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, and of the first one, which compiles.

    Attributes:
        seq_len, mode: what kind of step. seconds: mean of some. first_seconds: compiling included.
        peak_bytes: most device memory in use so far; None where the device doesn't say.
    """

    seq_len: int
    mode: Mode
    seconds: float
    first_seconds: float
    peak_bytes: int | None


def time_steps(model: Decoder, recipe: Recipe, dtype: jnp.dtype) -> Iterable[StepTime]:
    """Every kind of step that the recipe has, on random tokens; the weights stay as they are."""
    optimizer = make_optimizer(recipe)
    graphdef, state = init_state(model, optimizer)
    step = make_train_step(graphdef, optimizer, dtype)
    for seq_len, mode in dict.fromkeys((p.seq_len, mode) for p in recipe.phases for mode in p.modes):
        batch = _random_batch(model.config.vocab_size, recipe.batch_tokens // seq_len, seq_len)
        seconds: list[float] = []
        for _ in range(1 + _TIMED_STEPS):
            began = time.perf_counter()
            state: TrainState
            state, _ = jax.block_until_ready(step(state, batch, step_scalars(recipe, 0), mode=mode))
            seconds.append(time.perf_counter() - began)
        stats = jax.local_devices()[0].memory_stats() or {}
        yield StepTime(
            seq_len=seq_len,
            mode=mode,
            seconds=sum(seconds[1:]) / _TIMED_STEPS,
            first_seconds=seconds[0],
            peak_bytes=stats.get("peak_bytes_in_use"),
        )


def _random_batch(vocab_size: int, rows: int, seq_len: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    weights = np.where(rng.random((rows, seq_len)) < 0.1, LossWeights().value, LossWeights().text)
    tokens = rng.integers(0, vocab_size, (rows, seq_len + 1))
    return {"tokens": jnp.asarray(tokens, jnp.int32), "loss_weights": jnp.asarray(weights, jnp.float32)}


def seconds_of(recipe: Recipe, times: Iterable[StepTime]) -> float:
    """What the recipe's steps take, compiling left out."""
    known: dict[tuple[int, Mode], float] = {(t.seq_len, t.mode): t.seconds for t in times}

    def of(phase: Phase) -> float:
        return recipe.steps(phase) * sum(known[phase.seq_len, mode] for mode in phase.modes) / len(phase.modes)

    return sum(of(phase) for phase in recipe.phases)


def as_rows(times: Iterable[StepTime], recipe: Recipe) -> list[dict[str, Any]]:
    """For a JSON file, with the rate."""
    return [dataclasses.asdict(t) | {"tokens_per_s": recipe.batch_tokens / t.seconds} for t in times]
