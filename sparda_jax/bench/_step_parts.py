"""A decode step taken apart: its layers, what the compute lane waits for, and how much of each copy it hides."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

from sparda_jax.bench._spans import Span, common, cut, length, union
from sparda_jax.bench._step_profile import Event, Kind, ProfileError

_NEAR = 2.0
"""µs between a copy's end and the start of what waited for it, at most: a launch within a graph takes about one."""
_BESIDE = 2.0
"""µs that two kernels run together, at least, where the second is drawn beside the first and not after it."""
_PRODUCTS = ("output", "gate, up", "down", "q k v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: from its q, k, v product, the last before its attention, to the next layer's; times in µs."""

    index: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """An event as it is drawn.

    Attributes:
        kind, start, end: of the event, within what is drawn; µs.
        label: which product, or which layer a fetch is for; empty for others.
        row: of its lane: 0, or 1 beside a kernel, or a fetch, that began before.
    """

    kind: Kind
    start: float
    end: float
    label: str = ""
    row: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """Some layers of one step; times in µs.

    Attributes:
        layers: those that are drawn.
        parts: kernels and fetches in them, cut off at both ends.
        waits: where no kernel computes since a fetch is not there yet.
        idle: where none does for another reason.
        period: from step to step, the median over those that fetch; None of a single one.
    """

    layers: tuple[Layer, ...]
    parts: tuple[Part, ...]
    waits: tuple[Span, ...]
    idle: tuple[Span, ...]
    period: float | None

    @property
    def span(self) -> Span:
        return self.layers[0].start, self.layers[-1].end

    @property
    def layer_us(self) -> float:
        """µs of a layer on average."""
        return (self.span[1] - self.span[0]) / len(self.layers)

    def per_layer(self, kind: Kind) -> float:
        """µs of a kind's kernels in a layer on average; kernels run beside each other, so kinds add up to more."""
        return sum(part.end - part.start for part in self.parts if part.kind is kind) / len(self.layers)

    @property
    def wait(self) -> float:
        """µs in a layer on average in which the compute lane waits for a fetch."""
        return length(self.waits) / len(self.layers)

    @property
    def idle_us(self) -> float:
        """µs in a layer on average in which the compute lane is idle for another reason."""
        return length(self.idle) / len(self.layers)

    @property
    def fetching(self) -> float:
        """µs in a layer on average in which at least one fetch runs."""
        return length(self._fetches()) / len(self.layers)

    @property
    def hidden(self) -> float | None:
        """The share of the time of fetches in which a kernel computes; None without fetches."""
        fetches = self._fetches()
        return 1 - length(common(fetches, [*self.waits, *self.idle])) / length(fetches) if fetches else None

    def _fetches(self) -> list[Span]:
        return union((part.start, part.end) for part in self.parts if part.kind is Kind.FETCH)


def layers_of(step: Sequence[Event]) -> tuple[Layer, ...]:
    """The layers of a step but the last, of which nothing marks the end."""
    starts = [start for start, _ in _marks(step)]
    pairs = itertools.pairwise(starts)
    return tuple(Layer(index=index, start=start, end=end) for index, (start, end) in enumerate(pairs))


def picture(steps: Sequence[Sequence[Event]], first: int | None = None, last: int | None = None) -> Picture:
    """The layers from ``first`` to ``last`` of a typical step.

    Of the steps that fetch (for at least half as long as the one that does longest), the one in which these layers
    take the median time. Left out, they are the middle three.

    Raises:
        ProfileError: the steps have not these layers.
    """
    count = min(len(layers_of(step)) for step in steps)
    if not count:
        raise ProfileError(
            "no step of the profile has two layers in one CUDA graph: a step that streams can't be drawn."
        )
    if first is None or last is None:
        first = max((count - 2) // 2, 0)
        last = min(first + 2, count - 1)
    if not 0 <= first <= last < count:
        raise ProfileError(f"layers {first} to {last}: the profile has 0 to {count - 1}, and one more without an end.")
    chosen = typical(steps)
    drawn = {index: layers_of(steps[index])[first : last + 1] for index in chosen}
    times = {index: layers[-1].end - layers[0].start for index, layers in drawn.items()}
    one = next(index for index in chosen if times[index] == statistics.median_low(times.values()))
    begun = [steps[index][0].start for index in chosen]
    periods = [after - before for before, after in itertools.pairwise(begun)]
    return _take_apart(steps[one], drawn[one], statistics.median(periods) if periods else None)


def typical(steps: Sequence[Sequence[Event]]) -> list[int]:
    """The steps that fetch for at least half as long as the one that does longest; all of them if none fetches."""
    fetching = [length(spans(event for event in step if event.kind is Kind.FETCH)) for step in steps]
    return [index for index, time in enumerate(fetching) if time >= max(fetching) / 2]


def pauses(step: Sequence[Event]) -> tuple[list[Span], list[Span]]:
    """Where no kernel of a step computes: since a fetch is not there yet, and for another reason."""
    computing = union(spans(event for event in step if event.kind is not Kind.FETCH))
    fetches = [event for event in step if event.kind is Kind.FETCH]
    waits, idle = [], []
    for (_, stop), (following, _) in itertools.pairwise(computing):
        waited = [fetch for fetch in fetches if fetch.end > stop and abs(following - fetch.end) <= _NEAR]
        since = max(stop, min((fetch.start for fetch in waited), default=following))
        idle.append((stop, since))
        waits.append((since, following))
    return waits, idle


def _take_apart(step: Sequence[Event], layers: tuple[Layer, ...], period: float | None) -> Picture:
    begin, end = layers[0].start, layers[-1].end
    waits, idle = pauses(step)
    return Picture(
        layers=layers,
        parts=tuple(_parts(step, begin, end)),
        waits=tuple(cut(waits, begin, end)),
        idle=tuple(cut(idle, begin, end)),
        period=period,
    )


def _marks(step: Sequence[Event]) -> list[Span]:
    """For each layer of a step where its q, k, v product begins, and where its attention does."""
    marks, product = [], None
    for event in step:
        if event.kind is Kind.PRODUCT:
            product = event.start
        elif event.kind is Kind.ATTENTION and product is not None:
            marks.append((product, event.start))
            product = None
    return marks


def _parts(step: Sequence[Event], begin: float, end: float) -> Iterable[Part]:
    attends = [start for _, start in _marks(step)]
    labels: dict[Event, str] = {}
    for start, following in itertools.pairwise(attends):
        products = [event for event in step if event.kind is Kind.PRODUCT and start <= event.start < following]
        if len(products) == len(_PRODUCTS):
            labels |= zip(products, _PRODUCTS, strict=True)
    busy = {True: step[0].start, False: step[0].start}
    for event in step:
        fetches = event.kind is Kind.FETCH
        row = int(event.start < busy[fetches] - _BESIDE)
        busy[fetches] = busy[fetches] if row else event.end
        if fetches:
            # Whoever reads the records attends once they are there.
            reader = next((index for index, start in enumerate(attends) if start >= event.end), None)
            labels |= {} if reader is None else {event: f"for layer {reader}"}
        for start, stop in cut([(event.start, event.end)], begin, end):
            yield Part(kind=event.kind, start=start, end=stop, label=labels.get(event, ""), row=row)


def spans(events: Iterable[Event]) -> list[Span]:
    """From start to end of each."""
    return [(event.start, event.end) for event in events]
