"""Checkpoints of training: by step, whole or not at all, of one run."""

import gc
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.train.checkpoints import Checkpoints
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.state import TrainState, apply_gradient, init_state, make_optimizer
from tests.train.support import leaves, make_config

# When orbax can't read or write one array, it forgets those that wait behind it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

IDENTITY = {"seed": 7, "data": "abc"}
OPTIMIZER = make_optimizer(make_config())


@pytest.fixture(autouse=True)
def forgotten_tasks() -> Iterator[None]:
    """Python reports a forgotten task when it collects it: now, and not in some other test."""
    yield
    gc.collect()


def state_at(step: int, size: int = 8) -> TrainState:
    """Other weights and moments at every step."""
    state = init_state(jnp.full((2, size, 4), float(step)), OPTIMIZER)
    if step:
        state = apply_gradient(state, jnp.full((2, size, 4), 0.1 * step), OPTIMIZER)
    return TrainState(weights=state.weights, opt_state=state.opt_state, step=jnp.int32(step))


def open_checkpoints(folder: Path, keep: int = 2, identity: dict[str, Any] = IDENTITY) -> Checkpoints:
    return Checkpoints(folder, keep=keep, identity=identity)


def saved(folder: Path, *steps: int, **arguments: Any) -> Path:
    with open_checkpoints(folder, **arguments) as checkpoints:
        for step in steps:
            checkpoints.save(state_at(step), None)
    return folder


class TestKeeping:
    def test_the_newest_and_the_best(self, tmp_path: Path) -> None:
        losses = {1: 0.5, 2: 0.2, 3: 0.4, 4: 0.3, 5: 0.6}
        with open_checkpoints(tmp_path / "x") as checkpoints:
            assert checkpoints.best_step is None
            for step, loss in losses.items():
                checkpoints.save(state_at(step), loss)
            assert list(checkpoints.steps) == [2, 4, 5]
        with open_checkpoints(tmp_path / "x") as checkpoints:
            assert list(checkpoints.steps) == [2, 4, 5]
            assert checkpoints.best_step == 2

    def test_without_validation_the_newest(self, tmp_path: Path) -> None:
        with open_checkpoints(saved(tmp_path / "x", 1, 10, 9 + 90)) as checkpoints:
            assert list(checkpoints.steps) == [10, 99]
            assert checkpoints.best_step is None

    def test_later_steps_can_be_dropped(self, tmp_path: Path) -> None:
        saved(tmp_path / "x", 1, 2, 3, keep=3)
        with open_checkpoints(tmp_path / "x", keep=3) as checkpoints:
            checkpoints.drop_after(1)
            assert list(checkpoints.steps) == [1]
            checkpoints.save(state_at(2), None)
        assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["1", "2"]


class TestRestoring:
    @pytest.mark.parametrize(("asked", "step"), [(None, 20), (3, 3)])
    def test_bit_for_bit(self, tmp_path: Path, asked: int | None, step: int) -> None:
        """By number, whatever the files' times say."""
        saved(tmp_path / "x", 20)
        saved(tmp_path / "x", 3)
        with open_checkpoints(tmp_path / "x") as checkpoints:
            found = checkpoints.restore(asked, state_at(0))
        assert jax.tree.structure(found) == jax.tree.structure(state_at(0))
        for a, b in zip(leaves(found), leaves(state_at(step)), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)

    def test_a_step_that_is_not_there(self, tmp_path: Path) -> None:
        with (
            open_checkpoints(saved(tmp_path / "x", 1, 2)) as checkpoints,
            pytest.raises(TrainingError, match="no step 5; there are 1, 2"),
        ):
            checkpoints.restore(5, state_at(0))

    def test_nothing_to_go_on_with(self, tmp_path: Path) -> None:
        with (
            open_checkpoints(tmp_path / "x") as checkpoints,
            pytest.raises(TrainingError, match="holds no checkpoint"),
        ):
            checkpoints.restore(None, state_at(0))

    def test_another_run(self, tmp_path: Path) -> None:
        saved(tmp_path / "x", 1)
        with (
            open_checkpoints(tmp_path / "x", identity=IDENTITY | {"seed": 8}) as checkpoints,
            pytest.raises(TrainingError, match=r"another run:\n  seed: 7 then, 8 now\n"),
        ):
            checkpoints.restore(None, state_at(0))

    def test_another_model(self, tmp_path: Path) -> None:
        saved(tmp_path / "x", 1)
        with (
            open_checkpoints(tmp_path / "x") as checkpoints,
            pytest.raises(TrainingError, match="step 1 can't be read"),
        ):
            checkpoints.restore(None, state_at(0, size=16))

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        saved(tmp_path / "x", 1, 2)
        for file in (tmp_path / "x" / "2" / "state").rglob("*"):
            if file.is_file() and file.parent.name == "d":
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with open_checkpoints(tmp_path / "x") as checkpoints:
            with pytest.raises(TrainingError, match=r"step 2 can't be read .* --resume-step: 1"):
                checkpoints.restore(None, state_at(0))
            assert int(checkpoints.restore(1, state_at(0)).step) == 1


@pytest.fixture
def tiny_disk() -> Iterator[None]:
    """No file can grow beyond 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestFailedWrites:
    def test_a_full_disk_leaves_the_earlier_checkpoints(self, tmp_path: Path, tiny_disk: None) -> None:
        noise = np.random.default_rng(0).standard_normal((2, 2**14, 4))
        with open_checkpoints(saved(tmp_path / "x", 1), keep=1) as checkpoints:
            large = init_state(jnp.asarray(noise, jnp.float32), OPTIMIZER)
            large = TrainState(weights=large.weights, opt_state=large.opt_state, step=jnp.int32(2))
            with pytest.raises(TrainingError, match=r"step 2 can't be written .*; step 1 is kept"):
                checkpoints.save(large, None)
        with open_checkpoints(tmp_path / "x", keep=1) as checkpoints:
            assert list(checkpoints.steps) == [1]
            assert int(checkpoints.restore(None, state_at(0)).step) == 1

    def test_a_killed_process_leaves_whole_checkpoints_only(self, tmp_path: Path) -> None:
        """Killed at the first file that the second checkpoint writes under its final data folder."""
        script = f"""
import os, signal, threading, time
from pathlib import Path
from tests.train.test_checkpoints import open_checkpoints, state_at
folder = Path({str(tmp_path / "x")!r})
with open_checkpoints(folder) as checkpoints:
    checkpoints.save(state_at(1), None)
    def watch():
        while not [p for p in folder.iterdir() if p.name.startswith("2")]:
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, daemon=True).start()
    checkpoints.save(state_at(2), None)
    time.sleep(5)
"""
        root = Path(__file__).parents[2]
        done = subprocess.run([sys.executable, "-c", script], cwd=root, env={"JAX_PLATFORMS": "cpu"}, check=False)
        assert done.returncode == -9
        assert len(list((tmp_path / "x").iterdir())) == 2, "the second checkpoint was to be half-written"
        with open_checkpoints(tmp_path / "x") as checkpoints:
            assert list(checkpoints.steps) == [1]
            assert [p.name for p in (tmp_path / "x").iterdir()] == ["1"]
            checkpoints.save(state_at(2), None)
            assert int(checkpoints.restore(None, state_at(0)).step) == 2
