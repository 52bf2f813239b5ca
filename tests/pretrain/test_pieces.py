"""Pieces of a run give what the run in one go gives."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.checkpoint import CheckpointError
from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder
from sparda_jax.pretrain import pieces
from sparda_jax.pretrain.batches import Batch
from sparda_jax.pretrain.pieces import run_piece
from sparda_jax.pretrain.recipe import Phase, Recipe, hf_config
from sparda_jax.pretrain.trainer import learning_rate, train
from sparda_jax.selection import Mode

RECIPE = Recipe(
    phases=(
        Phase(seq_len=128, tokens=5 * 128 / 1e6),
        Phase(seq_len=128, tokens=4 * 128 / 1e6, modes=(Mode.SPARSE, Mode.DENSE)),
    ),
    batch_tokens=128,
    peak_learning_rate=1e-2,
    warmup_steps=3,
    routing_weight=0.1,
)


@pytest.fixture(scope="module")
def model() -> Decoder:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = ModelConfig.from_hf({**hf_config(64, 1, [2]), **small})
    return Decoder(config, has_forecast=False, dtype=jnp.float32, rngs=nnx.Rngs(3))


class Clock:
    """Batches by the step's number; time is up after a number of steps."""

    def __init__(self, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.steps = 0.0, steps
        monkeypatch.setattr(pieces, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def batches_of(self, phase: Phase, start: int, steps: int) -> Iterator[Batch]:
        for step in range(start, start + steps):
            rng = np.random.default_rng(step)
            tokens = rng.integers(0, 64, (1, phase.seq_len + 1)).astype(np.int32)
            yield Batch(tokens=tokens, loss_weights=np.full((1, phase.seq_len), 8, np.float32))

    def report(self, values: dict[str, Any]) -> None:
        self.now += values["step"] == self.steps  # with every step reported


def _leaves(model: Decoder) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]


def _piece(model: Decoder, clock: Clock, folder: Path, **options: Any) -> pieces.Piece:
    recipe = options.pop("recipe", RECIPE)
    return run_piece(
        model, recipe, clock.batches_of, folder, seconds=0.5, dtype=jnp.float32, report=clock.report, **options
    )


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_reports(*args: Any, **options: Any) -> Any:
        return train(*args, report_every=1, **options)

    monkeypatch.setattr(pieces, "train", with_reports)


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("cut", [3, 5, 7])
def test_pieces_give_the_same_as_one_run(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    whole = _piece(model, Clock(99, monkeypatch), tmp_path / "whole")
    first = _piece(model, Clock(cut, monkeypatch), tmp_path / "cut")
    assert (first.step, first.finished) == (cut, False)
    second = _piece(model, Clock(99, monkeypatch), tmp_path / "cut")
    assert (second.step, second.finished, whole.step) == (9, True, 9)
    for a, b, c in zip(*map(_leaves, (whole.model, second.model, first.model)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.ndim < 2 or (a != c).any()
    again = _piece(model, Clock(99, monkeypatch), tmp_path / "cut")
    assert again.step == 9


@pytest.mark.usefixtures("every_step")
def test_a_lost_state_goes_on_from_the_model(model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _piece(model, Clock(6, monkeypatch), tmp_path / "lost")
    other = _piece(first.model, Clock(7, monkeypatch), tmp_path / "new", first_step=6)
    assert other.step == 7
    # The learning rate rises from 0 again: the first step changes nothing.
    for a, b in zip(_leaves(first.model), _leaves(other.model), strict=True):
        np.testing.assert_array_equal(a, b)
    last = _piece(first.model, Clock(99, monkeypatch), tmp_path / "new", first_step=6)
    assert last.finished
    assert any((a != b).any() for a, b in zip(_leaves(first.model), _leaves(last.model), strict=True))


@pytest.mark.usefixtures("every_step")
def test_another_run_or_a_damaged_file_is_refused(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _piece(model, Clock(1, monkeypatch), tmp_path)
    other = dataclasses.replace(RECIPE, seed=5, peak_learning_rate=1.0)
    with pytest.raises(CheckpointError, match="another peak_learning_rate, seed: give another folder"):
        _piece(model, Clock(9, monkeypatch), tmp_path, recipe=other)
    file = tmp_path / pieces.STATE_FILE
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="can't be read"):
        _piece(model, Clock(9, monkeypatch), tmp_path)


def test_the_learning_rate_rises_falls_and_rises_anew() -> None:
    recipe = dataclasses.replace(RECIPE, phases=(Phase(seq_len=128, tokens=100 * 128 / 1e6),), warmup_steps=10)
    rate = functools.partial(learning_rate, recipe)
    assert [rate(0), rate(5), rate(10)] == pytest.approx([0, 5e-3, 1e-2])
    assert rate(55) == pytest.approx((1e-2 + recipe.final_learning_rate) / 2)
    assert rate(100) == pytest.approx(recipe.final_learning_rate)
    assert [rate(55, fresh_at=55), rate(60, fresh_at=55)] == pytest.approx([0, rate(60) / 2])
    assert rate(70, fresh_at=55) == rate(70)
