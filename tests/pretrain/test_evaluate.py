"""The interval of a recall, and the evaluation's errors."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.checkpoint import CheckpointError
from sparda_jax.pretrain.evaluate import RecallResult, load_modes
from sparda_jax.selection import Mode

RESULT = RecallResult(kind="single", length=1, mode="dense", prompts=100, right=90, values_found=1.0, read_fraction=1.0)


@pytest.mark.parametrize(("right", "prompts"), [(90, 100), (1, 7), (63, 64)])
def test_interval_holds_the_probabilities_that_are_not_refuted(right: int, prompts: int) -> None:
    """Wilson's definition: at its ends the recall lies 1.96 standard deviations of the *true* probability away."""
    found = dataclasses.replace(RESULT, right=right, prompts=prompts)
    grid = np.linspace(0, 1, 200_001)
    inside = grid[np.abs(found.recall - grid) <= 1.959964 * np.sqrt(grid * (1 - grid) / prompts)]
    np.testing.assert_allclose(found.interval, (inside[0], inside[-1]), atol=1e-5)


def test_interval_of_all_and_none() -> None:
    low, high = dataclasses.replace(RESULT, right=100).interval
    assert (round(low, 4), high) == (0.9630, 1.0)
    low, high = dataclasses.replace(RESULT, right=0).interval
    assert (low, round(high, 4)) == (0.0, 0.0370)


def test_a_missing_forecast_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.safetensors"):
        load_modes(BUNDLED_MODEL, [Mode.SPARDA], 512, forecast=tmp_path / "absent.safetensors")
