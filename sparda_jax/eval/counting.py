"""RULER's two aggregation tasks: which words of a list, or of a coded text, come most often."""

import math
import random
import string

from sparda_jax.eval.prompting import Question
from sparda_jax.eval.words import sample_words

COMMON = 10
_CODED_LETTERS = 6
_WORDS_TASK = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_WORDS_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_CODED_TASK = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
_CODED_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


def common_words(rng: random.Random, size: int, length: int) -> Question:
    """A question, behind an example; ``size`` counts different words, of which ten are common."""
    example = _listed(rng, 20, 3, 1) if length < 4096 else _listed(rng, 40, 10, 3)
    asked = _listed(rng, size, 6, 1) if length < 4096 else _listed(rng, size, 30, 3)
    answer = " ".join(f"{i}. {word}" for i, word in enumerate(example.references, start=1))
    return Question(
        text=f"{example.text}{example.prefix} {answer}\n{asked.text}",
        prefix=asked.prefix,
        references=asked.references,
    )


def _listed(rng: random.Random, size: int, of_common: int, of_others: int) -> Question:
    words = sample_words(rng, size)
    entries = words[:COMMON] * of_common + words[COMMON:] * of_others
    rng.shuffle(entries)
    context = " ".join(f"{i}. {word}" for i, word in enumerate(entries, start=1))
    return Question(text=_WORDS_TASK.format(context=context), prefix=_WORDS_PREFIX, references=tuple(words[:COMMON]))


def frequent_words(rng: random.Random, size: int, length: int) -> Question:
    """A question; ``size`` counts words of the text, whose frequencies follow a zeta distribution with exponent 2.

    The most frequent "word" is noise, three dots; asked for are the second to fourth.
    """
    vocabulary: dict[str, None] = {}
    while len(vocabulary) < max(length // 50, 8):
        vocabulary["".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS))] = None
    words = ["...", *list(vocabulary)[1:]]
    zeta = math.pi**2 / 6
    text = [word for rank, word in enumerate(words, start=1) for _ in range(int(size / rank**2 / zeta))]
    rng.shuffle(text)
    return Question(text=_CODED_TASK.format(context=" ".join(text)), prefix=_CODED_PREFIX, references=tuple(words[1:4]))
