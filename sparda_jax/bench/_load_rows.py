"""The numbers of a load test, and its picture."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparda_jax.bench._load_client import OK, Outcome
from sparda_jax.bench._load_plan import Workload
from sparda_jax.bench._report import Row
from sparda_jax.bench.plot import figure, save

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What makes an answer a good one; milliseconds, None: no matter."""

    first: float | None = None
    per_token: float | None = None

    def kept(self, outcome: Outcome) -> bool:
        """Whether a request was answered, and within both."""
        pairs = ((outcome.first, self.first), (outcome.per_token, self.per_token))
        return outcome.status == OK and all(t is None or limit is None or 1000 * t <= limit for t, limit in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One rate's requests, in the order in which they were due, and the seconds until the last one was over."""

    workload: Workload
    outcomes: Sequence[Outcome]
    seconds: float


def rows(measured: Measured, limits: Limits) -> Iterator[Row]:
    """The rows of one rate."""
    workload, outcomes = measured.workload, measured.outcomes
    common = {"rate": workload.rate}

    def row(name: str, settings: dict[str, Any], value: float | None, unit: str, error: str | None = None) -> Row:
        return Row(name=name, backend="http", settings=common | settings, value=value, unit=unit, error=error)

    answered = [outcome for outcome in outcomes if outcome.status == OK]
    for name, times in (
        ("time to first token", [outcome.first for outcome in answered]),
        ("time per output token", [outcome.per_token for outcome in answered]),
        ("whole answer", [outcome.end for outcome in answered]),
    ):
        found = [1000 * t for t in times if t is not None]
        for percentile in PERCENTILES:
            settings = {"percentile": percentile, "of": len(found)}
            if found:
                yield row(name, settings, float(np.percentile(found, percentile)), "ms")
            else:
                yield row(name, settings, None, "ms", "no request was answered, or none with two tokens")
    for name, tokens in (
        ("output", sum(outcome.tokens for outcome in answered)),
        ("prompts", sum(outcome.prompt_tokens for outcome in answered)),
    ):
        yield row(name, {}, tokens / measured.seconds, "tokens/s")
    yield row("answered", {"of": len(outcomes)}, len(answered) / measured.seconds, "requests/s")
    good = sum(map(limits.kept, outcomes))
    settings = {"first_ms": limits.first, "per_token_ms": limits.per_token, "share": round(good / len(outcomes), 4)}
    yield row("goodput", settings, good / measured.seconds, "requests/s")
    for status, count in sorted(collections.Counter(outcome.status for outcome in outcomes).items()):
        if status != OK:
            yield row("failed", {"status": status}, count, "requests")
    late = [1000 * outcome.late for outcome in outcomes]
    yield row("sent late", {"percentile": 99}, float(np.percentile(late, 99)), "ms")


def draw(picture: Path, runs: Sequence[Measured], limits: Limits, title: str) -> None:
    """First tokens over the time when they were due, and how many requests kept which time; a colour for each rate.

    Raises:
        typer.BadParameter: there is no matplotlib, or the file can't be written.
    """
    drawing = figure()
    drawing.set_size_inches(12, 4)
    over_time, first, per_token = drawing.subplots(1, 3)
    for number, run in enumerate(runs):
        color, label = f"C{number % 10}", f"{run.workload.rate:g} requests/s"
        answered = [outcome for outcome in run.outcomes if outcome.status == OK]
        failed = [outcome.due for outcome in run.outcomes if outcome.status != OK]
        over_time.plot([o.due for o in answered], [o.first for o in answered], ".", color=color, label=label)
        over_time.plot(failed, [0.0] * len(failed), "x", color=color, label=f"{label}: failed" if failed else None)
        for axes, times in ((first, [o.first for o in answered]), (per_token, [o.per_token for o in answered])):
            found = sorted(1000 * t for t in times if t is not None)
            # Of all that were sent: those that failed keep no time at all.
            shares = (np.arange(len(found)) + 1) / len(run.outcomes)
            axes.step(found, shares, where="post", color=color, label=label)
    for axes, limit in ((first, limits.first), (per_token, limits.per_token)):
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("share of the requests sent")
        if limit is not None:
            axes.axvline(limit, color="black", linestyle="--", linewidth=1, label="limit")
    over_time.set_xlabel("due after, s")
    over_time.set_ylabel("time to first token, s")
    first.set_xlabel("time to first token, ms, at most")
    per_token.set_xlabel("time per output token, ms, at most")
    for axes in (over_time, first, per_token):
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    drawing.suptitle(title, fontsize=10)
    save(drawing, picture)
