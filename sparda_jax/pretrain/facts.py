"""Keys, values, facts, and the questions about them, as text."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sparda_jax.pretrain.task_words import WordLists, is_eval_word
from sparda_jax.pretrain.wordings import Wording, listed

_MARK = "\0"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A key with its values, the wording that states them and the noun of the value's type."""

    wording: Wording
    noun: str
    key: str
    values: tuple[str, ...]

    def needles(self) -> list[str]:
        """One sentence for each value."""
        return [self.wording.needle.format(t=self.noun, k=self.key, v=value) for value in self.values]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A question and its answer.

    Attributes:
        question: text of the question.
        answer: pieces of the answer, each with a flag that is true where the piece is a value.
        values: the values that a right answer holds.
    """

    question: str
    answer: tuple[tuple[str, bool], ...]
    values: tuple[str, ...]


def answer_pieces(template: str, values: tuple[str, ...]) -> tuple[tuple[str, bool], ...]:
    """Cuts an answer into pieces around its values; a space before a value belongs to the value.

    Args:
        template: the answer with a NUL character where each value goes.
        values: as many values.
    """
    parts = template.split(_MARK)
    pieces: list[tuple[str, bool]] = []
    for i, part in enumerate(parts):
        value = values[i] if i < len(values) else ""
        if part.endswith(" ") and value:
            part, value = part[:-1], " " + value
        pieces += [(part, False), (value, True)]
    return tuple((text, is_value) for text, is_value in pieces if text)


def ask_one(fact: Fact, *, short: bool) -> Exchange:
    """The question for a key's only value."""
    wording = fact.wording
    question = wording.short_question(fact.noun) if short else wording.question
    template = f"{_MARK}." if short else wording.answer.format(t=fact.noun, k=fact.key, v=_MARK)
    return Exchange(
        question=question.format(t=fact.noun, k=fact.key),
        answer=answer_pieces(template, fact.values),
        values=fact.values,
    )


def ask_all(facts: list[Fact]) -> Exchange:
    """The question for all values of one key, or of several keys that share wording and noun."""
    wording, noun = facts[0].wording, facts[0].noun
    keys = listed([fact.key for fact in facts])
    values = tuple(value for fact in facts for value in fact.values)
    template = wording.plural_answer.format(t=noun, k=keys, vs=listed([_MARK] * len(values)))
    return Exchange(
        question=wording.plural_question.format(t=noun, k=keys), answer=answer_pieces(template, values), values=values
    )


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How often a key or value is one that can only be copied token by token.

    A small model completes a word it knows, or loses its place among equal digits; these leave nothing to guess from.

    Attributes:
        invented_words: share of the words that are the head of one word and the tail of another.
        few_digits: share of the numbers that use no more than four different digits.
    """

    invented_words: float = 0.0
    few_digits: float = 0.0

    def __post_init__(self) -> None:
        for name in ("invented_words", "few_digits"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: {getattr(self, name)} given, must lie between 0 and 1")


class FactSampler:
    """Draws keys, values and facts; nothing is drawn twice within one `taken` set.

    Args:
        words: word lists of the split.
        spelling: how hard words and numbers are to copy.
    """

    def __init__(self, words: WordLists, spelling: Spelling) -> None:
        self.words = words
        self.spelling = spelling

    def _pick(self, rng: np.random.Generator, items: tuple[str, ...]) -> str:
        word = items[rng.integers(len(items))]
        if self.spelling.invented_words and rng.random() < self.spelling.invented_words:
            return self._invented(rng, word, items[rng.integers(len(items))])
        return word

    def _invented(self, rng: np.random.Generator, first: str, second: str) -> str:
        """The head of one word and the tail of another; the first word itself where that makes an evaluation word."""
        head = first[: rng.integers(2, max(3, len(first)))]
        word = head + second[rng.integers(1, max(2, len(second) - 1)) :].lower()
        return first if is_eval_word(word) else word

    def number(self, rng: np.random.Generator, digits: int | None = None) -> str:
        """A number of 4 to 8 digits, mostly 7."""
        if digits is None:
            digits = 7 if rng.random() < 0.6 else int(rng.integers(4, 9))
        if self.spelling.few_digits and rng.random() < self.spelling.few_digits:
            alphabet = rng.permutation(10)[: rng.integers(2, 5)]
            drawn = alphabet[rng.integers(alphabet.size, size=digits)]
            return "".join(map(str, [drawn[0] or rng.integers(1, 10), *drawn[1:]]))  # no leading zero
        return str(rng.integers(10 ** (digits - 1), 10**digits))

    def uuid(self, rng: np.random.Generator) -> str:
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))

    def variable(self, rng: np.random.Generator) -> str:
        """A variable's name: five capitals as in RULER."""
        return "".join(chr(65 + c) for c in rng.integers(26, size=5))

    def value(self, rng: np.random.Generator, value_type: str) -> str:
        """A value of type `number`, `word`, `uuid`, `city` or `person`."""
        if value_type == "number":
            return self.number(rng)
        if value_type == "uuid":
            return self.uuid(rng)
        if value_type == "city":
            return self._pick(rng, self.words.cities)
        if value_type == "person":
            return self.key(rng, "person")
        return self._pick(rng, self.words.nouns) if rng.random() < 0.5 else self._hyphenated(rng)

    def _hyphenated(self, rng: np.random.Generator) -> str:
        return f"{self._pick(rng, self.words.adjectives)}-{self._pick(rng, self.words.nouns)}"

    def key(self, rng: np.random.Generator, key_type: str) -> str:
        """A key of type `label`, `person` or `thing`."""
        if key_type == "person":
            return f"{self._pick(rng, self.words.first_names)} {self._pick(rng, self.words.surnames)}"
        if key_type == "thing":
            return f"{self._pick(rng, self.words.adjectives)} {self._pick(rng, self.words.nouns)}"
        draw = rng.random()
        if draw < 0.70:
            return self._hyphenated(rng)
        if draw < 0.82:
            return self._pick(rng, self.words.nouns)
        if draw < 0.94:
            return f"{self._pick(rng, self.words.nouns)}-{rng.integers(10, 10_000)}"
        return self.uuid(rng)

    def unused(self, draw: Callable[[], str], taken: set[str]) -> str:
        """Calls `draw()` until it gives something not in `taken`, and puts it there."""
        for _ in range(1000):
            item = draw()
            if item not in taken:
                taken.add(item)
                return item
        raise ValueError(
            "taken: no unused key or value found in 1000 draws; ask for fewer needles or shorter documents"
        )

    def fact(
        self,
        rng: np.random.Generator,
        wording: Wording,
        taken: set[str],
        *,
        num_values: int = 1,
        value_type: tuple[str, str] | None = None,
        word_key: bool = False,
    ) -> Fact:
        """A fact in a wording.

        Args:
            rng: source of randomness.
            wording: how it is stated.
            taken: keys and values in use.
            num_values: values of the key.
            value_type: type and noun; drawn from the wording's when None.
            word_key: the key is two hyphenated words, as in RULER, if the wording takes labels.
        """
        if value_type is None:
            value_type = wording.value_types[rng.integers(len(wording.value_types))]
        if word_key and wording.key_type == "label":
            key = self.unused(lambda: self._hyphenated(rng), taken)
        else:
            key = self.unused(lambda: self.key(rng, wording.key_type), taken)
        # Few cities and people exist: two facts may share one, a single fact may not name it twice.
        kind, noun = value_type
        scarce = kind in ("city", "person")
        within: set[str] = set() if scarce else taken
        values = tuple(self.unused(lambda: self.value(rng, kind), within) for _ in range(num_values))
        return Fact(wording=wording, noun=noun, key=key, values=values)
