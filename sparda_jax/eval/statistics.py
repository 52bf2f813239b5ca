"""Intervals of scores: of a task, of the average over tasks, of the difference between modes on the same prompts."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

_Z = 1.959964  # two-sided 95 % of a normal distribution
_RESAMPLES = 4000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, which stays sensible at 0 and 1.

    For scores between 0 and 1 as well as for yes and no: with the same mean they vary no more, so the interval is at
    least as wide as it has to be.

    Args:
        share: the mean, from 0 to 1.
        count: of how many.
    """
    scale = 1 / (1 + _Z**2 / count)
    centre = scale * (share + _Z**2 / (2 * count))
    half = scale * _Z * math.sqrt((share * (1 - share) + _Z**2 / (4 * count)) / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_of_tasks(scores: Sequence[Float[np.ndarray, "prompts"]], seed: int = 0) -> Estimate:
    """The mean of the tasks' means, with the interval of a bootstrap that draws prompts within each task.

    Args:
        scores: of each task; differences between two modes, prompt by prompt, give a paired interval.
        seed: of the bootstrap.
    """
    rng = np.random.default_rng(seed)
    drawn = np.zeros(_RESAMPLES)
    for task in scores:
        drawn += task[rng.integers(len(task), size=(_RESAMPLES, len(task)))].mean(axis=1)
    low, high = np.quantile(drawn / len(scores), [0.025, 0.975])
    mean = float(np.mean([task.mean() for task in scores]))
    return Estimate(mean=mean, low=float(low), high=float(high))
