"""Prometheus metrics of one server, in a registry of their own."""

import math
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from sparda_jax.serve.engine import Engine

_TIME_TO_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TIME_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters and histograms that the HTTP layer feeds; the gauges ask the engine when they are read."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "sparda_requests", "Requests answered.", ["endpoint", "status"], registry=self.registry
        )
        self._prompt_tokens = Counter("sparda_prompt_tokens", "Prompt tokens taken in.", registry=self.registry)
        self._new_tokens = Counter("sparda_generated_tokens", "Tokens generated.", registry=self.registry)
        self._first_token = Histogram(
            "sparda_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_TIME_TO_FIRST_TOKEN,
            registry=self.registry,
        )
        self._per_token = Histogram(
            "sparda_time_per_output_token_seconds",
            "Mean time between the tokens of one answer.",
            buckets=_TIME_PER_TOKEN,
            registry=self.registry,
        )
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "sequences_running": (
                "Sequences admitted: in prefill, in a lane, or between.",
                lambda: engine.stats().running,
            ),
            "sequences_queued": ("Sequences that wait.", lambda: engine.stats().waiting),
            "sequences_prefilling": ("Sequences in prefill.", lambda: engine.stats().prefilling),
            "sequences_decoding": ("Sequences in a decode lane.", lambda: engine.stats().decoding),
            "sequences_without_lane": (
                "Prefilled sequences that wait for a lane.",
                lambda: engine.stats().without_lane,
            ),
            "cache_unreserved_blocks": (
                "Blocks that no admitted request has reserved.",
                lambda: engine.stats().free_blocks,
            ),
        }
        for name, (text, read) in gauges.items():
            Gauge(f"sparda_{name}", text, registry=self.registry).set_function(read)
        self.registry.register(_CacheCollector(engine))

    def answered(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def prompt(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)

    def clock(self, arrived: float) -> "TokenClock":
        """A clock for one answer of a request that arrived at ``arrived`` (`time.monotonic`)."""
        return TokenClock(self, arrived)

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self.registry)

    def numbers(self) -> dict[str, float | None]:
        """The same as numbers, under the names that `text` gives them, labels included; None for what is not finite."""
        return {
            _name(sample): sample.value if math.isfinite(sample.value) else None
            for metric in self.registry.collect()
            for sample in metric.samples
        }


def _name(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name


class _CacheCollector(Collector):
    """What the executor says of its cache: names ending in ``_total`` are counters, the others gauges."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        for name, (value, text) in self._engine.cache_stats().items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"sparda_{name}", text, value=value)


class TokenClock:
    """Measures one answer: call `tick` at every token and `stop` at the end."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._first = self._last = 0.0
        self._tokens = 0

    def tick(self) -> None:
        self._last = time.monotonic()
        if not self._tokens:
            self._first = self._last
            self._metrics._first_token.observe(self._first - self._arrived)
        self._tokens += 1
        self._metrics._new_tokens.inc()

    def stop(self) -> None:
        if self._tokens > 1:
            self._metrics._per_token.observe((self._last - self._first) / (self._tokens - 1))
