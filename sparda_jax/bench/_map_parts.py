"""Where the time of a whole decode step goes, and what limits it, from a profile."""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from sparda_jax.bench._spans import length, union
from sparda_jax.bench._step_parts import pauses, spans, typical
from sparda_jax.bench._step_profile import Event, Kind

_COMPUTES = (Kind.PRODUCT, Kind.ATTENTION, Kind.SELECTION, Kind.PLAN, Kind.APPEND, Kind.SMALL)
LINK = "link"
"""What limits a step that waits for copies."""
_FULL_LINK = 0.9
"""A link that copies for so much of the time is what limits a step, though kernels hide the copies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step taken apart, in ms; all but ``copying`` add up to the time from step to step.

    Attributes:
        products: products with weights, the last one for the logits.
        attention: reading records.
        selection: reading compressed keys, and choosing.
        others: what is left of the plan, the new token's kernels and small kernels, where none of the above runs beside
            them.
        waiting: no kernel runs since a copy is not there yet.
        idle: none runs for another reason, also between two steps.
        copying: at least one copy runs.
    """

    products: float
    attention: float
    selection: float
    others: float
    waiting: float
    idle: float
    copying: float

    @property
    def whole(self) -> float:
        """From step to step."""
        return self.products + self.attention + self.selection + self.others + self.waiting + self.idle

    @property
    def limit(self) -> str:
        """What takes most of the step: weights, records and keys, launches (of small kernels), or the link."""
        if self.copying >= _FULL_LINK * self.whole:
            return LINK
        shares = {
            "weights": self.products,
            "records and keys": self.attention + self.selection,
            "launches": self.others + self.idle,
            LINK: self.waiting,
        }
        return max(shares, key=lambda name: shares[name])


def step_time(steps: Sequence[Sequence[Event]]) -> StepTime:
    """Of the step of median length, among those that fetch if any does."""
    chosen = typical(steps)
    by_length = sorted((steps[index] for index in chosen), key=lambda step: _end(step) - step[0].start)
    step = by_length[(len(chosen) - 1) // 2]
    covered: list[tuple[float, float]] = []
    alone = {}
    for kind in _COMPUTES:
        more = union([*covered, *spans(event for event in step if event.kind is kind)])
        alone[kind], covered = length(more) - length(covered), more
    waits, idle = pauses(step)
    pairs = [pair for pair in itertools.pairwise(chosen) if pair[1] == pair[0] + 1]
    periods = [steps[after][0].start - steps[before][0].start for before, after in pairs]
    whole = length(covered) + length(waits) + length(idle)
    between = max(statistics.median(periods) - whole, 0) if periods else 0
    return StepTime(
        products=alone[Kind.PRODUCT] / 1e3,
        attention=alone[Kind.ATTENTION] / 1e3,
        selection=alone[Kind.SELECTION] / 1e3,
        others=sum(alone[kind] for kind in (Kind.PLAN, Kind.APPEND, Kind.SMALL)) / 1e3,
        waiting=length(waits) / 1e3,
        idle=(length(idle) + between) / 1e3,
        copying=length(union(spans(event for event in step if event.kind is Kind.FETCH))) / 1e3,
    )


def _end(step: Sequence[Event]) -> float:
    return max(event.end for event in step)
