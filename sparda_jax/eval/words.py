"""The words, numbers and UUIDs that keys, values and lists are made of."""

import functools
import random
import uuid
from collections.abc import Iterator

from sparda_jax.pretrain.task_words import WordLists, word_lists


@functools.cache
def all_words() -> WordLists:
    """The words of both splits, sorted."""
    parts = [word_lists(split) for split in ("train", "eval")]

    def joined(name: str) -> tuple[str, ...]:
        return tuple(sorted({word for part in parts for word in getattr(part, name)}))

    return WordLists(
        nouns=joined("nouns"),
        adjectives=joined("adjectives"),
        first_names=joined("first_names"),
        surnames=joined("surnames"),
        cities=joined("cities"),
    )


@functools.cache
def single_words() -> tuple[str, ...]:
    """Nouns and adjectives, each once."""
    words = all_words()
    return tuple(sorted({*words.nouns, *words.adjectives}))


def sample_words(rng: random.Random, count: int) -> list[str]:
    """So many different words; where the lists are too short, two are joined to one."""
    words = single_words()
    if count <= len(words):
        return rng.sample(words, count)
    found = dict.fromkeys(rng.sample(words, len(words)))
    while len(found) < count:
        found["".join(rng.sample(words, 2))] = None
    return list(found)


def draw(rng: random.Random, kind: str) -> str:
    """A key or value of a needle: 7 digits (`numbers`), an adjective and a noun (`words`), or a UUID (`uuids`)."""
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        words = all_words()
        return f"{rng.choice(words.adjectives)}-{rng.choice(words.nouns)}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(rng: random.Random, kind: str) -> Iterator[str]:
    """One after the other, none of them twice."""
    seen: set[str] = set()
    while True:
        if (drawn := draw(rng, kind)) not in seen:
            seen.add(drawn)
            yield drawn
