"""Tasks whose prompt is one text, in RULER's layout: chains of variables, common and frequent words, reading.

The wording is RULER's (its misspelling included), since a small model learns what it is told; words, names, numbers
and, in reading, the sentences are not those of `sparda_jax.eval`. A document asks once or several times about the same
text. Sizes are fitted to the length asked for.
"""

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np

from sparda_jax.pretrain.facts import Exchange, FactSampler, answer_pieces
from sparda_jax.pretrain.haystack import RULER_NOISE
from sparda_jax.pretrain.reading import Reading
from sparda_jax.pretrain.task_words import WordLists

WORDED_KINDS = ("chains", "common", "frequent", "reading")

# Tokens of the chat template around a question and its answer, generously.
_TEMPLATE_TOKENS = 32
_MOST_COMMON = 10
_CODED_LETTERS = 6

_CHAINS_TASK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n{question}"
)
_CHAINS_QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
_CHAINS_ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the "
    "value {value}, they are: "
)
_COMMON_TASK = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
_COMMON_ANSWER = " Answer: The top 10 words that appear most often in the list are:"
_FREQUENT_TASK = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?"
)
_FREQUENT_ANSWER = " Answer: According to the coded text above, the three most frequently appeared words are:"


class WordedTasks:
    """Draws such documents.

    Args:
        words: word lists of the split.
        facts: draws names and numbers.
        tokens_of: length of a text in tokens.
    """

    def __init__(self, words: WordLists, facts: FactSampler, tokens_of: Callable[[str], int]) -> None:
        self._facts, self._tokens_of = facts, tokens_of
        self._words = tuple(sorted({*words.nouns, *words.adjectives}))
        self._reading = Reading(words, facts)
        # Kind: what makes it of a size, the smallest size, and about what one more costs in tokens.
        self._makers = {
            "chains": (self._chains, 6, 22),
            "common": (self._common, 4 * _MOST_COMMON + 1, 6),
            "frequent": (self._frequent, 100, 3),
            "reading": (self._reading.draw, 2, 70),
        }

    def draw(self, rng: np.random.Generator, kind: str, length: int) -> list[Exchange]:
        """Questions, the first of which holds the whole text, of about ``length`` tokens and hardly more.

        Args:
            kind: one of `WORDED_KINDS`.
        """
        make, least, unit = self._makers[kind]
        size = max(least, length // unit)
        while True:
            exchanges = make(rng, size)
            first = exchanges[0].question + "".join(text for text, _ in exchanges[0].answer)
            used = self._tokens_of(first) + _TEMPLATE_TOKENS
            if used <= length or size == least:
                return exchanges
            size = max(least, min(size - 1, int(0.97 * size * length / used)))

    def _chains(self, rng: np.random.Generator, size: int) -> list[Exchange]:
        """``size`` sentences of noise around one chain or a few; in front of them, mostly, an example."""
        example = self._tracked(rng, 10, 3, 1) if rng.random() < 0.7 and size > 30 else None
        exchanges = self._tracked(rng, size, 5, 1 if rng.random() < 0.4 else int(rng.integers(2, 5)))
        if example is None:
            return exchanges
        shown = example[0].question + "".join(text for text, _ in example[0].answer)
        first = exchanges[0]
        text = f"{shown}\n\n{first.question}"
        return [Exchange(question=text, answer=first.answer, values=first.values), *exchanges[1:]]

    def _tracked(self, rng: np.random.Generator, size: int, letters: int, chains: int) -> list[Exchange]:
        pieces = [f"{RULER_NOISE}\n"] * size
        placed: list[tuple[int, str]] = []
        found: list[tuple[str, tuple[str, ...]]] = []
        taken: set[str] = set()
        links = min(size, int(rng.integers(3, 6)))
        for _ in range(chains):
            value = self._facts.unused(lambda: self._facts.number(rng, 5), taken)
            names = [self._facts.unused(lambda: _letters(rng, letters, "A"), taken) for _ in range(links)]
            steps = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names))]
            places = np.sort(rng.choice(size, links, replace=False))
            placed += zip(places.tolist(), steps, strict=True)
            found.append((value, tuple(names)))
        for place, step in sorted(placed, key=lambda p: -p[0]):
            pieces.insert(place, step)
        context = " ".join(pieces).replace(". \n", ".\n")
        exchanges = []
        for value, names in found:
            question = _CHAINS_QUESTION.format(value=value)
            if not exchanges:
                question = _CHAINS_TASK.format(context=context, question=question)
            begun = _CHAINS_ANSWER.format(count=len(names), value=value)
            answer = answer_pieces(begun + " ".join("\0" * len(names)), names)
            if rng.random() < 0.5:
                # As RULER asks: the words up to the names are given, the space in front of the first among them.
                answer = ((begun, False), *answer_pieces(" ".join("\0" * len(names)), names))
            exchanges.append(Exchange(question=question, answer=answer, values=names))
        return exchanges

    def _common(self, rng: np.random.Generator, size: int) -> list[Exchange]:
        """``size`` entries, ten words of them often; in front, mostly, an example."""
        often = int(rng.integers(4, min(30, max(4, size // 20)) + 1))
        seldom = int(rng.integers(1, min(3, often // 3) + 1))
        others = max(1, (size - _MOST_COMMON * often) // seldom)
        asked = self._counted(rng, _MOST_COMMON + others, often, seldom)
        if size > 400 and rng.random() < 0.7:
            shown = self._counted(rng, 40, 10, 3)
            text = shown.question + "".join(text for text, _ in shown.answer) + "\n" + asked.question
            asked = Exchange(question=text, answer=asked.answer, values=asked.values)
        return [asked]

    def _counted(self, rng: np.random.Generator, size: int, often: int, seldom: int) -> Exchange:
        chosen = [self._words[i] for i in rng.permutation(len(self._words))[:size]]
        while len(chosen) < size:
            joined = "".join(self._words[i] for i in rng.integers(len(self._words), size=2))
            chosen = [*chosen, joined] if joined not in chosen else chosen
        entries = chosen[:_MOST_COMMON] * often + chosen[_MOST_COMMON:] * seldom
        entries = [entries[i] for i in rng.permutation(len(entries))]
        # In the order in which they first come: one that can be known.
        common = set(chosen[:_MOST_COMMON])
        values = tuple(word for word in dict.fromkeys(entries) if word in common)
        context = " ".join(f"{i}. {word}" for i, word in enumerate(entries, start=1))
        template = _COMMON_ANSWER + "".join(f" {i}. \0" for i in range(1, len(values) + 1))
        question = _COMMON_TASK.format(context=context)
        return Exchange(question=question, answer=answer_pieces(template, values), values=values)

    def _frequent(self, rng: np.random.Generator, size: int) -> list[Exchange]:
        """``size`` coded words whose frequencies fall with a power of the rank; the most frequent one is dots."""
        vocabulary = dict.fromkeys(_letters(rng, _CODED_LETTERS, "a") for _ in range(max(8, size // 12)))
        ranks = np.arange(1, len(vocabulary) + 2)
        shares = ranks ** -rng.uniform(1.5, 2.5)
        counts = (size * shares / shares.sum()).astype(int)
        words = ["...", *vocabulary]
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        text = [text[i] for i in rng.permutation(len(text))]
        counter = Counter(text)
        del counter["..."]
        values = tuple(word for word, _ in counter.most_common(3))
        question = _FREQUENT_TASK.format(context=" ".join(text))
        answer = answer_pieces(_FREQUENT_ANSWER + " \0" * len(values), values)
        return [Exchange(question=question, answer=answer, values=values)]


def _letters(rng: np.random.Generator, count: int, first: str) -> str:
    return "".join(chr(ord(first) + letter) for letter in rng.integers(26, size=count))
