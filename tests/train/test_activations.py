"""Layers that train on their own from kept activations, against joint training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparda_jax.train.activations import CachedForward
from sparda_jax.train.forecast import fresh_weights
from sparda_jax.train.forward import ForwardPass
from tests.train.support import Run, make_config, make_mesh, make_validation, run_training, tiny_model

LAYERS = 3


def alone(folder: Path, layers: tuple[int, ...], **changes: Any) -> Run:
    """A run of some layers, with activations in ``folder`` beside that of the run."""
    config = make_config(steps=3, save_every=3, layers=layers, **changes)
    model = tiny_model(layers=LAYERS)
    forward = CachedForward(model, make_mesh(), folder / "kept", layers)
    validation = make_validation(config, model)
    out = folder / "-".join(map(str, layers))
    return run_training(out, config, validation=validation, forward=forward, layers=LAYERS)


def together(folder: Path, **changes: Any) -> Run:
    config = make_config(steps=3, save_every=3, **changes)
    return run_training(folder, config, validation=make_validation(config, tiny_model(layers=LAYERS)), layers=LAYERS)


def test_each_layer_learns_what_it_learns_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no clipping by the norm of all layers ties them together. What a layer gets is the same bit for bit; the
    optimiser's program is another, and rounds otherwise.
    """
    joint = together(tmp_path / "joint", max_grad_norm=0.0, weight_decay=0.1)
    every = alone(tmp_path, (0, 1, 2), max_grad_norm=0.0, weight_decay=0.1)
    np.testing.assert_allclose(every.state.weights, joint.state.weights, rtol=0, atol=1e-6)
    for found, whole in zip(every.records[:2], joint.records[:2], strict=True):
        for name in found.keys() - {"tokens_per_s", "grad_norm", "layer_grad_norm"}:
            assert found[name] == whole[name], name

    # Now everything is kept, and the base runs no more.
    for name in ("embed", "advance"):
        monkeypatch.delattr(ForwardPass, name)
    one = alone(tmp_path, (1,), max_grad_norm=0.0, weight_decay=0.1)
    np.testing.assert_allclose(one.state.weights[1], joint.state.weights[1], rtol=0, atol=1e-6)
    for record, whole in zip(one.records[:2], joint.records[:2], strict=True):
        assert record["layer_loss"] == [None, whole["layer_loss"][1], None]
        assert record["loss"] == whole["layer_loss"][1]
        assert record.get("tokens") == whole.get("tokens")
    begun = fresh_weights(tiny_model(layers=LAYERS).config, make_config().seed)
    np.testing.assert_array_equal(one.state.weights[::2], begun[::2])


@pytest.mark.slow
def test_clipping_does_not_tie_layers_together(tmp_path: Path) -> None:
    every = alone(tmp_path, (0, 1, 2), max_grad_norm=1e-3)
    one = alone(tmp_path, (2,), max_grad_norm=1e-3)
    np.testing.assert_allclose(one.state.weights[2], every.state.weights[2], rtol=0, atol=1e-6)
    joint = together(tmp_path / "joint", max_grad_norm=1e-3)
    assert np.abs(np.asarray(joint.state.weights[2] - one.state.weights[2])).max() > 1e-5
