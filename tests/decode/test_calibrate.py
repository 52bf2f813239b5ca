"""The calibration of the fetch kernel: the choice by a made-up clock, and on a GPU by a real one."""

import dataclasses
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax import planned_lanes as module
from sparda_jax.cache.host_dtype import KvHostDtype, host_record
from sparda_jax.calibrate import (
    CALLS,
    CANDIDATES,
    COPIES,
    NO_CALIBRATION,
    REPLAYS,
    SAMPLES,
    SEGMENTS,
    Calibration,
    calibrate_copies,
    copy_rates,
    fewest,
    make_pool,
)
from sparda_jax.machine import Bound, Limits
from sparda_jax.pallas_kernels.backend import Backend
from sparda_jax.pallas_kernels.record_copy import CopySettings, fetch_records, mosaic_gpu, pack_plan, triton
from sparda_jax.planned_lanes import demand_for, planned_lanes
from sparda_jax.selection import Mode
from tests.decode.support import MODEL

NO_LIMITS = Limits(device=None, host=(Bound(bytes=1 << 36, source="--host-gib"),))


def test_the_fewest_that_are_close_to_the_best() -> None:
    assert fewest({2: 46.0, 3: 48.8, 4: 49.6, 6: 50.2, 8: 50.1}) == 3
    assert fewest({2: 97.0, 3: 100.0}) == 2
    assert fewest({2: 96.9, 3: 100.0}) == 3
    assert fewest({8: 10.0}) == 8
    # More can be slower, and whatever lies between does not matter.
    assert fewest({2: 50.0, 3: 30.0, 4: 50.0}) == 2
    rng = np.random.default_rng(3)
    for _ in range(50):
        rates = {ctas: float(rng.uniform(0.9, 1)) for ctas in (2, 3, 4, 6, 8)}
        chosen = fewest(rates)
        good = [ctas for ctas, rate in sorted(rates.items()) if rate / max(rates.values()) >= 0.97]
        assert chosen == good[0]


def test_rates_are_bytes_by_the_best_sample() -> None:
    """The clock is made up; the copies are real."""
    candidates, held = (2, 5, 3), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    took = np.random.default_rng(4).uniform(1, 2, (SAMPLES, len(candidates)))
    # Each sample reads the clock before and after; between the samples it stands still.
    times = iter(np.repeat([0, *np.cumsum(took)], 2)[1:])
    device = jax.devices()[0]
    pool = make_pool(device, held)
    rates = copy_rates(pool, jnp.zeros(pool.shape, pool.dtype), candidates, lambda: float(next(times)))
    copied = REPLAYS * CALLS * SEGMENTS * COPIES * 4 * 8 * 4
    assert list(rates) == list(candidates)
    np.testing.assert_allclose(list(rates.values()), copied / took.min(axis=0))


def test_a_cpu_is_not_timed() -> None:
    held = jax.ShapeDtypeStruct((34, 64), jnp.int32)
    found = calibrate_copies(jax.devices()[0], (128, 64), jnp.dtype(jnp.bfloat16), held)
    assert found is NO_CALIBRATION
    assert found.settings == CopySettings()
    assert str(found) == "not timed"


def test_settings_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the number of thread blocks; without any the kernel keeps its own."""
    found: list[dict[str, int]] = []

    def watch(plan, source, destination, queue, *, segments, direction, **settings):
        found.append(settings)
        return destination, queue

    for kernels in (mosaic_gpu, triton):
        monkeypatch.setattr(kernels, "copy_records", watch)
    plan = pack_plan(jnp.zeros(2, jnp.int32), jnp.zeros((2, 3, 2), jnp.int32))
    # A shape that no other test traces: what is traced here must not be found again.
    pool, slots = jnp.zeros((7, 128, 64), jnp.float32), jnp.zeros((5, 128, 64), jnp.float32)
    for backend, settings in itertools.product(
        ("mosaic_gpu", "triton"), (CopySettings(ctas=3), CopySettings(ctas=5), CopySettings(), None)
    ):
        fetch_records(plan, pool, slots, segments=2, backend=backend, settings=settings)
    # None is the kernel's own, so nothing is traced again for it.
    assert found == [{"ctas": 3}, {"ctas": 5}, {}, {"programs": 3}, {"programs": 5}, {}]
    with pytest.raises(ValueError, match="ctas=0 is not allowed"):
        CopySettings(ctas=0)


def test_planned_lanes_are_calibrated_where_they_fetch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []
    made = Calibration(settings=CopySettings(ctas=3), rates={2: 40e9, 3: 49.55e9})

    def calibrate(*args: object) -> Calibration:
        asked.append(args)
        return made

    monkeypatch.setattr(module, "calibrate_copies", calibrate)
    caplog.set_level(logging.INFO, module.__name__)
    demand = demand_for(MODEL, mode=Mode.SPARDA, max_model_len=1000, batch=2)
    lanes = planned_lanes(MODEL, demand, limits=NO_LIMITS, slots_per_lane=7)
    config = MODEL.config
    record, dtype = (2 * config.sparse.block_size, config.head_dim), jnp.dtype(jnp.float32)
    assert asked == [(jax.devices()[0], record, dtype, jax.ShapeDtypeStruct(record, dtype))]
    assert lanes.plan == dataclasses.replace(demand.decode_plan, copies=CopySettings(ctas=3))
    assert caplog.messages.pop() == (
        "decode lanes: 2, each with slots for 7 of 16 blocks, mode=sparda, fetch=ahead, records on the host: "
        "float32, CTAs of a copy: 3 (GB/s: 2: 40.0, 3: 49.5)"
    )
    own = planned_lanes(MODEL, demand, limits=NO_LIMITS, slots_per_lane=7, copies=CopySettings(ctas=6))
    assert own.plan.copies.ctas == 6
    assert caplog.messages[-1].endswith("CTAs of a copy: 6 (as given)")
    # With a slot for every block nothing is ever fetched.
    assert planned_lanes(MODEL, demand, limits=NO_LIMITS).plan.copies == CopySettings()
    assert caplog.messages[-1].endswith("CTAs of a copy: the kernel's own (not timed)")
    assert len(asked) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kv_host_dtype", list(KvHostDtype))
@pytest.mark.parametrize("record", [(128, 128), (128, 64)])
def test_on_a_gpu(record: tuple[int, int], kv_host_dtype: KvHostDtype) -> None:
    """The link of a server takes more than 20 GB/s."""
    dtype = jnp.dtype(jnp.bfloat16)
    found = calibrate_copies(jax.devices()[0], record, dtype, host_record(record, dtype, kv_host_dtype))
    print(found)
    assert tuple(found.rates) in (CANDIDATES[Backend.MOSAIC_GPU], CANDIDATES[Backend.TRITON])
    assert found.settings.ctas in found.rates
    assert max(found.rates.values()) > 20e9
