"""Spans of time: from a start to an end."""

from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def length(spans: Iterable[Span]) -> float:
    """Of all spans together; those that overlap count each."""
    return sum(end - start for start, end in spans)


def cut(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """What lies of spans between two moments."""
    return [(max(start, begin), min(stop, end)) for start, stop in spans if max(start, begin) < min(stop, end)]


def common(left: Iterable[Span], right: Sequence[Span]) -> list[Span]:
    """What lies in spans of both lists, each of them without overlaps."""
    return [span for start, end in left for span in cut(right, start, end)]


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans without overlaps, ascending."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
