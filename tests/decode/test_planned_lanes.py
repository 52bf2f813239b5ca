"""Lanes of the planner's size: they decode, they fill what there is and no more, and what can't fit is never made."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from sparda_jax import planned_lanes as module
from sparda_jax.budget import Demand, plan_memory
from sparda_jax.cache.pinning import GIB, PINNED_LIMIT_VARIABLE
from sparda_jax.config import ConfigError
from sparda_jax.decode_plan import Fetch
from sparda_jax.fit import DEVICE_SPARE, HOST_RESERVE
from sparda_jax.machine import Bound, Limits
from sparda_jax.planned_lanes import demand_for, planned_lanes
from sparda_jax.selection import Mode
from tests.decode.support import MODEL, decoded, enter, run

# Longer than the fewest slots that a plan begins with, so that there is something to plan.
LENGTH = 64 * 48


def demand(mode: Mode = Mode.SPARDA, host_pool: int | None = None, fetch: Fetch | None = None) -> Demand:
    return demand_for(MODEL, mode=mode, max_model_len=LENGTH, batch=3, host_pool=host_pool, fetch=fetch)


def limits(device: int | None, host: int = 64 * GIB, pinned: int = 8 * GIB) -> Limits:
    """In bytes; of the device those that a plan may take."""
    bound = None if device is None else Bound(bytes=int(device / (1 - DEVICE_SPARE)) + 1, source="--device-gib")
    return Limits(device=bound, host=(Bound(bytes=host, source="--host-gib"),), pinned=pinned)


def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("lanes were made that can't fit")

    monkeypatch.setattr(module, "DecodeLanes", refuse)


def test_lanes_fill_the_device_and_decode() -> None:
    """With memory for 40 slots of 48; and what they hold is what was planned, layer 0 with a slot for every block."""
    plan = plan_memory(demand(), 40)
    lanes = planned_lanes(MODEL, demand(), limits=limits(plan.device))
    assert lanes.shape == plan.shape
    assert lanes.shape.slots_per_lane == 40
    assert lanes.plan.fetch is Fetch.AHEAD
    first, *others = (layer.slots.nbytes for layer in lanes._state.layers)
    assert (first, sum(others)) == (plan.first_layer, plan.slots)
    assert first * 40 == others[0] * 48
    held = sum(x.nbytes for x in jax.tree.leaves((lanes._state, lanes._weights)))
    assert held + plan.staging + plan.workspace == plan.device
    assert lanes._pool.nbytes == plan.host_pool
    for lane in range(3):
        enter(lanes, Mode.SPARDA, lane, lane)
    np.testing.assert_array_equal(run(lanes, 12), [decoded(Mode.SPARDA, lane)[0][:12] for lane in range(3)])


def test_dense_lanes_stream_where_their_slots_do_not_fit() -> None:
    """The pool is small, or the two layers that are streamed would take as much as their slots."""
    pool = 60 * demand().block_bytes
    dense, resident = demand(Mode.DENSE, pool), plan_memory(demand(Mode.DENSE, pool), 48)
    assert planned_lanes(MODEL, dense, limits=limits(resident.device)).plan.fetch is Fetch.IN_TURN
    lanes = planned_lanes(MODEL, dense, limits=limits(resident.device - 1000))
    plan = plan_memory(demand(Mode.DENSE, pool, Fetch.STREAM), 3)
    assert plan.device < resident.device - 1000
    assert lanes.shape == plan.shape
    assert lanes.plan.fetch is Fetch.STREAM
    held = sum(x.nbytes for x in jax.tree.leaves((lanes._state, lanes._weights)))
    assert held + plan.staging + plan.workspace == plan.device
    for lane in range(3):
        enter(lanes, Mode.DENSE, lane, lane)
    np.testing.assert_array_equal(run(lanes, 12), [decoded(Mode.DENSE, lane)[0][:12] for lane in range(3)])


def test_a_fetch_that_was_asked_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn = demand(Mode.SPARDA, fetch=Fetch.IN_TURN)
    assert planned_lanes(MODEL, in_turn, limits=limits(None)).plan.fetch is Fetch.IN_TURN
    nothing_is_made(monkeypatch)
    with pytest.raises(ConfigError, match="--max-model-len"):
        planned_lanes(MODEL, demand(Mode.DENSE), limits=limits(plan_memory(demand(Mode.DENSE), 48).device - 1000))
    in_turn = demand(Mode.DENSE, 60 * demand().block_bytes, Fetch.IN_TURN)
    with pytest.raises(ConfigError, match="device memory: "):
        planned_lanes(MODEL, in_turn, limits=limits(plan_memory(in_turn, 48).device - 1000))


def test_a_capped_pool_has_fewer_blocks_than_the_lanes_could_use() -> None:
    capped = demand(Mode.SPARSE, host_pool=100 * demand().block_bytes)
    lanes = planned_lanes(MODEL, capped, limits=limits(None), slots_per_lane=7)
    assert (lanes.free_blocks, lanes.shape.slots_per_lane, lanes.plan.fetch) == (100, 7, Fetch.IN_TURN)
    assert lanes._pool.nbytes == 100 * demand().block_bytes


def test_without_limits_this_process_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_limits", lambda: limits(1000))
    nothing_is_made(monkeypatch)
    with pytest.raises(ConfigError, match="device memory"):
        planned_lanes(MODEL, demand())


def test_what_does_not_fit_is_refused_with_memory_bytes_and_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_made(monkeypatch)
    plan = plan_memory(demand(), demand().least_slots)
    cases = [
        # Enough for all but a few of the bytes of layer 0's slots.
        (
            limits(plan.device - 1000),
            None,
            r"^device memory: \d.* MiB are needed, .*: use --batch 2, or --max-model-len",
        ),
        (limits(plan.device), 48, r"^device memory: .*: use --slots 38$"),
        (
            limits(None, host=HOST_RESERVE + GIB),
            None,
            r"^host memory: 6\.\d+ GiB are needed, .* MiB of them for the pool",
        ),
        (limits(None, pinned=GIB), None, rf"^host memory: JAX, which may pin 1.00 GiB, .* {PINNED_LIMIT_VARIABLE}=3 "),
    ]
    for machine, slots, message in cases:
        with pytest.raises(ConfigError, match=message):
            planned_lanes(MODEL, demand(), limits=machine, slots_per_lane=slots)
    with pytest.raises(ConfigError, match=r"^--slots 5 cannot hold the 6 blocks .*use 6 or more"):
        planned_lanes(MODEL, demand(), limits=limits(None), slots_per_lane=5)
    with pytest.raises(ConfigError, match="fetch=stream brings whole layers, and mode=sparda"):
        demand(fetch=Fetch.STREAM)
    with pytest.raises(ConfigError, match=re.escape("--host-pool-gib") + r" .* holds 47 blocks, .* has 48: give 0.0"):
        demand(host_pool=47 * demand().block_bytes)


def test_every_way_out_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the refusal proposes is made."""
    made: list[Demand] = []
    monkeypatch.setattr(module, "DecodeLanes", lambda model, shape, *_, **__: made.append(shape))
    machine = limits(plan_memory(demand(), demand().least_slots).device - 1000)
    with pytest.raises(ConfigError) as refused:
        planned_lanes(MODEL, demand(), limits=machine)
    ways = dict(re.findall(r"--(batch|max-model-len) (\d+)", str(refused.value)))
    for name, value in ways.items():
        changed = dataclasses.replace(demand(), **{name.replace("-", "_"): int(value)})
        planned_lanes(MODEL, changed, limits=machine)
    assert len(made) == 2
