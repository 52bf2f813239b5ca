"""Running text for needles to lie in: prose from a grammar, or a text file.

RULER takes Paul Graham's essays, which may not be passed on. The grammar's sentences mean little, but hardly two are
alike, and they share their words with keys. A file with the essays, or any other text, can take their place.
"""

import random
import re
from collections.abc import Callable
from pathlib import Path

from sparda_jax.config import ConfigError
from sparda_jax.eval.words import all_words

Sentences = Callable[[random.Random, int], list[str]]
"""So many sentences of running text."""

_OPENINGS = (
    "In the {adjective} days of the {noun}",
    "When the {noun} had become {adjective}",
    "Long before anybody spoke of the {noun}",
    "Whoever has seen a {adjective} {noun} will agree that",
    "It is often said that",
    "After the {noun} was finished",
    "Between the {noun} and the {noun}",
    "As far as the {noun} is concerned",
)
_SUBJECTS = (
    "the {adjective} {noun}",
    "a {noun} from {city}",
    "{name}, who kept a {noun},",
    "every {noun} in {city}",
    "the {noun} beside the {adjective} {noun}",
    "one {adjective} {noun} after another",
    "the people of {city}",
)
_PREDICATES = (
    "was taken for a {noun}",
    "came to depend on the {noun}",
    "led to a {adjective} {noun}",
    "could not be told from a {noun}",
    "stood for the {noun} of the {adjective} {noun}",
    "had more to do with the {noun} than with the {noun}",
    "gave the {noun} its {adjective} look",
    "was older than the {noun} that people remember",
    "changed the {noun} for good",
)
_ENDINGS = (
    "",
    "",
    ", and nobody asked about the {noun}",
    ", although the {noun} stayed {adjective}",
    ", which {name} wrote down in a {adjective} {noun}",
    " until the {noun} was forgotten",
    "; the {noun} was another matter",
    " because a {adjective} {noun} costs less than a {noun}",
)


def generated(rng: random.Random, count: int) -> list[str]:
    """Sentences of the grammar."""
    words = all_words()
    names = {"noun": words.nouns, "adjective": words.adjectives, "city": words.cities, "name": words.first_names}

    def filled(match: re.Match[str]) -> str:
        return rng.choice(names[match[1]])

    def sentence() -> str:
        pattern = f"{rng.choice(_SUBJECTS)} {rng.choice(_PREDICATES)}{rng.choice(_ENDINGS)}."
        if rng.random() < 0.4:
            pattern = f"{rng.choice(_OPENINGS)} {pattern}"
        text = re.sub(r"\{(\w+)\}", filled, pattern)
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
        return text[0].upper() + text[1:]

    return [sentence() for _ in range(count)]


def from_file(file: Path) -> Sentences:
    """The sentences of a text, from its beginning, over again where it is too short; the same for every prompt.

    Raises:
        ConfigError: the file can't be read, is not UTF-8, or holds no sentence.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"essays={file} can't be read as UTF-8 text: {error}") from error
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if part]
    if not sentences:
        raise ConfigError(f"essays={file} holds no text: give a longer one")

    def first(_: random.Random, count: int) -> list[str]:
        return (sentences * -(-count // len(sentences)))[:count]

    return first
