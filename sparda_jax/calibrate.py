"""How many thread blocks the fetch kernel gets: at the start each number is timed on the machine for a moment.

A fetch runs beside a layer, and every thread block takes an SM from it. So the number is not the fastest one, but the
smallest of those that are about as fast.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from sparda_jax.pallas_kernels.backend import Backend
from sparda_jax.pallas_kernels.record_copy import CopySettings, copy_backend, fetch_records, pack_plan

CANDIDATES = {Backend.MOSAIC_GPU: (2, 3, 4, 6, 8), Backend.TRITON: (16, 24, 32, 48, 64)}
"""A thread block of the Mosaic kernel has several records under way, one of the Triton kernel has one."""
CLOSE = 0.03
"""A rate is as good as the best one if it falls short of it by no more than this share."""
RECORDS, SEGMENTS, COPIES = 512, 32, 8
"""Of the pool, and of each call: the records that 16 lanes with 2 KV heads miss in a usual step, about."""
CALLS, REPLAYS, SAMPLES = 8, 2, 4
"""Calls of a program, each after the one before; launches of it in a sample; samples, of which the best counts."""
SERIAL = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was found.

    Attributes:
        settings: the choice.
        rates: bytes per second by number of thread blocks; empty where nothing was timed.
    """

    settings: CopySettings
    rates: Mapping[int, float]

    def __str__(self) -> str:
        if not self.rates:
            return "not timed"
        return "GB/s: " + ", ".join(f"{ctas}: {rate / 1e9:.1f}" for ctas, rate in self.rates.items())


NO_CALIBRATION = Calibration(settings=CopySettings(), rates={})


def calibrate_copies(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    record: tuple[int, int],
    dtype: jnp.dtype,
    held: jax.ShapeDtypeStruct,
) -> Calibration:
    """Times the fetch kernel on a GPU; takes the time of compiling it a few times, and some milliseconds.

    Args:
        device: that fetches; on anything but a GPU nothing is timed, and the kernel keeps its own number.
        record: rows and head_dim of a record.
        dtype: of the slots.
        held: a record as the host pool holds it (`host_record`).
    """
    if device.platform != "gpu":
        return NO_CALIBRATION
    pool, slots = make_pool(device, held), jnp.zeros((RECORDS, *record), dtype, device=device)
    candidates = CANDIDATES.get(copy_backend(pool, slots), ())
    if not candidates:
        return NO_CALIBRATION
    rates = copy_rates(pool, slots, candidates)
    return Calibration(settings=CopySettings(ctas=fewest(rates)), rates=rates)


def fewest(rates: Mapping[int, float]) -> int:
    """The smallest number whose rate is within `CLOSE` of the best one."""
    return min(ctas for ctas, rate in rates.items() if rate >= (1 - CLOSE) * max(rates.values()))


def make_pool(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    held: jax.ShapeDtypeStruct,
) -> Shaped[Array, "records pool_rows head_dim"]:
    """A small pool of such records in ``pinned_host`` memory to fetch from."""
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    return jax.device_put(np.ones((RECORDS, *held.shape), held.dtype), host)


def copy_rates(
    pool: Shaped[Array, "records pool_rows head_dim"],
    slots: Shaped[Array, "records rows head_dim"],
    candidates: Sequence[int],
    now: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Bytes of the pool per second, of the fetch with each number of thread blocks.

    Args:
        pool: as of `make_pool`, whose device fetches.
        slots: where to, as many as there are records; they are taken.
        candidates: the numbers.
        now: a clock, in seconds.
    """
    rng, device = np.random.default_rng(0), next(iter(pool.devices()))
    plans = jax.device_put(tuple(_random_plan(rng) for _ in range(CALLS)), device)

    def program(ctas: int) -> Callable[[Array, Array, tuple[Array, ...]], Array]:
        def fetched(slots: Array, pool: Array, plans: tuple[Array, ...]) -> Array:
            for plan in plans:
                slots = fetch_records(plan, pool, slots, segments=SEGMENTS, settings=CopySettings(ctas=ctas))
            return slots

        return jax.jit(fetched, donate_argnums=0, compiler_options=SERIAL)

    programs = {ctas: program(ctas) for ctas in candidates}
    for run in programs.values():  # compiled, and warm
        slots = jax.block_until_ready(run(run(slots, pool, plans), pool, plans))
    best = dict.fromkeys(candidates, float("inf"))
    # In turn, so that whatever else goes on meets them all.
    for _ in range(SAMPLES):
        for ctas, run in programs.items():
            began = now()
            for _ in range(REPLAYS):
                slots = run(slots, pool, plans)
            jax.block_until_ready(slots)
            best[ctas] = min(best[ctas], now() - began)
    copied = REPLAYS * CALLS * SEGMENTS * COPIES * pool.nbytes // RECORDS
    return {ctas: copied / seconds for ctas, seconds in best.items()}


def _random_plan(rng: np.random.Generator) -> Array:
    """Copies between records and slots all over the pool and the slots, none of them twice."""
    record, slot = (rng.permutation(RECORDS)[: SEGMENTS * COPIES] for _ in range(2))
    pairs = np.stack([record, slot], axis=-1).reshape(SEGMENTS, COPIES, 2)
    return pack_plan(jnp.full(SEGMENTS, COPIES, jnp.int32), jnp.asarray(pairs, jnp.int32))
