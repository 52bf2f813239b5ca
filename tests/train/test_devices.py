"""Four devices, which a CPU can stand for, train as one does, however rows, weights and tokens are shared out."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.train.checkpoints import Checkpoints
from sparda_jax.train.config import TrainConfig
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.forecast import fresh_weights
from sparda_jax.train.forward import ForwardPass, LayerSums
from sparda_jax.train.metrics import Record
from sparda_jax.train.trainer import Trainer
from tests.train.support import (
    make_config,
    make_mesh,
    make_rows,
    make_validation,
    random_corpus,
    run_training,
    tiny_model,
)

CONFIG = make_config(batch_size=8, micro_batch_size=4, steps=3, save_every=3)
MESHES = {"rows": {}, "weights and tokens": {"fsdp": 2, "sequence": 2}, "tokens": {"sequence": 4}}
LENGTHS = (500, 300, 400, 512, 350, 260, 480, 300, 230, 200, 512, 400)


def train(folder: Path, devices: int, **axes: int) -> list[Record]:
    """A run on a mesh of so many devices; what it reports, and the weights in a file."""
    folder.mkdir()
    model = tiny_model()
    records: list[Record] = []
    forward = ForwardPass(model, make_mesh(devices, **axes))
    rows, validation = make_rows(CONFIG, model, random_corpus(LENGTHS)), make_validation(CONFIG, model)
    trainer = Trainer(CONFIG, forward, rows, validation, report=records.append)
    with Checkpoints(folder / "checkpoints", keep=1, identity=CONFIG.identity()) as checkpoints:
        state = trainer.run(trainer.initial_state(jnp.asarray(fresh_weights(model.config, 7))), checkpoints)
    assert len(state.weights.sharding.device_set) == devices
    np.save(folder / "weights.npy", np.asarray(state.weights))
    return records


def exchanged() -> list[list[int]]:
    """Numbers in each array that devices with rows of their own exchange in a layer: to project, learn and advance."""
    forward = ForwardPass(tiny_model(), make_mesh(4))
    weights = forward.everywhere(fresh_weights(forward.config, 7))
    rows = forward.on_devices(make_rows(CONFIG, tiny_model(), random_corpus(LENGTHS)).batch(0))
    zeros = forward.everywhere((jnp.zeros_like(weights), LayerSums.zeros(len(weights))))
    x = forward.embed(rows)
    projected = forward.project(0, x, rows)
    graphdef, layer = forward._layers[0]
    inputs = (weights, forward._numbers[0], rows, projected.normed, projected, *zeros)
    blocks = jax.eval_shape(forward._learn, *inputs)[0]
    found = []
    for program, operands in (
        (forward._project[graphdef], (layer, x, rows)),
        (forward._learn, inputs),
        (forward._advance[graphdef], (layer, x, projected, blocks)),
    ):
        text = program.lower(*operands).compile().as_text()
        shapes = re.findall(r"= (.*?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\(", text)
        arrays = [dims for shape in shapes for dims in re.findall(r"\w\d+\[([\d,]*)\]", shape)]
        found.append([math.prod(int(size) for size in dims.split(",") if size) for dims in arrays])
    return found


def train_on_four(folder: Path) -> None:
    """Runs in ``folder``, each with its records in a file."""
    assert jax.device_count() == 4
    (folder / "exchanged.json").write_text(json.dumps(exchanged()))
    for name, axes in MESHES.items():
        (folder / f"{name}.json").write_text(json.dumps(train(folder / name, 4, **axes)))


def test_four_devices_train_as_one(tmp_path: Path) -> None:
    one = tmp_path / "one"
    code = (
        f"from pathlib import Path; from tests.train import test_devices as t; t.train_on_four(Path({str(tmp_path)!r}))"
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=root, env=env, check=True)
    # Devices with rows of their own have nothing to tell each other but one layer's gradient, and sums.
    projecting, learning, advancing = json.loads((tmp_path / "exchanged.json").read_text())
    assert projecting == advancing == []
    assert sorted(learning)[-1] == fresh_weights(tiny_model().config, 7)[0].size
    assert sum(learning) - max(learning) == len(learning) - 1 < 20
    expected = train(one, 1)
    for mesh in MESHES:
        found = json.loads((tmp_path / f"{mesh}.json").read_text())
        assert [(r["kind"], r["step"]) for r in found] == [(r["kind"], r["step"]) for r in expected]
        for a, b in zip(found, expected, strict=True):
            for name in b.keys() - {"kind", "tokens_per_s", "mfu"}:
                assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-7), (mesh, name)
        weights = np.load(tmp_path / mesh / "weights.npy")
        np.testing.assert_allclose(weights, np.load(one / "weights.npy"), rtol=0, atol=1e-5)
        # One device goes on with what four have written.
        config = make_config(batch_size=8, micro_batch_size=4, steps=3, save_every=3)
        resumed = run_training(tmp_path / mesh / "checkpoints", config, resume=True)
        np.testing.assert_array_equal(resumed.state.weights, weights)


def test_rows_that_devices_cannot_share() -> None:
    config: TrainConfig = make_config(batch_size=6, micro_batch_size=2)
    config.check_devices(2)
    with pytest.raises(TrainingError, match=r"micro_batch_size=2 .* 4 devices; use a multiple of 4"):
        config.check_devices(4)
