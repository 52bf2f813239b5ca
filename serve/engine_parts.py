"""What the engine asks of the device, and what it says of itself."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from sparda_jax.logprobs import Logprobs
from sparda_jax.sampling import SamplingParams


class StatsLike(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


class SequenceLike(Protocol):
    """One request on the device; `sparda_jax.serve.executor.LaneSequence`."""

    @property
    def stats(self) -> StatsLike: ...

    @property
    def prefilled(self) -> int: ...

    def take_logprobs(self) -> tuple[Logprobs | None, Logprobs | None]: ...


class ExecutorLike[S: SequenceLike](Protocol):
    """What the engine needs of the device; `sparda_jax.serve.executor.Executor`."""

    max_model_len: int
    num_lanes: int
    num_blocks: int
    block_size: int
    staging_tokens: int

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None: ...
    def start(self, prompt: Sequence[int], params: SamplingParams) -> S: ...
    def allow(self, sequence: S, mask: np.ndarray) -> None: ...
    def prefill(self, sequence: S) -> int | None: ...
    def place(self, lane: int, sequence: S) -> None: ...
    def park(self, sequence: S) -> None: ...
    def step(self) -> None: ...
    def read(self, unread: int = 0) -> list[tuple[S, int]]: ...
    def fed(self, sequence: S, token: int) -> None: ...
    def release(self, sequence: S) -> None: ...
    def note_cache(self) -> None: ...
    def cache_stats(self) -> dict[str, tuple[float, str]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    """``ok`` is what a load balancer wants to know; ``status`` and ``detail`` are for people."""

    ok: bool
    status: Literal["starting", "ready", "failing", "draining", "stuck", "dead"]
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts at one moment.

    Attributes:
        running: admitted requests: those in prefill, in a lane, and between the two.
        waiting: requests that are not admitted yet.
        prefilling, decoding, without_lane: the running ones by what they do.
        free_blocks: blocks of the pool that no admitted request has reserved.
        max_active: decode lanes. max_queue: how many may wait.
    """

    running: int
    waiting: int
    prefilling: int
    decoding: int
    without_lane: int
    free_blocks: int
    max_active: int
    max_queue: int
