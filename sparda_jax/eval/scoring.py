"""Scores of answers, from 0 to 1: RULER's, and the metrics of LongBench and HELMET that need no judge."""

import collections
import re
import string
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


def normalized(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces, as SQuAD's evaluation has it."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def substring_exact_match(answer: str, references: Sequence[str]) -> float:
    """HELMET's ``substring_exact_match``: 1 if a reference stands in the answer, both normalized."""
    answer = normalized(answer)
    return float(any(normalized(reference) in answer for reference in references))


def word_f1(answer: str, references: Sequence[str]) -> float:
    """F1 of the normalized words, of the reference that fits best."""
    return max(_f1(normalized(answer).split(), normalized(reference).split()) for reference in references)


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L's F1 on words as they stand, of the reference that fits best."""
    return max(_rouge_l(answer.split(), reference.split()) for reference in references)


def _f1(found: list[str], expected: list[str]) -> float:
    same = sum((collections.Counter(found) & collections.Counter(expected)).values())
    return 2 * same / (len(found) + len(expected)) if same else 0.0


def _rouge_l(found: list[str], expected: list[str]) -> float:
    row = [0] * (len(expected) + 1)
    for word in found:
        diagonal = 0
        for i, other in enumerate(expected, start=1):
            diagonal, row[i] = row[i], diagonal + 1 if word == other else max(row[i], row[i - 1])
    return 2 * row[-1] / (len(found) + len(expected)) if row[-1] else 0.0
