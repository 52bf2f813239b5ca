"""Scores of texts, from 0 to 1: the metrics of LongBench and HELMET that need no judge."""

import collections
import difflib
import math
import re
import string
from collections.abc import Sequence

from sparda_jax.eval.scoring import Score


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


def _f1(found: list[str], expected: list[str]) -> float:
    same = sum((collections.Counter(found) & collections.Counter(expected)).values())
    return 2 * same / (len(found) + len(expected)) if same else 0.0


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """LongBench's ROUGE-L (package ``rouge``), of the reference that fits best.

    The different words of the longest common subsequences of all pairs of sentences, against the different words of
    either text: F1. Sentences end at full stops, words at spaces.
    """
    return max(_rouge_l(answer, reference) for reference in references)


def _rouge_l(answer: str, reference: str) -> float:
    found, expected = ([part.split() for part in text.split(".")] for text in (answer, reference))
    words = [{word for sentence in text for word in sentence} for text in (found, expected)]
    same = {word for one in found for other in expected for word in _common_subsequence(other, one)}
    return 2 * len(same) / (len(words[0]) + len(words[1])) if same else 0.0


def _common_subsequence(first: list[str], second: list[str]) -> list[str]:
    """The longest one; of several as long, that which a walk back through the table meets."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first, start=1):
        for j, other in enumerate(second, start=1):
            longer = max(table[i - 1][j], table[i][j - 1])
            table[i][j] = table[i - 1][j - 1] + 1 if one == other else longer
    i, j, found = len(first), len(second), []
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            found.append(first[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def numbers_right(answer: str, references: Sequence[str]) -> float:
    """LongBench's count and retrieval: of the numbers in the answer, the share that are the reference's first one."""
    numbers = re.findall(r"\d+", answer)
    return max(numbers.count(re.findall(r"\d+", reference)[0]) for reference in references) / max(1, len(numbers))


def class_named(classes: Sequence[str]) -> Score:
    """LongBench's classification: 1 over the number of classes that the answer names, if the right one is among them.

    A class whose name is part of the right one's does not count.
    """

    def score(answer: str, references: Sequence[str]) -> float:
        def of(right: str) -> float:
            named = [name for name in classes if name in answer and (name == right or name not in right)]
            return 1 / len(named) if right in named else 0.0

        return max(map(of, references))

    return score


def line_similarity(answer: str, references: Sequence[str]) -> float:
    """LongBench's code similarity: of the first line that is no comment and no fence, in whole percents."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    ratios = (difflib.SequenceMatcher(None, line, reference).ratio() for reference in references)
    return max(round(100 * ratio) / 100 for ratio in ratios)


def first_line(score: Score) -> Score:
    """Looks at the first line that holds something."""
    return lambda answer, references: score(answer.lstrip("\n").split("\n")[0], references)


def ranking_gain(answer: str, references: Sequence[str]) -> float:
    """HELMET's NDCG@10 of a ranking ``ID3 > ID1 > ...``.

    Args:
        answer: the longest chain of numbers in it counts, each number at its first place.
        references: ``ID:LABEL`` of every document; larger labels are better.
    """
    labels = {name: int(label) for name, _, label in (reference.rpartition(":") for reference in references)}
    plain = re.sub(r"[\[\]:]", "", answer).lower().replace("id", "")
    chain = max((match[0] for match in re.finditer(r"\d+(?:\s*>\s*\d+)*", plain)), key=len, default="")
    ranked = dict.fromkeys(re.findall(r"\d+", chain))
    best = _discounted(sorted(labels.values(), reverse=True))
    return _discounted([labels.get(name, 0) for name in ranked]) / best if best else 0.0


def _discounted(labels: Sequence[int]) -> float:
    return sum(label / math.log2(place + 2) for place, label in enumerate(labels[:10]))
