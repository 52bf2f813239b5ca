"""Whether a memory plan fits a machine, what is the most that fits, and what to change where it does not."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from sparda_jax.budget import Demand, MemoryPlan, plan_memory
from sparda_jax.cache.pinning import GIB, PINNED_LIMIT_VARIABLE
from sparda_jax.cache.state import CacheShape
from sparda_jax.config import ConfigError
from sparda_jax.decode_plan import Fetch
from sparda_jax.machine import Limits
from sparda_jax.selection import Mode

DEVICE_SPARE = 0.05
"""Share of the device's memory that stays unplanned: free pieces that are too small for what is asked for."""
HOST_RESERVE = 4 * GIB
"""Host memory of the process besides what it pins: Python, JAX, CUDA, the compiler, a layer of a checkpoint."""
MAX_BATCH, MAX_BLOCKS = 4096, 16384
"""Where the search for the most that fits ends."""
# The residency kernel for Hopper takes tables whose rows are multiples of 16 bytes.
_SLOTS_STEP = 4


def settle_fetch(demand: Demand, limits: Limits, slots_per_lane: int | None = None) -> Demand:
    """The demand with its fetch decided: dense streams whole layers where the device can't hold a slot for every block.

    Unless its two buffers would take more than the slots, as they do if the model has hardly any layers.

    Args:
        demand: a fetch that it names stays.
        limits: of the machine.
        slots_per_lane: slots that somebody asked for; they are kept to, so that nothing is streamed instead.

    Raises:
        ConfigError: it has to stream, and the host pool is to keep packed records.
    """
    if demand.fetch is not None:
        return demand
    fetch = demand.decode_plan.fetch
    if demand.mode is Mode.DENSE and slots_per_lane is None:
        resident = plan_memory(demand, demand.max_blocks)
        if not _device_fits(resident, limits):
            stream = dataclasses.replace(demand, fetch=Fetch.STREAM)
            if plan_memory(stream, stream.least_slots).device < resident.device:
                return stream
    return dataclasses.replace(demand, fetch=fetch)


def shape_for(demand: Demand, limits: Limits, slots_per_lane: int | None = None) -> CacheShape:
    """The cache for a demand; None slots: as many as fit.

    Raises:
        ConfigError: it does not fit, see `check_fits`.
    """
    plan = plan_memory(demand, auto_slots(demand, limits) if slots_per_lane is None else slots_per_lane)
    check_fits(plan, limits)
    return plan.shape


def auto_slots(demand: Demand, limits: Limits) -> int:
    """As many slots per lane as the device holds, at most everything; ``least_slots`` if not even those fit.

    A device of unknown size is taken to hold everything. A stream of whole layers gets the few that it reads.
    """
    if demand.streams:
        return demand.least_slots
    least, everything = demand.least_slots, demand.max_blocks
    most = _most(least, everything, lambda slots: _device_fits(plan_memory(demand, slots), limits))
    return most if most == everything else max(least, most - most % _SLOTS_STEP)


def fits(plan: MemoryPlan, limits: Limits) -> bool:
    """Whether device and host hold it, with JAX allowed to pin what it takes. What is unknown suffices."""
    return _device_fits(plan, limits) and _host_fits(plan, limits)


def largest_batch(demand: Demand, limits: Limits, slots_per_lane: int | None = None) -> int:
    """The most sequences of this length that fit, with these or ``least_slots`` slots each; 0: not one."""
    return _most(1, MAX_BATCH, lambda batch: _fits_changed(demand, limits, slots_per_lane, batch=batch))


def largest_length(demand: Demand, limits: Limits, slots_per_lane: int | None = None) -> int:
    """The longest sequences, in tokens, of which this many fit, with slots as in `largest_batch`; 0: none.

    Only memory is looked at, not what the model was trained for.
    """
    size = demand.config.sparse.block_size
    return size * _most(
        1, MAX_BLOCKS, lambda blocks: _fits_changed(demand, limits, slots_per_lane, max_model_len=blocks * size)
    )


def check_fits(plan: MemoryPlan, limits: Limits) -> None:
    """Refuses what can't fit.

    Raises:
        ConfigError: a sentence for each memory that is too small: which one, the bytes, and what to change.
    """
    complaints = list(_complaints(plan, limits))
    if complaints:
        raise ConfigError("\n".join(complaints))


def usable_device(limits: Limits) -> int | None:
    """Device memory that a plan may take, in bytes; None where it is unknown."""
    return None if limits.device is None else int(limits.device.bytes * (1 - DEVICE_SPARE))


def host_needed(plan: MemoryPlan) -> int:
    """Host memory of the whole process, in bytes, with JAX allowed to pin no more than the pool takes."""
    return (plan.pinned(plan.pinned_limit * GIB) or 0) + HOST_RESERVE


def gib(count: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"


def _device_fits(plan: MemoryPlan, limits: Limits) -> bool:
    usable = usable_device(limits)
    return usable is None or plan.device <= usable


def _host_fits(plan: MemoryPlan, limits: Limits) -> bool:
    bound = limits.host_bound
    return bound is None or host_needed(plan) <= bound.bytes


def _fits_changed(demand: Demand, limits: Limits, slots_per_lane: int | None, **changes: Any) -> bool:
    """Whether a changed demand fits, with all its sequences at full length."""
    try:
        changed = dataclasses.replace(demand, **changes)
        plan = plan_memory(changed, changed.least_slots if slots_per_lane is None else slots_per_lane)
    except ConfigError:  # the given pool can't hold one sequence, or the given slots not one step's blocks
        return False
    return changed.num_blocks >= changed.batch * changed.max_blocks and fits(plan, limits)


def _most(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number from ``low`` to ``high`` that ``holds``, which none above it does; 0 if none does."""
    if not holds(low):
        return 0
    if holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _complaints(plan: MemoryPlan, limits: Limits) -> Iterator[str]:
    device, host = limits.device, limits.host_bound
    if device is not None and not _device_fits(plan, limits):
        yield (
            f"device memory: {gib(plan.device)} are needed, {gib(plan.weights)} of them for weights, but "
            f"{1 - DEVICE_SPARE:.0%} of {gib(device.bytes)} ({device.source}) are {gib(usable_device(limits) or 0)}: "
            f"{_ways_out(plan, limits)}"
        )
    if host is not None and not _host_fits(plan, limits):
        yield (
            f"host memory: {gib(host_needed(plan))} are needed, {gib(plan.host_pool)} of them for the pool, but there "
            f"are {gib(host.bytes)} ({host.source}): {_ways_out(plan, limits)}"
        )
        return
    pinned = plan.pinned(limits.pinned)
    if pinned is None or (host is not None and pinned + HOST_RESERVE > host.bytes):
        found = "can't hold" if pinned is None else f"would take {gib(pinned)} for"
        yield (
            f"host memory: JAX, which may pin {gib(limits.pinned)}, {found} the pool of {gib(plan.host_pool)}: set "
            f"{PINNED_LIMIT_VARIABLE}={plan.pinned_limit} before the start"
        )


def _ways_out(plan: MemoryPlan, limits: Limits) -> str:
    """Changes each of which makes the plan fit."""
    ways = list(_changes(plan, limits))
    return f"use {', or '.join(ways)}" if ways else "nothing smaller fits, it takes a larger machine"


def _changes(plan: MemoryPlan, limits: Limits) -> Iterator[str]:
    demand, slots = plan.demand, auto_slots(plan.demand, limits)
    if slots < plan.shape.slots_per_lane and fits(plan_memory(demand, slots), limits):
        yield f"--slots {slots}"

    def pool_fits(blocks: int) -> bool:
        smaller = dataclasses.replace(demand, host_pool=blocks * demand.block_bytes)
        return fits(plan_memory(smaller, plan.shape.slots_per_lane), limits)

    # Rounded down to what can be typed, unless that would be less than a sequence.
    pool = _most(demand.max_blocks, demand.num_blocks, pool_fits) * demand.block_bytes * 100 // GIB / 100
    if pool * GIB >= demand.max_blocks * demand.block_bytes:
        yield f"--host-pool-gib {pool:g}"
    batch, length = largest_batch(demand, limits), largest_length(demand, limits)
    if 0 < batch < demand.batch:
        yield f"--batch {batch}"
    if 0 < length < demand.max_model_len:
        yield f"--max-model-len {length}"
