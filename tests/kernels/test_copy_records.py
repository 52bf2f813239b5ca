"""The record copy on every backend: exactly the counted pairs, bit for bit, into the memory of the destination."""

import contextlib
import functools
import inspect
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.backend import Backend, mosaic_interpreter
from sparda_jax.pallas_kernels.record_copy import (
    fetch_records,
    fetch_records_queued,
    pack_plan,
    unpack_plan,
    write_back_records,
)
from sparda_jax.pallas_kernels.record_copy.mosaic_gpu import copy_records as copy_with_ring
from tests.h200.harness import Compiled, compile_for_h200, needs_compiler, pinned_host

GARBAGE = np.array([2**31 - 1, -(2**31), -1, 10**6], np.int64)
"""What pairs beyond a count hold in these tests: followed, each of them would leave the arrays."""

SHAPES = {
    # segments, width, records, slots, rows, head_dim, dtype
    "bf16": (4, 6, 40, 30, 128, 128, jnp.bfloat16),
    "narrow": (3, 5, 33, 29, 128, 64, jnp.bfloat16),
    "single": (1, 1, 5, 3, 32, 64, jnp.bfloat16),
    "float32": (2, 4, 12, 9, 128, 128, jnp.float32),
}


def memory(kind: str) -> jax.sharding.Sharding:
    """A memory of the first device."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def bits(x: jax.Array) -> np.ndarray:
    """A copy of the array's contents as integers: records may hold NaN, and a viewed pool could not be donated."""
    x = jnp.copy(jax.device_put(x, memory("device")))
    return np.array(x).view(np.uint16 if x.dtype == jnp.bfloat16 else np.uint32)


class Copy:
    """A pool, slots and plans with random contents, NaN among them."""

    def __init__(self, name: str, seed: int, pool_memory: str = "pinned_host") -> None:
        self.pool_memory = pool_memory
        self.segments, self.width, self.records, self.slots, rows, head_dim, dtype = SHAPES[name]
        self.rng = np.random.default_rng(seed)
        pattern = np.uint16 if dtype == jnp.bfloat16 else np.uint32

        def random(count: int) -> np.ndarray:
            contents = self.rng.integers(0, np.iinfo(pattern).max, (count, rows, head_dim), pattern)
            return contents.view(dtype)

        self.pool_contents, self.slot_contents = random(self.records), random(self.slots)

    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """A fresh pool and fresh slots."""
        return jax.device_put(jnp.array(self.pool_contents), memory(self.pool_memory)), jnp.array(self.slot_contents)

    def plan(self, counts: list[int]) -> tuple[jax.Array, np.ndarray, np.ndarray]:
        """A plan with these counts and garbage beyond them, and the records and slots that it counts."""
        total = sum(counts)
        records = self.rng.permutation(self.records)[:total]
        slots = self.rng.permutation(self.slots)[:total]
        pairs = self.rng.choice(GARBAGE, (self.segments, self.width, 2)).astype(np.int32)
        starts = np.cumsum([0, *counts])
        for s, count in enumerate(counts):
            pairs[s, :count, 0] = records[starts[s] : starts[s + 1]]
            pairs[s, :count, 1] = slots[starts[s] : starts[s + 1]]
        return pack_plan(jnp.asarray(counts, jnp.int32), jnp.asarray(pairs)), records, slots


def all_counts(copy: Copy) -> list[list[int]]:
    """Nothing, one record, ragged segments with empty ones among them, and full segments."""
    nothing = [0] * copy.segments
    ragged = [int(copy.rng.integers(0, copy.width + 1)) if s % 2 else 0 for s in range(copy.segments)]
    return [nothing, [*nothing[:-1], 1], ragged, ragged[::-1], [copy.width] * copy.segments]


class CopyRecordsCases:
    """What every backend must do."""

    @pytest.mark.parametrize("name", SHAPES)
    def test_fetch(self, backend: str, pool_memory: str, name: str) -> None:
        """The counted slots hold their records, the others and the pool are as before."""
        copy = Copy(name, 1, pool_memory)
        fetch = jax.jit(functools.partial(fetch_records, segments=copy.segments, backend=backend), donate_argnums=2)
        for counts in all_counts(copy):
            plan, records, slots = copy.plan(counts)
            pool, buffer = copy.arrays()
            want = bits(buffer)
            want[slots] = bits(pool)[records]
            got = fetch(plan, pool, buffer)
            assert buffer.is_deleted()
            assert got.sharding.memory_kind == "device"
            np.testing.assert_array_equal(bits(got), want)
            np.testing.assert_array_equal(bits(pool), copy.pool_contents.view(want.dtype))

    def test_queued_fetches(self, backend: str, pool_memory: str) -> None:
        """The second of two fetches finds what the first one left."""
        copy = Copy("narrow", 4, pool_memory)
        first, one, one_slots = copy.plan([copy.width, 0, 1])
        second, two, two_slots = copy.plan([0, copy.width, copy.width])
        pool, buffer = copy.arrays()

        def both(pool, slots):
            statics = {"segments": copy.segments, "backend": backend}
            slots, queue = fetch_records_queued(first, pool, slots, jnp.zeros(4, jnp.int32), **statics)
            return fetch_records_queued(second, pool, slots, queue, **statics)[0]

        want = bits(buffer)
        want[one_slots] = bits(pool)[one]
        want[two_slots] = bits(pool)[two]
        np.testing.assert_array_equal(bits(jax.jit(both)(pool, buffer)), want)

    @pytest.mark.parametrize("name", SHAPES)
    def test_write_back(self, backend: str, pool_memory: str, name: str) -> None:
        """The counted records hold their slots, the others are as before, and the pool stays where it was."""
        copy = Copy(name, 2, pool_memory)
        write_back = jax.jit(
            functools.partial(write_back_records, segments=copy.segments, backend=backend), donate_argnums=2
        )
        for counts in all_counts(copy):
            plan, records, slots = copy.plan(counts)
            pool, buffer = copy.arrays()
            want = bits(pool)
            want[records] = bits(buffer)[slots]
            got = write_back(plan, buffer, pool)
            assert pool.is_deleted()
            assert got.sharding.memory_kind == pool_memory
            np.testing.assert_array_equal(bits(got), want)

    def test_round_trip(self, backend: str, pool_memory: str) -> None:
        """What was written back is what is fetched; without donation, pool and slots are left as they are."""
        copy = Copy("narrow", 3, pool_memory)
        plan, _, slots = copy.plan([copy.width] * copy.segments)
        pool, buffer = copy.arrays()
        written = write_back_records(plan, buffer, pool, segments=copy.segments, backend=backend)
        fetched = fetch_records(plan, written, jnp.zeros_like(buffer), segments=copy.segments, backend=backend)
        np.testing.assert_array_equal(bits(fetched)[slots], bits(buffer)[slots])
        np.testing.assert_array_equal(bits(pool), copy.pool_contents.view(np.uint16))


class RingCases:
    """The ring of the Mosaic kernel, small enough to go round many times."""

    @pytest.mark.parametrize(("ctas", "stages", "storing"), [(1, 1, 1), (2, 2, 1), (3, 4, 2)])
    def test_any_ring_copies_the_same(self, ctas: int, stages: int, storing: int) -> None:
        """Whatever the number of CTAs, stages and stores under way."""
        copy = Copy("narrow", 5, "device")
        plan, records, slots = copy.plan([copy.width, 0, copy.width])
        pool, buffer = copy.arrays()
        ring = {"ctas": ctas, "stages": stages, "storing": storing}
        with mosaic_interpreter():
            queue = jnp.zeros(4, jnp.int32)
            got, _ = copy_with_ring(plan, pool, buffer, queue, segments=copy.segments, direction=(0, 1), **ring)
        want = bits(buffer)
        want[slots] = bits(pool)[records]
        np.testing.assert_array_equal(bits(got), want)


class TestRing(RingCases):
    """Interpreted."""


@pytest.mark.gpu
class TestRingOnGpu(RingCases):
    """Compiled."""


class TestCopyRecords(CopyRecordsCases):
    """On the CPU; kernels are interpreted."""

    @pytest.fixture(params=list(Backend))
    def backend(self, request: pytest.FixtureRequest) -> Iterator[str]:
        """The backend under test."""
        with mosaic_interpreter() if request.param == Backend.MOSAIC_GPU else contextlib.nullcontext():
            yield request.param

    @pytest.fixture
    def pool_memory(self, backend: str) -> str:
        """JAX can't lower the Mosaic interpreter's callbacks into a program that also has operands in host memory."""
        return "device" if backend == Backend.MOSAIC_GPU else "pinned_host"


@pytest.mark.gpu
class TestCopyRecordsOnGpu(CopyRecordsCases):
    """Compiled, over PCIe."""

    @pytest.fixture(params=list(Backend))
    def backend(self, request: pytest.FixtureRequest) -> str:
        """The backend under test."""
        return request.param

    @pytest.fixture
    def pool_memory(self) -> str:
        """Where a pool lies in use."""
        return "pinned_host"


@needs_compiler
@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.MOSAIC_GPU])
class TestCompiledForH200:
    """What can be said without a GPU: both directions are in place, and nothing is copied beside the records."""

    segments, width = 32, 96

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A plan, a pool and slots."""
        plan = jnp.zeros(self.segments * (1 + 2 * self.width), jnp.int32)
        return plan, pinned_host((512, 128, 128), jnp.bfloat16), jnp.zeros((256, 128, 128), jnp.bfloat16)

    def check(self, compiled: Compiled) -> None:
        """One kernel, no spilled registers, no copy."""
        assert compiled.copies(1) == []
        assert compiled.memory_stats.temp_size_in_bytes < 1024
        assert compiled.memory_stats.host_temp_size_in_bytes == 0
        assert len(compiled.kernels) == 1
        assert compiled.kernels[0].spilled == 0

    def test_fetch(self, backend: str) -> None:
        """The slots' memory is the result's."""
        plan, pool, slots = self.arrays()
        fetch = functools.partial(fetch_records, segments=self.segments, backend=backend)
        compiled = compile_for_h200(fetch, plan, pool, slots, donate_argnums=2)
        self.check(compiled)
        assert compiled.memory_stats.alias_size_in_bytes == slots.nbytes

    def test_write_back(self, backend: str) -> None:
        """The pool's memory is the result's, and stays on the host."""
        plan, pool, slots = self.arrays()
        write_back = functools.partial(write_back_records, segments=self.segments, backend=backend)
        compiled = compile_for_h200(write_back, plan, slots, pool, donate_argnums=2)
        self.check(compiled)
        assert compiled.memory_stats.host_alias_size_in_bytes == pool.nbytes


def test_plan_layout() -> None:
    """Counts first, then the pairs, segment by segment."""
    counts, pairs = jnp.array([1, 2], jnp.int32), jnp.arange(12, dtype=jnp.int32).reshape(2, 3, 2)
    plan = pack_plan(counts, pairs)
    assert plan.tolist() == [1, 2, *range(12)]
    for got, want in zip(unpack_plan(plan, 2), (counts, pairs), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_does_not_fit_is_refused() -> None:
    """A plan of another size or dtype, records of another dtype; other shapes already fail the annotations in tests."""
    copy = Copy("narrow", 4)
    plan, _, _ = copy.plan([0] * copy.segments)
    pool, slots = copy.arrays()
    with pytest.raises(ValueError, match="plan has 33 integers"):
        fetch_records(plan, pool, slots, segments=4)
    with pytest.raises(ValueError, match="plan has 3 integers"):
        fetch_records(plan[:3], pool, slots, segments=3)  # room for counts only
    with pytest.raises(ValueError, match="plan is float32: it must be int32"):
        inspect.unwrap(fetch_records)(plan.astype(jnp.float32), pool, slots, segments=3)
    with pytest.raises(ValueError, match="pool and slots must hold equal records"):
        fetch_records(plan, pool, slots.astype(jnp.float32), segments=3)
    for backend, head_dim in ((Backend.TRITON, 48), (Backend.MOSAIC_GPU, 4)):
        with pytest.raises(ValueError, match="does not take these operands"):
            fetch_records(plan, pool[..., :head_dim], slots[..., :head_dim], segments=3, backend=backend)
