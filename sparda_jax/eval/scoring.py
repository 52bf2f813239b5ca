"""RULER's scores of answers, from 0 to 1."""

import re
from collections.abc import Callable, Sequence

Score = Callable[[str, Sequence[str]], float]
"""Of an answer, given the references."""


def share_matched(answer: str, references: Sequence[str]) -> float:
    """RULER's ``string_match_all``: the share of the references that the answer holds, whatever their case."""
    answer = _readable(answer).lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def best_match(answer: str, references: Sequence[str]) -> float:
    """RULER's ``string_match_part``: 1 if the answer holds any of the references."""
    answer = _readable(answer).lower()
    return float(any(reference.lower() in answer for reference in references))


def _readable(answer: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip()
