"""What decode over the offload cache did: counts that the step's own program keeps, and what the host saw.

Reading is the only thing that waits for the device. Counts are exact: 64 bits, as two words that a program can add to.

**Hit, miss.** A block that a step attends to is a miss if its record was copied from the host for it, and a hit
otherwise. **Wasted copy.** Whatever is copied is attended to; it is wasted if the layer's own query would not have
picked its block. **Recall.** Share of the free blocks (those that no rule forces) picked by InfLLM-V2 with the layer's
own query that the step did attend to, among requests that have more blocks than a step reads. Waste and recall need
the own selection, so a second program counts them, in sampled steps only.

**Exposed wait.** Nothing inside a step can be timed. A step that is run again at once, at the same lengths, does the
same work and finds everything in the slots: the difference of the two times, each between two waits of the host, is
what the copies added. It holds what noise there is, so single samples may be negative; it is a mean.

**Host gap.** A launch is late if the device was through with the step before. How long it had been idle can't be asked
afterwards; the time since the host last saw it at work is an upper bound.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tally:
    """A sum of 64 bits per layer and lane. As two arrays, since a program updates only those in place that it goes
    through element by element.
    """

    low: UInt32[Array, "layers batch"]
    high: UInt32[Array, "layers batch"]

    def add(self, amount: Int[Array, "layers batch"]) -> "Tally":
        """Adds a non-negative int32."""
        amount = amount.astype(jnp.uint32)
        low = self.low + amount
        # Compared with the amount and not with the old word, which would have to be kept beside the new one.
        return Tally(low=low, high=self.high + (low < amount))

    def read(self) -> Int[np.ndarray, "layers lanes"]:
        """The sums as int64; waits for the device."""
        return np.asarray(self.low).astype(np.int64) + (np.asarray(self.high).astype(np.int64) << 32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over steps and KV heads on the device; the last four over sampled steps only.

    Attributes:
        attended: blocks attended to.
        copied: records copied from the host pool.
        picked: free blocks that the own query picks.
        found: those of them that the step attended to.
        sampled_copies: records copied.
        wasted: those of them whose block the own query does not pick.
    """

    attended: Tally
    copied: Tally
    picked: Tally
    found: Tally
    sampled_copies: Tally
    wasted: Tally

    def add(self, **amounts: Int[Array, "layers batch"]) -> "Counts":
        """Adds to the fields of these names."""
        return dataclasses.replace(self, **{name: getattr(self, name).add(n) for name, n in amounts.items()})


def no_counts(layers: int, lanes: int) -> Counts:
    """Counts of nothing."""

    def zeros() -> Array:
        return jnp.zeros((layers, lanes), jnp.uint32)

    return Counts(**{field.name: Tally(low=zeros(), high=zeros()) for field in dataclasses.fields(Counts)})


def compare_selections(
    own: Int[Array, "batch kv_heads width"],
    attended: Int[Array, "batch kv_heads width"],
    num_copied: Int[Array, "batch kv_heads"],
    copied_records: Int[Array, "batch kv_heads width"],
    block_table: Int[Array, "batch blocks"],
    free: tuple[Int[Array, "batch"], Int[Array, "batch"]],
) -> dict[str, Int[Array, "batch"]]:
    """How the blocks of a step compare with those that its layer's own query picks, summed over KV heads.

    Args:
        own: the own query's picks, -1 at the end.
        attended: the step's blocks, -1 at the end.
        num_copied: how many records were copied.
        copied_records: which, as ``physical block * kv_heads + head``; behind ``num_copied`` anything.
        block_table: the physical block of each logical block.
        free: the first block that no rule forces, and the first behind it that one does; equal where there is no
            choice, so that the lane does not count in the recall.

    Returns:
        ``picked``, ``found``, ``sampled_copies`` and ``wasted``, as in `Counts`.
    """
    kv_heads, width = own.shape[1:]
    first, last = (bound[:, None, None] for bound in free)
    picked = (own >= first) & (own < last)
    found = picked & jnp.any(own[..., None] == attended[:, :, None], axis=-1)
    physical = jnp.take_along_axis(block_table[:, None], jnp.maximum(own, 0), axis=2)
    records = jnp.where(own >= 0, physical * kv_heads + jnp.arange(kv_heads)[:, None], -1)
    copied = jnp.arange(width) < num_copied[..., None]
    wasted = copied & ~jnp.any(copied_records[..., None] == records[:, :, None], axis=-1)
    masks = {"picked": picked, "found": found, "sampled_copies": copied, "wasted": wasted}
    return {name: jnp.sum(mask, axis=(1, 2), dtype=jnp.int32) for name, mask in masks.items()}


@dataclasses.dataclass(kw_only=True)
class HostClock:
    """What the host sees of the launches and of timed steps; nothing in it waits.

    Attributes:
        launches: launches of steps that directly follow a step; one after a sequence has entered is not counted.
        late: those that found the device idle.
        gap: seconds that the device was idle before them, at most.
        timed: steps whose exposed wait was taken.
        wait: their exposed wait together, in seconds.
    """

    launches: int = 0
    late: int = 0
    gap: float = 0.0
    timed: int = 0
    wait: float = 0.0
    now: Callable[[], float] = time.perf_counter
    _running: Any = None
    _seen_at_work: float = 0.0

    def look(self) -> bool:
        """Whether the device is known to be idle; if it is at work, the time is noted."""
        if self._running is None:
            return False
        if self._running.is_ready():
            return True
        self._seen_at_work = self.now()
        return False

    def launching(self) -> None:
        """A step is about to be launched."""
        if self._running is None:
            return
        self.launches += 1
        if self.look():
            self.late += 1
            self.gap += self.now() - self._seen_at_work

    def launched(self, result: Any) -> None:
        """A step is launched; the array ``result`` is ready when the device is through with it."""
        self._running, self._seen_at_work = result, self.now()

    def interrupted(self) -> None:
        """Something else than a step comes next, so the next launch tells nothing."""
        self._running = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStats:
    """Counts on the host, int64 ``[layers, lanes]``; times in seconds. The fields are those of `Counts`, `HostClock`.

    Attributes:
        record_bytes: bytes of a record.
        steps: all steps of the lanes.
        sampled_steps: those of them that also made the own selections.
    """

    record_bytes: int
    steps: int
    sampled_steps: int
    attended: Int[np.ndarray, "layers lanes"]
    copied: Int[np.ndarray, "layers lanes"]
    picked: Int[np.ndarray, "layers lanes"]
    found: Int[np.ndarray, "layers lanes"]
    sampled_copies: Int[np.ndarray, "layers lanes"]
    wasted: Int[np.ndarray, "layers lanes"]
    launches: int = 0
    late: int = 0
    gap: float = 0.0
    timed: int = 0
    wait: float = 0.0

    @classmethod
    def read(
        cls, counts: Counts, *, record_bytes: int, steps: int, sampled_steps: int = 0, clock: HostClock | None = None
    ) -> "DecodeStats":
        """Waits for the device and reads its counts."""
        sums = {field.name: getattr(counts, field.name).read() for field in dataclasses.fields(Counts)}
        seen = {} if clock is None else {name: getattr(clock, name) for name in ("launches", "late", "gap", "timed")}
        seen |= {} if clock is None else {"wait": clock.wait}
        return cls(record_bytes=record_bytes, steps=steps, sampled_steps=sampled_steps, **sums, **seen)

    def since(self, earlier: "DecodeStats") -> "DecodeStats":
        """What has happened after ``earlier`` was read."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "record_bytes"]
        changes = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        return dataclasses.replace(self, **changes)

    @property
    def hits(self) -> Int[np.ndarray, "layers lanes"]:
        """Blocks attended to that needed no copy."""
        return self.attended - self.copied

    @property
    def bytes_copied(self) -> int:
        """From host to device, of all layers and lanes."""
        return int(self.copied.sum()) * self.record_bytes

    @property
    def hit_rate(self) -> float | None:
        """Hits over blocks attended to, of all layers but the first, which is resident; None if there were none."""
        return _quotient(self.hits[1:].sum(), self.attended[1:].sum())

    @property
    def recall(self) -> float | None:
        """Of all layers but the first; None if nothing was sampled, or no request had a choice."""
        return _quotient(self.found[1:].sum(), self.picked[1:].sum())

    @property
    def wasted_share(self) -> float | None:
        """Wasted copies over copies in the sampled steps; None if there were none."""
        return _quotient(self.wasted.sum(), self.sampled_copies.sum())

    @property
    def exposed_wait(self) -> float | None:
        """Seconds per step; None if no step was timed."""
        return _quotient(self.wait, self.timed)

    @property
    def host_gap(self) -> float | None:
        """Seconds per launch, at most; None if no launch directly followed a step."""
        return _quotient(self.gap, self.launches)

    def to_dict(self) -> dict[str, Any]:
        """The sums and quotients as plain JSON; None for a quotient without a denominator."""
        names = ("hit_rate", "recall", "wasted_share", "exposed_wait", "host_gap", "bytes_copied")
        plain = ("steps", "sampled_steps", "launches", "late", "timed")
        sums = {"hits": int(self.hits.sum()), "misses": int(self.copied.sum())}
        return sums | {name: getattr(self, name) for name in (*names, *plain)}


def _quotient(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
