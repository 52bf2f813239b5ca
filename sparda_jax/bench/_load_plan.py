"""What a load generator sends and when: decided before the first request, so that no answer can change it."""

import dataclasses
import json
import re
from collections.abc import Sequence

import numpy as np
import typer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Numbers of tokens, both ends included."""

    least: int
    most: int

    @classmethod
    def parse(cls, option: str, text: str) -> "Span":
        """``64:256``, or ``64`` alone.

        Raises:
            typer.BadParameter: it is something else, or not in order.
        """
        found = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 0 < least <= most:
            raise typer.BadParameter(f"{option} {text!r}: give a number of tokens, or two as in 64:256.")
        return cls(least=least, most=most)

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests at one rate.

    Attributes:
        rate: requests per second, on average.
        duration: seconds in which they arrive.
        prompt: tokens of a prompt behind the shared prefix; each number is as likely as the others.
        output: tokens of an answer, in the same way.
        shared_prefix: tokens that all prompts begin with.
        seed: of arrivals, lengths and tokens.
    """

    rate: float
    duration: float
    prompt: Span
    output: Span
    shared_prefix: int
    seed: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.shared_prefix + self.prompt.most + self.output.most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """One request: seconds from the start until it is due, and its token ids."""

    due: float
    prompt: list[int]
    max_tokens: int

    def body(self, model: str) -> bytes:
        """Of ``POST /v1/completions``: a greedy stream of exactly ``max_tokens``, with the usage at its end."""
        fields = {"model": model, "prompt": self.prompt, "max_tokens": self.max_tokens, "ignore_eos": True}
        fields |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(fields, separators=(",", ":")).encode()


def plan(workload: Workload, vocabulary: Sequence[int]) -> list[Planned]:
    """Poisson arrivals within the duration, the same for the same seed.

    Args:
        workload: what is asked for.
        vocabulary: token ids to draw from.
    """
    arrivals, lengths, tokens = map(np.random.default_rng, np.random.SeedSequence(workload.seed).spawn(3))
    ids = np.asarray(vocabulary)
    shared = tokens.choice(ids, workload.shared_prefix).tolist()
    planned = []
    due = arrivals.exponential(1 / workload.rate)
    while due < workload.duration:
        own = tokens.choice(ids, lengths.integers(workload.prompt.least, workload.prompt.most + 1)).tolist()
        answer = int(lengths.integers(workload.output.least, workload.output.most + 1))
        planned.append(Planned(due=due, prompt=[*shared, *own], max_tokens=answer))
        due += arrivals.exponential(1 / workload.rate)
    return planned
