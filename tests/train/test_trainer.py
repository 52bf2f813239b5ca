"""The loop: stopping and going on, accumulation, the optimiser, and what ends a run."""

import dataclasses
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.train.checkpoints import Checkpoints
from sparda_jax.train.config import TrainConfig
from sparda_jax.train.data import Batch
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.flops import Flops
from sparda_jax.train.forecast import fresh_weights
from sparda_jax.train.forward import ForwardPass
from sparda_jax.train.loss import Objective
from sparda_jax.train.metrics import Record
from sparda_jax.train.state import TrainState, apply_gradient, init_state, learning_rate, make_optimizer
from sparda_jax.train.trainer import Trainer
from tests.train.support import (
    leaves,
    make_config,
    make_mesh,
    make_rows,
    make_validation,
    random_corpus,
    run_training,
    tiny_model,
    topical_corpus,
)

TIMING = {"tokens_per_s", "mfu"}


class Interrupted(Exception):
    """Stands for whatever ends a process."""


def without_timing(records: list[Record]) -> list[Record]:
    return [{name: value for name, value in record.items() if name not in TIMING} for record in records]


def assert_same_state(found: TrainState, expected: TrainState) -> None:
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


class TestGoingOn:
    def test_interrupted_and_resumed_is_never_interrupted(self, tmp_path: Path) -> None:
        """Bit for bit: weights, moments and every number of the log; the step that was lost is done again."""
        config = make_config(steps=6, save_every=3)
        validation = make_validation(config, tiny_model())
        whole = run_training(tmp_path / "whole", config, validation=validation)

        def interrupt(record: Record) -> None:
            if record["step"] == 5:
                raise Interrupted

        with pytest.raises(Interrupted):
            run_training(tmp_path / "parts", config, validation=validation, on_record=interrupt)
        resumed = run_training(tmp_path / "parts", config, validation=validation, resume=True)
        assert_same_state(resumed.state, whole.state)
        assert without_timing(resumed.records) == without_timing(whole.records)[-len(resumed.records) :]
        assert [r["step"] for r in resumed.records if r["kind"] == "train"] == [4, 5, 6]

    def test_told_to_stop_and_resumed_in_other_micro_batches(self, tmp_path: Path) -> None:
        config = make_config(steps=5, save_every=100)
        whole = run_training(tmp_path / "whole", config)
        asked: list[int] = []

        def stop() -> bool:
            asked.append(1)
            return len(asked) == 2

        stopped = run_training(tmp_path / "parts", config, should_stop=stop)
        assert list(stopped.steps) == [2]
        smaller = dataclasses.replace(config, micro_batch_size=1)
        resumed = run_training(tmp_path / "parts", smaller, resume=True)
        np.testing.assert_allclose(resumed.state.weights, whole.state.weights, rtol=0, atol=1e-5)
        assert int(resumed.state.step) == 5

    def test_a_finished_run_can_go_on_with_more_steps(self, tmp_path: Path) -> None:
        run_training(tmp_path / "x", make_config(steps=2))
        longer = run_training(tmp_path / "x", make_config(steps=3), resume=True)
        assert [r["step"] for r in longer.records] == [3]
        assert int(longer.state.step) == 3
        again = run_training(tmp_path / "x", make_config(steps=3), resume=True)
        assert again.records == []
        assert_same_state(again.state, longer.state)


class TestAccumulation:
    @pytest.mark.parametrize("objective", [Objective.PUBLISHED, pytest.param(Objective.BLOCKS, marks=pytest.mark.slow)])
    def test_micro_batches_are_a_batch(self, tmp_path: Path, objective: Objective) -> None:
        """The same rows in one, two or four parts: the same step, although rows have different numbers of tokens."""
        lengths = (500, 300, 400, 512, 350, 260, 480, 300)
        runs = []
        for size in (4, 2, 1):
            config = make_config(batch_size=4, micro_batch_size=size, steps=2, objective=objective)
            rows = make_rows(config, tiny_model(), random_corpus(lengths))
            runs.append(run_training(tmp_path / str(size), config, rows=rows))
        assert runs[0].records[0]["tokens"] < 4 * 512
        for run in runs[1:]:
            np.testing.assert_allclose(run.state.weights, runs[0].state.weights, rtol=0, atol=1e-5)
            for a, b in zip(run.records, runs[0].records, strict=True):
                assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
                assert a["tokens"] == b["tokens"]


class TestOptimizer:
    def test_schedule(self) -> None:
        config = make_config(steps=100, warmup_steps=4, learning_rate=1.0, final_learning_rate=0.1)
        rates = [float(learning_rate(config, step)) for step in range(101)]
        np.testing.assert_allclose(rates[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
        assert all(a > b for a, b in itertools.pairwise(rates[4:]))
        assert rates[52] == pytest.approx(0.55, abs=1e-6)
        assert rates[100] == pytest.approx(0.1, abs=1e-6)

    def test_warm_up_takes_a_tenth_at_most(self) -> None:
        config = make_config(steps=20, warmup_steps=1000)
        assert float(learning_rate(config, 2)) == pytest.approx(config.learning_rate)

    def step(self, config: TrainConfig, gradient: float) -> np.ndarray:
        """What one step does to weights of 1."""
        weights = jnp.ones((1, 2, 2))
        optimizer = make_optimizer(config)
        state = init_state(weights, optimizer)
        return np.asarray(apply_gradient(state, jnp.full_like(weights, gradient), optimizer).weights)

    def test_weight_decay(self) -> None:
        assert (self.step(make_config(learning_rate=0.1), 0.0) == 1).all()
        decayed = self.step(make_config(learning_rate=0.1, weight_decay=0.5), 0.0)
        np.testing.assert_allclose(decayed, 1 - 0.1 * 0.5, rtol=1e-6)

    def test_clipping(self) -> None:
        """Far below epsilon a step of AdamW is proportional to the gradient, so clipping shows."""
        tiny = 1e-3
        whole = 1 - self.step(make_config(learning_rate=1.0, max_grad_norm=0.0), tiny)
        clipped = 1 - self.step(make_config(learning_rate=1.0, max_grad_norm=1e-12), tiny)
        np.testing.assert_allclose(whole, tiny / (tiny + 1e-6), rtol=1e-4)
        assert (clipped < 1e-5).all()
        assert (clipped > 0).all()

    def test_as_the_published_trainer(self) -> None:
        """Against AdamW written out: betas 0.9 and 0.95, epsilon 1e-6 outside of the root."""
        config = make_config(steps=1000, learning_rate=1e-2, final_learning_rate=1e-2, max_grad_norm=0.5)
        optimizer = make_optimizer(config)
        rng = np.random.default_rng(0)
        weights = rng.standard_normal((2, 3, 4))
        state = init_state(jnp.asarray(weights, jnp.float32), optimizer)
        first = second = np.zeros_like(weights)
        for step in range(1, 6):
            gradient = rng.standard_normal(weights.shape)
            state = apply_gradient(state, jnp.asarray(gradient, jnp.float32), optimizer)
            gradient *= min(1, 0.5 / np.linalg.norm(gradient))
            first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
            mean, root = first / (1 - 0.9**step), np.sqrt(second / (1 - 0.95**step))
            weights = weights - 1e-2 * mean / (root + 1e-6)
        np.testing.assert_allclose(state.weights, weights, rtol=1e-4)
        assert all(leaf.dtype == np.float32 for leaf in leaves(state) if leaf.ndim)

    def test_reported_norms_and_use_of_the_device(self, tmp_path: Path) -> None:
        config = make_config(steps=1)
        record = run_training(tmp_path / "x", config, peak_flops=1e9).records[0]
        batch = make_rows(config, tiny_model()).batch(0)
        flops = Flops.of(tiny_model().config, batch.positions[batch.segments > 0]).total
        assert 1e9 * record["mfu"] / record["tokens_per_s"] == pytest.approx(flops / record["tokens"])
        assert record["grad_norm"] == pytest.approx(np.linalg.norm(record["layer_grad_norm"]), rel=1e-5)
        assert record["learning_rate"] == pytest.approx(5e-4)


class TestBadNumbers:
    def test_nan_in_the_base_ends_the_run_and_keeps_nothing_of_the_step(self, tmp_path: Path) -> None:
        graphdef, weights = nnx.split(tiny_model())
        broken = nnx.merge(graphdef, jax.tree.map(jnp.copy, weights))
        norm = broken.layers[1].input_layernorm.weight
        norm[...] = norm[...] * jnp.nan
        config = make_config()
        trainer = Trainer(
            config, ForwardPass(broken, make_mesh()), make_rows(config, broken), [], report=lambda record: None
        )
        with Checkpoints(tmp_path / "x", keep=1, identity={}) as checkpoints:
            with pytest.raises(TrainingError, match=r"step 1: layer_loss\[1\].* not finite.*look for NaN in the base"):
                trainer.run(trainer.initial_state(jnp.asarray(fresh_weights(broken.config, 0))), checkpoints)
            assert list(checkpoints.steps) == []

    def test_the_last_good_checkpoint_stays(self, tmp_path: Path) -> None:
        """A learning rate that blows the weights up in the first step: the second has no finite loss."""
        config = make_config(steps=4, save_every=1, learning_rate=1e38)
        with pytest.raises(TrainingError, match=r"step 2: layer_loss.* not finite.*lower --learning-rate"):
            run_training(tmp_path / "x", config)
        with Checkpoints(tmp_path / "x", keep=1, identity=config.identity()) as checkpoints:
            assert list(checkpoints.steps) == [1]


class TestLearning:
    """With one query head a KV head, layer 0's Forecast may equal its queries."""

    @pytest.fixture
    def validation(self) -> list[Batch]:
        return make_validation(make_config(), tiny_model(num_heads=2), topical_corpus(4, seed=1))

    def own_queries(self) -> np.ndarray:
        model = tiny_model(num_heads=2)
        weights = fresh_weights(model.config, 0)
        weights[0] = np.asarray(model.layers[0].self_attn.qkvf_proj.kernel[...])[:, : weights.shape[2]]
        return weights

    def test_it_learns_where_the_base_looks(self, tmp_path: Path, validation: list[Batch]) -> None:
        """Trained, it predicts the teacher better than the layer's own queries on the same keys do."""
        config = make_config(steps=100, learning_rate=2e-2, final_learning_rate=1e-3, save_every=50)
        rows = make_rows(config, tiny_model(num_heads=2), topical_corpus(40, seed=0))
        run = run_training(tmp_path / "x", config, validation=validation, rows=rows, num_heads=2)
        before, *_, after = (record for record in run.records if record["kind"] == "validation")
        aim = run_training(
            tmp_path / "aim", make_config(steps=1), validation=validation, weights=self.own_queries(), num_heads=2
        ).records[0]
        assert after["layer_loss"][0] < aim["layer_loss"][0] < 0.6 * before["layer_loss"][0]
        assert before["layer_teacher_recall"][0] < 0.45
        assert after["layer_teacher_recall"][0] > 0.6
        assert after["layer_student_mass"][0] > before["layer_student_mass"][0]
        assert run.best_step == min((50, 100), key={r["step"]: r["loss"] for r in run.records}.__getitem__)

    def test_own_queries_choose_what_the_selector_chooses(self, tmp_path: Path, validation: list[Batch]) -> None:
        record = run_training(
            tmp_path / "x", make_config(steps=1), validation=validation, weights=self.own_queries(), num_heads=2
        ).records[0]
        assert record["layer_selector_recall"][0] == 1
        assert record["layer_student_mass"][0] == pytest.approx(record["layer_selector_mass"][0])
        assert record["layer_selector_recall"][1] < 0.6
        assert record["layer_teacher_mass"][0] > record["layer_selector_mass"][0]
