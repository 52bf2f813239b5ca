"""Training on a GPU: the CPU's numbers, the same bits every time, and bfloat16."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.train import mesh
from sparda_jax.train.forecast import fresh_weights
from sparda_jax.train.forward import ForwardPass, LayerSums
from tests.train.support import leaves, make_config, make_mesh, make_rows, random_corpus, run_training, tiny_model

pytestmark = pytest.mark.gpu


def learn(forward: ForwardPass) -> tuple[np.ndarray, LayerSums]:
    """Gradient and sums of one batch of three documents."""
    weights = fresh_weights(forward.config, 3)
    rows = forward.on_devices(make_rows(make_config(), tiny_model(), random_corpus((200, 250, 300))).batch(0))
    zeros = forward.everywhere((np.zeros_like(weights), LayerSums.zeros(len(weights))))
    gradient, sums = forward.learn(forward.everywhere(weights), rows, *zeros)
    return np.asarray(gradient), jax.device_get(sums)


def test_as_on_a_cpu() -> None:
    gradient, sums = learn(ForwardPass(tiny_model(), make_mesh()))
    cpu = ForwardPass(tiny_model(), mesh.make_mesh(jax.devices("cpu")[:1]))
    expected, expected_sums = learn(cpu)
    np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=1e-4)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_interrupted_and_resumed_is_never_interrupted(tmp_path: Path) -> None:
    config = make_config(steps=4, save_every=2)
    whole = run_training(tmp_path / "whole", config)
    stopped = run_training(tmp_path / "parts", config, should_stop=lambda: True)
    assert list(stopped.steps) == [1]
    resumed = run_training(tmp_path / "parts", config, resume=True)
    for a, b in zip(leaves(resumed.state), leaves(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_base_in_bfloat16() -> None:
    graphdef, weights = nnx.split(tiny_model())
    halved = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights))
    gradient, sums = learn(ForwardPass(halved, make_mesh()))
    expected, expected_sums = learn(ForwardPass(tiny_model(), make_mesh()))
    np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=0.1)
    for layer in range(2):
        a, b = gradient[layer].ravel(), expected[layer].ravel()
        assert a @ b > 0.95 * np.linalg.norm(a) * np.linalg.norm(b)
