"""LongBench's and HELMET's metrics on strings made by hand."""

import math

import pytest

from sparda_jax.eval.text_scores import (
    class_named,
    first_line,
    line_similarity,
    numbers_right,
    ranking_gain,
    rouge_l,
    substring_exact_match,
    word_f1,
)


def test_words() -> None:
    assert substring_exact_match("Answer: The Eiffel-Tower, of course", ["the eiffeltower"]) == 1.0
    assert substring_exact_match("Eiffel", ["Eiffel Tower"]) == 0.0
    assert word_f1("The cat sat.", ["a cat sat down", "dog"]) == pytest.approx(2 * 2 / (2 + 3))
    assert word_f1("", ["cat"]) == 0.0


@pytest.mark.parametrize(
    ("answer", "reference", "same", "words"),
    [
        ("a b c d", "a x c d", 3, 8),
        ("b a", "a b", 1, 4),
        ("", "a", 0, 1),
        ("a a b", "a b b", 2, 4),  # words count once
        # Each sentence of the reference meets each of the answer, whatever their order.
        ("c d. a b", "a b. c d", 4, 8),
        ("a b c", "c. b. a", 3, 6),
        ("a x b y", "b a. y", 2, 7),  # of a and b, which are as long, one counts
    ],
)
def test_rouge_l(answer: str, reference: str, same: int, words: int) -> None:
    assert rouge_l(answer, ["nothing alike", reference]) == pytest.approx(2 * same / words)


def test_numbers() -> None:
    assert numbers_right("Paragraph 7", ["Paragraph 7"]) == 1.0
    assert numbers_right("7 or 8 or 7", ["7"]) == pytest.approx(2 / 3)
    assert numbers_right("none", ["7"]) == 0.0


def test_classes() -> None:
    score = class_named(["Food", "Other location", "Location", "Other"])
    assert score("Food", ["Food"]) == 1.0
    assert score("Food or Other", ["Food"]) == 0.5
    assert score("Other location", ["Other location"]) == 1.0  # Other is part of the right one
    assert score("Location", ["Food"]) == 0.0


def test_code() -> None:
    assert line_similarity("\n```\n# x\nreturn a + b\nrest", ["return a + b"]) == 1.0
    assert line_similarity("", ["return"]) == 0.0
    assert 0 < line_similarity("return a", ["return b"]) < 1


def test_the_first_line_that_holds_something() -> None:
    assert first_line(word_f1)("\n\ncat\ndog dog dog", ["cat"]) == 1.0


def test_rankings() -> None:
    labels = ["1:0", "2:3", "3:1"]
    best = 3 / math.log2(2) + 1 / math.log2(3)
    assert ranking_gain("Ranking: ID2 > ID3 > ID1", labels) == 1.0
    assert ranking_gain("I say [ID: 3] > [ID: 2] > 2 > 9", labels) == pytest.approx(
        (1 / math.log2(2) + 3 / math.log2(3)) / best
    )
    assert ranking_gain("no idea", labels) == 0.0
    # What comes behind ten others does not count.
    many = [f"{i}:0" for i in range(1, 12)] + ["50:1"]
    assert ranking_gain(" > ".join(map(str, [*range(1, 11), 50])), many) == 0.0
