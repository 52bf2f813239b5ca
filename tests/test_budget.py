"""The memory plan: equal to what is allocated, filled up to the limit, and refused with a way out that works."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.budget import Demand, MemoryPlan, plan_memory
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.cache.kv import KVCache
from sparda_jax.cache.pinning import GIB, PINNED_LIMIT_VARIABLE
from sparda_jax.cache.pool import HostPool
from sparda_jax.cache.state import CacheShape, empty_state
from sparda_jax.config import ConfigError
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.fit import (
    HOST_RESERVE,
    auto_slots,
    check_fits,
    fits,
    host_needed,
    largest_batch,
    largest_length,
    settle_fetch,
    shape_for,
)
from sparda_jax.lanes import DecodeLanes
from sparda_jax.machine import Bound, Limits
from sparda_jax.model import Decoder
from sparda_jax.selection import Mode
from sparda_jax.shapes import SHAPES
from tests.core.support import kind_of, skew_for, toy

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
LARGE = Demand(
    config=SHAPES["minicpm4.1-8b"],
    dtype=BFLOAT16,
    mode=Mode.SPARDA,
    has_forecast=True,
    max_model_len=131072,
    batch=16,
)


def limits(device: float | None, host: float | None, pinned: float = 1024) -> Limits:
    """In GiB."""
    return Limits(
        device=None if device is None else Bound(bytes=int(device * GIB), source="--device-gib"),
        host=() if host is None else (Bound(bytes=int(host * GIB), source="--host-gib"),),
        pinned=int(pinned * GIB),
    )


def small(mode: Mode, dtype: Any = FLOAT32, **changes: Any) -> Demand:
    config = toy(kind_of(mode)).decoder.config
    demand = Demand(config=config, dtype=dtype, mode=mode, has_forecast=True, max_model_len=1000, batch=3)
    return dataclasses.replace(demand, **changes)


DENSE = dataclasses.replace(LARGE, mode=Mode.DENSE, has_forecast=False)
STREAM = dataclasses.replace(DENSE, fetch=Fetch.STREAM)


def nbytes(tree: Any) -> int:
    """Of real arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("mode", [Mode.SPARDA, Mode.DENSE, Mode.INFINIGEN])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_every_part_equals_what_is_allocated(mode: Mode, dtype: np.dtype) -> None:
    config = dataclasses.replace(toy(kind_of(mode)).decoder.config, num_layers=4)
    demand = small(mode, dtype, config=config, host_pool=1 << 24)
    slots = demand.max_blocks if mode is Mode.DENSE else 9
    plan = plan_memory(demand, slots)
    block = nbytes(jnp.zeros((config.num_layers, config.num_kv_heads, 2, 64, config.head_dim), dtype))
    blocks = (1 << 24) // block
    assert plan.shape == CacheShape(lanes=3, max_blocks=16, num_blocks=blocks, slots_per_lane=slots)
    channels = mode.partial_channels(config)
    state = empty_state(config, plan.shape, dtype, partial_channels=channels)
    assert plan.first_layer == state.layers[0].slots.nbytes
    assert plan.slots == sum(layer.slots.nbytes for layer in state.layers[1:])
    assert plan.pages == sum(layer.pages.nbytes for layer in state.layers)
    partial = nbytes([(layer.partial_keys, layer.partial_basis) for layer in state.layers])
    assert plan.partial_keys == partial + (4 * 4 * config.num_kv_heads * config.head_dim**2 if channels else 0)
    assert plan.tables == nbytes(state) - plan.first_layer - plan.slots - plan.pages - partial
    # Whole, half of it while it grows, and twice as much for short prompts: all are short here.
    whole = nbytes(KVCache.empty(config, 1, 1024, dtype, infinigen=channels > 0))
    assert plan.staging == whole + whole // 2 + 2 * whole
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    pool = HostPool(config, plan.shape, dtype, host)
    assert plan.host_pool == pool.nbytes
    assert plan.pool_array == pool.arrays[0].nbytes
    model = Decoder(config, has_forecast=True, dtype=dtype, rngs=nnx.Rngs(0))
    assert plan.weights == nbytes(nnx.state(model))
    parts = (plan.weights, nbytes(state), plan.partial_keys - partial, plan.staging, plan.workspace)
    assert plan.device == sum(parts)


def test_what_infinigen_scores_is_counted() -> None:
    """32 channels of each token's key in every layer but the first; and 32 basis vectors per lane and KV head."""
    demand = small(Mode.INFINIGEN)
    keys = 3 * 16 * 2 * 64 * 32 * 4
    basis, skew = 3 * 2 * 64 * 32 * 4, 2 * 64 * 64 * 4
    assert demand.config.num_layers == 2
    assert plan_memory(demand, 9).partial_keys == keys + basis + 2 * skew


@pytest.mark.parametrize("mode", [Mode.SPARDA, Mode.INFINIGEN])
def test_the_lanes_hold_what_the_plan_says(mode: Mode) -> None:
    demand = small(mode)
    plan = plan_memory(demand, 9)
    model = toy(kind_of(mode)).decoder
    lanes = DecodeLanes(model, plan.shape, DecodePlan(mode=mode, fetch=Fetch.AHEAD), skew_for(mode))
    held = nbytes((lanes._state, lanes._weights, lanes._skew))
    assert held == plan.device - plan.staging - plan.workspace
    assert lanes._pool.nbytes == plan.host_pool


def test_the_8b_shape_in_numbers() -> None:
    """32 KiB of keys and values per token, 1/32 of it for compressed keys; 8.2 billion weights in bfloat16."""
    plan = plan_memory(LARGE, 160)
    assert plan.host_pool == 16 * 131072 * 32768
    assert plan.first_layer == 16 * 2048 * 2 * 32768
    assert plan.slots == 31 * 16 * 160 * 2 * 32768
    assert plan.pages == plan.host_pool // 32
    # One and a half sequences, and two caches for short prompts of 8192 tokens; each keeps its last selection.
    selected = 32 * 2 * 96 * 4 / 131072
    assert plan.staging == pytest.approx((1.5 * 131072 + 2 * 8192) * (32768 * 33 / 32 + selected), abs=16)
    assert plan.weights == pytest.approx(16.44e9, rel=1e-3)
    assert plan.tables < 32 << 20


def test_a_pool_larger_than_everything_else_passes_through_the_device() -> None:
    demand = small(Mode.SPARDA, host_pool=40 * GIB)
    plan = plan_memory(demand, 9)
    assert plan.pool_array > 19 * GIB
    assert plan.device == plan.weights + plan.pool_array


def test_slots_fill_the_device() -> None:
    for device in (60, 80.5, 101):
        machine = limits(device, 128)
        slots = auto_slots(LARGE, machine)
        assert 160 <= slots <= 2048
        assert fits(plan_memory(LARGE, slots), machine)
        assert slots == 2048 or not fits(plan_memory(LARGE, slots + 4), machine)
        assert shape_for(LARGE, machine).slots_per_lane == slots
        assert slots % 4 == 0
    assert auto_slots(LARGE, limits(60, 128)) < auto_slots(LARGE, limits(80.5, 128)) < 2048
    assert auto_slots(LARGE, limits(101, 128)) == 2048
    assert auto_slots(LARGE, limits(None, 128)) == 2048


def test_slots_that_do_not_fit_are_the_fewest_and_refused() -> None:
    machine = limits(20, 128)
    assert auto_slots(LARGE, machine) == LARGE.least_slots == 160
    with pytest.raises(ConfigError, match="device memory"):
        shape_for(LARGE, machine)


@pytest.mark.parametrize("slots", [None, 600])
@pytest.mark.parametrize(("device", "host"), [(60, 512), (132, 70), (None, 40), (100, None)])
def test_one_more_than_the_most_does_not_fit(device: float | None, host: float | None, slots: int | None) -> None:
    machine = limits(device, host)

    def fitting(**changes: Any) -> bool:
        demand = dataclasses.replace(LARGE, **changes)
        return fits(plan_memory(demand, slots or demand.least_slots), machine)

    batch, length = largest_batch(LARGE, machine, slots), largest_length(LARGE, machine, slots)
    assert batch > 1
    assert length % 64 == 0
    assert fitting(batch=batch)
    assert not fitting(batch=batch + 1)
    assert fitting(max_model_len=length)
    assert not fitting(max_model_len=length + 1)


def test_the_most_of_a_given_pool_is_what_it_holds_at_full_length() -> None:
    demand = dataclasses.replace(LARGE, host_pool=10 * 4 * GIB)
    machine = limits(132, 128)
    assert largest_batch(demand, machine) == 10
    assert largest_length(demand, machine) == 10 * 131072 // 16
    # More lanes than that are allowed: not all of them are at full length.
    check_fits(plan_memory(demand, 160), machine)


def test_nothing_fits_beside_the_weights() -> None:
    machine = limits(15, 128)
    assert (largest_batch(LARGE, machine), largest_length(LARGE, machine)) == (0, 0)
    with pytest.raises(ConfigError, match=r"^device memory: .*it takes a larger machine$"):
        check_fits(plan_memory(LARGE, 160), machine)


CASES = [
    (LARGE, 2048, limits(60, 128)),
    (LARGE, 160, limits(132, 60)),
    (dataclasses.replace(LARGE, batch=64), 160, limits(132, 200)),
    (dataclasses.replace(LARGE, batch=64, host_pool=200 * GIB), 200, limits(132, 80)),
    (DENSE, 2048, limits(80, 128)),
    (STREAM, 3, limits(30, 128)),
]


@pytest.mark.parametrize(("demand", "slots", "machine"), CASES)
def test_each_way_out_leads_out(demand: Demand, slots: int, machine: Limits) -> None:
    plan = plan_memory(demand, slots)
    with pytest.raises(ConfigError) as refused:
        check_fits(plan, machine)
    ways = re.findall(r"(--[a-z-]+) ([\d.]+)(?=, or|$)", str(refused.value), re.MULTILINE)
    assert ways, refused.value
    for flag, text in ways:
        value = float(text)
        changes = {
            "--slots": {},
            "--batch": {"batch": int(value)},
            "--max-model-len": {"max_model_len": int(value)},
            "--host-pool-gib": {"host_pool": int(value * GIB)},
        }[flag]
        changed = dataclasses.replace(demand, **changes)
        # Fewer slots go with the other ways, as they do where none are asked for.
        other = int(value) if flag == "--slots" else auto_slots(changed, machine)
        found = plan_memory(changed, other)
        check_fits(found, dataclasses.replace(machine, pinned=found.pinned_limit * GIB))


def test_both_memories_are_named_with_their_bytes() -> None:
    with pytest.raises(ConfigError) as refused:
        check_fits(plan_memory(LARGE, 2048), limits(80, 64))
    device, host = str(refused.value).splitlines()
    assert device.startswith("device memory: 88.59 GiB are needed, 15.31 GiB of them for weights, but 95% of 80.00 GiB")
    assert "(--device-gib) are 76.00 GiB: use " in device
    assert host.startswith("host memory: 70.00 GiB are needed, 64.00 GiB of them for the pool, but there are 64.00 GiB")


def test_what_jax_may_pin_is_a_limit_of_its_own() -> None:
    plan = plan_memory(LARGE, 160)
    with pytest.raises(ConfigError) as refused:
        check_fits(plan, limits(132, 128, pinned=64))
    setting = re.search(rf"set {PINNED_LIMIT_VARIABLE}=(\d+) before the start", str(refused.value))
    assert setting is not None
    assert str(refused.value).startswith("host memory: JAX, which may pin 64.00 GiB, can't hold the pool of 64.00 GiB:")
    check_fits(plan, limits(132, 128, pinned=int(setting[1])))
    with pytest.raises(ConfigError, match="host memory: JAX, which may pin"):
        check_fits(plan, limits(132, 128, pinned=int(setting[1]) - 1))


def test_a_limit_on_pinning_that_is_too_loose_for_the_host_is_refused() -> None:
    """12 lanes need 48 GiB; with 64 GiB allowed JAX would pin all of them, in ever larger regions."""
    plan = plan_memory(dataclasses.replace(LARGE, batch=12), 160)
    assert host_needed(plan) == 54 * GIB + HOST_RESERVE
    machine = limits(132, 60, pinned=64)
    with pytest.raises(ConfigError, match=rf"would take 64.00 GiB for .*: set {PINNED_LIMIT_VARIABLE}=54 before"):
        check_fits(plan, machine)
    check_fits(plan, dataclasses.replace(machine, pinned=54 * GIB))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "--batch 0 is not allowed: it must be at least 1"),
        ({"max_model_len": 1}, "--max-model-len 1 is not allowed: it must be at least 2"),
        (
            {"host_pool": GIB},
            "host memory: --host-pool-gib 1 holds 512 blocks, and a sequence of 131072 tokens has 2048",
        ),
    ],
)
def test_demands_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        dataclasses.replace(LARGE, **changes)


def test_slots_must_hold_a_step() -> None:
    def plan(mode: Mode, slots: int) -> MemoryPlan:
        return plan_memory(dataclasses.replace(LARGE, mode=mode), slots)

    for mode, width in ((Mode.SPARDA, 128), (Mode.INFINIGEN, 96), (Mode.DENSE, 2048)):
        assert plan(mode, width).shape.slots_per_lane == width
        with pytest.raises(ConfigError, match=rf"--slots {width - 1} cannot hold the {width} blocks .*use {width} or"):
            plan(mode, width - 1)
    assert plan(Mode.SPARDA, 99999).shape.slots_per_lane == 2048
    assert dataclasses.replace(LARGE, mode=Mode.DENSE).least_slots == 2048


@pytest.mark.parametrize("batch", [1, 16])
def test_dense_streams_where_its_slots_do_not_fit(batch: int) -> None:
    """Down to the byte; and never where slots or a fetch were asked for, or the host is what is too small."""
    demand = dataclasses.replace(DENSE, batch=batch)
    needed = plan_memory(demand, 2048).device
    enough = limits(needed / GIB / 0.95 + 1e-6, 8)
    short = limits(needed / GIB / 0.95 - 1e-6, 8)
    assert settle_fetch(demand, enough).fetch is settle_fetch(demand, limits(None, 8)).fetch is Fetch.IN_TURN
    streamed = settle_fetch(demand, short)
    assert streamed == dataclasses.replace(demand, fetch=Fetch.STREAM)
    assert auto_slots(streamed, short) == 3
    assert settle_fetch(demand, short, 2048).fetch is Fetch.IN_TURN
    assert settle_fetch(dataclasses.replace(demand, fetch=Fetch.IN_TURN), short).fetch is Fetch.IN_TURN
    assert settle_fetch(dataclasses.replace(demand, fetch=Fetch.STREAM), enough).fetch is Fetch.STREAM
    for mode, fetch in ((Mode.SPARDA, Fetch.AHEAD), (Mode.SPARSE, Fetch.IN_TURN), (Mode.INFINIGEN, Fetch.AHEAD)):
        assert settle_fetch(dataclasses.replace(LARGE, mode=mode), limits(1, 8)).fetch is fetch


def test_a_stream_takes_two_layers_and_hardly_any_slots() -> None:
    """The first block of a sequence, its tail and the one before in slots; a layer of 16 whole lanes is 2 GiB."""
    resident, streamed = plan_memory(DENSE, 2048), plan_memory(STREAM, STREAM.least_slots)
    assert streamed.shape.slots_per_lane == 3
    assert streamed.workspace == resident.workspace + 4 * GIB
    assert resident.slots - streamed.slots == 31 * 16 * 2045 * 2 * 32768
    assert streamed.host_pool == resident.host_pool == 64 * GIB
    capped = dataclasses.replace(STREAM, host_pool=16 * GIB)
    assert plan_memory(capped, 3).workspace == resident.workspace + GIB
    two_layers = dataclasses.replace(STREAM, config=dataclasses.replace(STREAM.config, num_layers=2))
    assert plan_memory(two_layers, 3).workspace == resident.workspace + 2 * GIB
    with pytest.raises(ConfigError, match=r"--slots 2 cannot hold the 3 blocks .* fetch=stream .*use 3 or more$"):
        plan_memory(STREAM, 2)
    with pytest.raises(ConfigError, match=r"--slots 100 cannot hold the 2048 .*, or no --slots: then whole layers are"):
        plan_memory(DENSE, 100)
    with pytest.raises(ConfigError, match="fetch=stream brings whole layers, and mode=sparda"):
        dataclasses.replace(LARGE, fetch=Fetch.STREAM)


def test_the_most_that_can_be_streamed() -> None:
    machine = limits(80, 500)
    batch, length = largest_batch(STREAM, machine), largest_length(STREAM, machine)
    assert batch > largest_batch(DENSE, machine) > 0

    def fitting(**changes: Any) -> bool:
        return fits(plan_memory(dataclasses.replace(STREAM, **changes), 3), machine)

    assert fitting(batch=batch)
    assert not fitting(batch=batch + 1)
    assert fitting(max_model_len=length)
    assert not fitting(max_model_len=length + 64)


def test_a_sequence_of_a_few_blocks_is_resident() -> None:
    demand = dataclasses.replace(LARGE, max_model_len=100)
    assert demand.max_blocks == demand.least_slots == 2
    assert plan_memory(demand, 2).slots == 31 * 16 * 2 * 2 * 32768


@pytest.mark.parametrize(("kv_host_dtype", "kept"), [(KvHostDtype.INT8, jnp.int32), (KvHostDtype.FP8, jnp.uint32)])
def test_packed_records_take_half_the_host_memory(kv_host_dtype: KvHostDtype, kept: Any) -> None:
    """A byte for each number and four for each row; the device's part stays what it was."""
    packed = dataclasses.replace(LARGE, kv_host_dtype=kv_host_dtype)
    assert LARGE.block_bytes == 32 * 2 * 128 * 128 * 2
    assert packed.block_bytes == 32 * 2 * 128 * (128 + 4)
    same = {"host_pool": 0, "demand": LARGE, "shape": None}
    plans = [dataclasses.replace(plan_memory(demand, 160), **same) for demand in (LARGE, packed)]
    assert plans[0] == plans[1]
    host = limits(None, 128)
    assert largest_batch(packed, host) >= 1.9 * largest_batch(LARGE, host)
    pool = dataclasses.replace(packed, host_pool=64 * GIB)
    assert pool.num_blocks == 64 * GIB // packed.block_bytes
    demand = small(Mode.SPARDA, BFLOAT16, kv_host_dtype=kv_host_dtype)
    plan = plan_memory(demand, 9)
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    made = HostPool(demand.config, plan.shape, BFLOAT16, host)
    assert plan.host_pool == made.nbytes
    assert made.arrays[0].dtype == kept
    assert made.record_bytes * demand.config.num_kv_heads * demand.config.num_layers == demand.block_bytes


def test_dense_streams_no_packed_records() -> None:
    """With slots for everything they are as good as any; where layers had to be streamed, the way out is named."""
    packed = dataclasses.replace(DENSE, kv_host_dtype=KvHostDtype.INT8)
    roomy, narrow = limits(1024, 1024), limits(75, 1024)
    assert settle_fetch(packed, roomy).fetch is Fetch.IN_TURN
    assert settle_fetch(DENSE, narrow).fetch is Fetch.STREAM
    for refused in (lambda: settle_fetch(packed, narrow), lambda: dataclasses.replace(packed, fetch=Fetch.STREAM)):
        with pytest.raises(ConfigError, match=r"--kv-host-dtype int8 packs .* use --kv-host-dtype auto, or a mode"):
            refused()
