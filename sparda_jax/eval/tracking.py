"""RULER's variable tracking: one chain of assignments in noise, and an example of another one in front of it."""

import itertools
import random
import string

from sparda_jax.eval.needles import NOISE, placed
from sparda_jax.eval.prompting import Question

HOPS = 4
_EXAMPLE_SIZE = 10
"""Sentences of noise in the example: what RULER's search finds for its 500 tokens with the usual tokenizers."""
_TASK = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
# The misspelling is RULER's.
_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined the "
    "value {value}, they are: "
)


def variable_tracking(rng: random.Random, size: int, length: int) -> Question:
    """A question; ``size`` counts sentences of noise."""
    example = _chain(rng, _EXAMPLE_SIZE, letters=3)
    asked = _chain(rng, size, letters=5)
    return Question(
        text=f"{example.text}{example.prefix}{' '.join(example.references)}\n\n{asked.text}",
        prefix=asked.prefix,
        references=asked.references,
    )


def _chain(rng: random.Random, size: int, *, letters: int) -> Question:
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    variables, value = list(names), str(rng.randint(10000, 99999))
    steps = [f"VAR {variables[0]} = {value}"]
    steps += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(variables)]
    depths = sorted(rng.sample(range(size), len(steps)))
    pieces = placed([f"{NOISE}\n"] * size, steps, [depth / size for depth in depths])
    context = " ".join(pieces).replace(". \n", ".\n")
    return Question(
        text=_TASK.format(context=context, value=value),
        prefix=_PREFIX.format(count=len(variables), value=value),
        references=tuple(variables),
    )
