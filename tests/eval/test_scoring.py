"""Scores of answers on strings made by hand, and intervals against what they are meant to hold."""

import numpy as np
import pytest

from sparda_jax.eval.scoring import best_match, share_matched
from sparda_jax.eval.statistics import mean_of_tasks, wilson


@pytest.mark.parametrize(
    ("answer", "references", "all_of_them", "any_of_them"),
    [
        (" 1234567.", ["1234567"], 1.0, 1.0),
        ("", ["1"], 0.0, 0.0),
        ("It is ABC and def", ["abc", "DEF", "ghi"], 2 / 3, 1.0),
        ("\x00\nabc\x1f", ["abc"], 1.0, 1.0),
        ("12345678", ["1234567"], 1.0, 1.0),  # a substring counts, as in RULER
        ("a\tb", ["a\tb"], 0.0, 0.0),  # control characters of an answer become line ends
    ],
)
def test_rulers_string_matches(answer: str, references: list[str], all_of_them: float, any_of_them: float) -> None:
    assert share_matched(answer, references) == pytest.approx(all_of_them)
    assert best_match(answer, references) == any_of_them


def test_the_average_counts_tasks_alike_and_covers_the_truth() -> None:
    """Two tasks of known means with unequal numbers of prompts: 95 % of the intervals hold the mean of the means."""
    rng, held = np.random.default_rng(7), 0
    for seed in range(300):
        tasks = [(rng.random(40) < 0.9).astype(float), rng.random(80) * 0.4]
        found = mean_of_tasks(tasks, seed)
        assert found.mean == pytest.approx((tasks[0].mean() + tasks[1].mean()) / 2)
        held += found.low <= 0.55 <= found.high
    assert 0.9 * 300 < held < 0.99 * 300


def test_a_paired_difference_is_narrower_than_the_scores() -> None:
    scores = (np.random.default_rng(8).random(100) < 0.5).astype(float)
    other = scores.copy()
    other[:3] = 1 - other[:3]
    alone, paired = mean_of_tasks([scores]), mean_of_tasks([scores - other])
    assert paired.high - paired.low < (alone.high - alone.low) / 2
    assert mean_of_tasks([scores - scores]).high == 0.0
    assert mean_of_tasks([scores]) == alone


def test_wilson_is_wide_enough_for_shares_of_references() -> None:
    """Scores of quarters with mean 0.7: their mean lies within the interval more often than 95 %."""
    rng, held = np.random.default_rng(9), 0
    for _ in range(400):
        scores = rng.binomial(4, 0.7, 30) / 4
        low, high = wilson(float(scores.mean()), 30)
        held += low <= 0.7 <= high
    assert held >= 0.95 * 400
