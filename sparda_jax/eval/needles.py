"""RULER's eight needle tasks: facts in noise, in running text, or among others of their kind."""

import dataclasses
import random
from collections.abc import Sequence

from sparda_jax.eval.essays import Sentences
from sparda_jax.eval.prompting import Question
from sparda_jax.eval.words import distinct

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_TASK = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
# RULER's grid of depths, in percent.
_DEPTHS = tuple(round(100 * step / 39) for step in range(40))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """One of the needle tasks.

    Attributes:
        haystack: `repeat` (one sentence of noise over and over), `essay` or `needle`.
        keys, values: kinds of keys and values, see `words.draw`.
        num_keys, num_values, num_queries: keys in the text, values of each, keys that are asked for.
        sentences: running text.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    sentences: Sentences

    @property
    def least(self) -> int:
        """Sentences that the needles need around them."""
        return max(4, self.num_keys * self.num_values)

    def __call__(self, rng: random.Random, size: int, length: int, depths: Sequence[float] | None = None) -> Question:
        """A question.

        Args:
            rng: source of randomness.
            size: sentences around the needles.
            length: not looked at; other tasks' frequencies depend on it.
            depths: where the needles lie, from 0 to 1; None: RULER's way.
        """
        keys, values = distinct(rng, self.keys), distinct(rng, self.values)
        facts = {next(keys): [next(values) for _ in range(self.num_values)] for _ in range(self.num_keys)}
        asked = rng.sample(list(facts), self.num_queries)
        needles = [self._needle(key, value) for key, of_key in facts.items() for value in of_key]
        rng.shuffle(needles)
        if depths is None:
            depths = self._depths(rng, size, len(needles))
        if self.haystack == "essay":
            filler = self.sentences(rng, size)
        elif self.haystack == "repeat":
            filler = [NOISE] * size
        else:
            filler = [self._needle(next(keys), next(values)) for _ in range(size)]
        context = (" " if self.haystack == "essay" else "\n").join(placed(filler, needles, depths))
        query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
        task, kind, prefix = _TASK, self.values, _PREFIX
        if self.num_queries * self.num_values == 1:
            task, prefix, kind = _singular(task), _singular(prefix), kind[:-1]
        return Question(
            text=task.format(kind=kind, context=context, query=query),
            prefix=prefix.format(kind=kind, query=query),
            references=tuple(value for key in asked for value in facts[key]),
        )

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.values, key=key, value=value)

    def _depths(self, rng: random.Random, size: int, count: int) -> list[float]:
        if self.haystack == "essay":
            return [depth / 100 for depth in rng.sample(_DEPTHS, count)]
        return [place / size for place in rng.sample(range(size), count)]


def placed(filler: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The filler with each needle in front of the sentence at its depth, which 0 puts first and 1 last."""
    positions = zip((round(depth * len(filler)) for depth in depths), needles, strict=True)
    found, written = [], 0
    for position, needle in sorted(positions, key=lambda pair: pair[0]):
        found += [*filler[written:position], needle]
        written = position
    return found + list(filler[written:])


def _singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is").replace("answers", "answer")
