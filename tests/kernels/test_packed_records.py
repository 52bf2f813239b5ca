"""Packed records on every backend, against an oracle in float64 that knows the layout by itself."""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sparda_jax.pallas_kernels.backend import Backend, mosaic_interpreter
from sparda_jax.pallas_kernels.record_copy import (
    Code,
    fetch_records,
    fetch_records_queued,
    pack_plan,
    pack_records,
    packed_rows,
    unpack_records,
    write_back_records,
)
from tests.h200.harness import compile_for_h200, needs_compiler, pinned_host
from tests.kernels.test_copy_records import GARBAGE, memory

CODES = list(Code)
PEAK = {Code.INT8: 127.0, Code.FP8: 448.0}
ROWS, SEGMENTS, WIDTH, RECORDS, SLOTS = 128, 3, 4, 20, 15


def nearest(x: np.ndarray, code: Code) -> np.ndarray:
    """The nearest numbers of a code, of two the even one; int8 as numpy rounds, fp8 by ml_dtypes' own table."""
    return np.rint(x) if code is Code.INT8 else x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def oracle(records: np.ndarray, code: Code) -> tuple[np.ndarray, np.ndarray]:
    """What finite records are when they arrive again, and the scale of each row; in float64."""
    x = records.astype(np.float64)
    scale = np.abs(x).max(-1, keepdims=True) / PEAK[code]
    numbers = np.where(scale > 0, nearest(x / np.where(scale > 0, scale, 1), code), 0)
    return numbers * scale, scale


def step(records: np.ndarray, scale: np.ndarray, code: Code) -> np.ndarray:
    """The most that a number may be off: half of what lies between it and the next number of the code."""
    if code is Code.INT8:
        return np.broadcast_to(scale / 2, records.shape)
    return np.maximum(np.abs(records.astype(np.float64)) / 16, scale * 2.0**-10)


def by_hand(packed: np.ndarray, rows: int, code: Code) -> np.ndarray:
    """The numbers of packed records, read out of their bytes one quarter of the rows after the other."""
    head_dim, count = packed.shape[-1], len(packed)
    bytes_of = np.ascontiguousarray(packed).view(np.uint8).reshape(count, packed.shape[1], head_dim, 4)[:, : rows // 4]
    kind = np.int8 if code is Code.INT8 else ml_dtypes.float8_e4m3fn
    numbers = np.moveaxis(np.ascontiguousarray(bytes_of).view(kind), -1, 1).reshape(count, rows, head_dim)
    scale = packed[:, rows // 4 :].reshape(count, (packed.shape[1] - rows // 4) * head_dim)[:, :rows].view(np.float32)
    return numbers.astype(np.float64) * scale[..., None].astype(np.float64)


def contents(rng: np.random.Generator, count: int, head_dim: int, dtype: jnp.dtype) -> np.ndarray:
    """Records whose rows differ in size by orders of magnitude, rows of zeros and of one value among them."""
    x = rng.standard_normal((count, ROWS, head_dim)) * 2.0 ** rng.integers(-30, 30, (count, ROWS, 1))
    x[:, 5], x[:, 7], x[:, 9] = 0.0, -3.0, 0.0
    x[:, 9, 3] = 1e-3
    return x.astype(dtype)


def check(got: np.ndarray, records: np.ndarray, code: Code) -> None:
    """Near the record by the code's bound, and where no two numbers are almost equally near, the oracle's."""
    dtype = got.dtype
    want, scale = oracle(records, code)
    got, bound = got.astype(np.float64), step(records, scale, code)
    ulp = 4 * float(jnp.finfo(dtype).eps) * np.abs(want) + 1e-6 * scale
    assert (np.abs(got - records.astype(np.float64)) <= bound * (1 + 1e-5) + ulp).all()
    near = np.abs(got - want) <= ulp
    assert near.sum() >= 0.999 * near.size
    # The others lie between two numbers of the code.
    off = np.abs(np.abs(records.astype(np.float64) - want) - bound)
    assert (near | (off <= 1e-4 * bound + ulp)).all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("head_dim", [128, 64, 16, 24])
def test_layout_and_bound(code: Code, head_dim: int) -> None:
    """Bytes and scales are where the docstring says, whatever the width."""
    rng = np.random.default_rng(head_dim)
    x = contents(rng, 3, head_dim, np.dtype(np.float32))
    packed = np.asarray(jax.jit(pack_records, static_argnums=1)(x, code))
    assert packed.shape == (3, packed_rows(ROWS, head_dim), head_dim)
    assert packed.nbytes == 3 * 4 * head_dim * (ROWS // 4 + -(-ROWS // head_dim))
    check(by_hand(packed, ROWS, code).astype(np.float32), x, code)
    back = np.asarray(unpack_records(jnp.asarray(packed), ROWS, jnp.dtype(jnp.float32)))
    np.testing.assert_array_equal(back, by_hand(packed, ROWS, code).astype(np.float32))


FLOATS = st.floats(width=32, allow_subnormal=False)


@pytest.mark.parametrize("code", CODES)
@settings(max_examples=40, deadline=None)
@given(x=arrays.arrays(np.float32, (1, 8, 4), elements=FLOATS))
def test_any_rows(code: Code, x: np.ndarray) -> None:
    """Finite rows keep the bound; others arrive as NaN, and change no neighbour."""
    back = np.asarray(_round_trip(jnp.asarray(x), code))
    finite = np.isfinite(x).all(-1)
    assert np.isnan(back[~finite]).all()
    rows = x[finite].astype(np.float64)
    scale = np.abs(rows).max(-1, keepdims=True, initial=0) / PEAK[code]
    # What is below 2^-100 counts as nothing.
    bound = np.maximum(step(rows, scale, code) * (1 + 1e-5) + 1e-6 * np.abs(rows), 2.0**-100)
    assert (np.abs(back[finite] - rows) <= bound).all()


@functools.partial(jax.jit, static_argnums=1)
def _round_trip(x: jax.Array, code: Code) -> jax.Array:
    return unpack_records(pack_records(x, code), x.shape[1], x.dtype)


@pytest.mark.parametrize("code", CODES)
def test_packing_again_changes_little(code: Code) -> None:
    """A tail that waited and went on is packed twice; in float32 the second time finds the numbers of the first."""
    x = contents(np.random.default_rng(3), 2, 64, np.dtype(np.float32))
    once = np.asarray(_round_trip(jnp.asarray(x), code))
    np.testing.assert_allclose(np.asarray(_round_trip(jnp.asarray(once), code)), once, rtol=1e-6)


class PackedCopyCases:
    """What every backend must do."""

    @pytest.mark.parametrize("code", CODES)
    @pytest.mark.parametrize(("head_dim", "dtype"), [(128, jnp.bfloat16), (64, jnp.float32)])
    def test_there_and_back(self, backend: str, pool_memory: str, code: Code, head_dim: int, dtype: jnp.dtype) -> None:
        """Ragged counts; slots and records that are not counted keep their bits; NaN stays in its row."""
        rng = np.random.default_rng(head_dim)
        slots = contents(rng, SLOTS, head_dim, np.dtype(dtype))
        slots[1, 2, 3], slots[4, 0, 0] = np.nan, -np.inf
        untouched = rng.integers(0, 2**32, (RECORDS, packed_rows(ROWS, head_dim), head_dim), np.uint32)
        untouched = untouched.view(np.dtype(code.words))
        copy = functools.partial(write_back_records, segments=SEGMENTS, backend=backend)
        fetch = functools.partial(fetch_records, segments=SEGMENTS, backend=backend)
        for counts in ([0, 0, 0], [0, 3, 1], [WIDTH] * SEGMENTS):
            plan, records, slot_ids = plan_of(rng, counts)
            pool = jax.device_put(jnp.asarray(untouched), memory(pool_memory))
            written = jax.jit(copy, donate_argnums=2)(plan, jnp.asarray(slots), pool)
            assert pool.is_deleted()
            assert written.sharding.memory_kind == pool_memory
            held = np.array(jax.device_put(written, memory("device")))
            others = np.setdiff1d(np.arange(RECORDS), records)
            np.testing.assert_array_equal(held[others], untouched[others])
            before = rng.standard_normal(slots.shape).astype(slots.dtype)
            fetched = np.asarray(jax.jit(fetch, donate_argnums=2)(plan, written, jnp.asarray(before)))
            idle = np.setdiff1d(np.arange(SLOTS), slot_ids)
            np.testing.assert_array_equal(fetched[idle], before[idle])
            broken = ~np.isfinite(slots[slot_ids].astype(np.float32)).all(-1)
            assert np.isnan(fetched[slot_ids][broken].astype(np.float32)).all()
            sound = np.where(broken[..., None], 0, slots[slot_ids])
            check(np.where(broken[..., None], 0, fetched[slot_ids]).astype(slots.dtype), sound, code)
            by_bytes = by_hand(held[records], ROWS, code).astype(slots.dtype)
            np.testing.assert_array_equal(
                fetched[slot_ids].astype(np.float32), by_bytes.astype(np.float32), err_msg="bytes are rounded once"
            )

    @pytest.mark.parametrize("code", CODES)
    def test_queued(self, backend: str, pool_memory: str, code: Code) -> None:
        """The second of two fetches finds what the first one left; every byte that there is, and scales of NaN."""
        rng = np.random.default_rng(1)
        packed = rng.integers(0, 2**32, (RECORDS, packed_rows(ROWS, 64), 64), np.uint32)
        bytes_of = packed[:, : ROWS // 4].view(np.uint8)
        bytes_of[bytes_of & 0x7F == 0x7F] = 0x11  # the NaN of fp8, which is never written
        packed[:, ROWS // 4 :] = np.float32(2.0 ** rng.integers(-4, 4, (RECORDS, 2, 64))).view(np.uint32)
        packed[3, ROWS // 4 :] = 0xFFFFFFFF
        packed = packed.view(np.dtype(code.words))
        first, one, one_slots = plan_of(rng, [WIDTH, 0, 1])
        second, two, two_slots = plan_of(rng, [0, WIDTH, WIDTH])
        before = rng.standard_normal((SLOTS, ROWS, 64)).astype(np.float32)

        def both(pool, slots):
            statics = {"segments": SEGMENTS, "backend": backend}
            slots, queue = fetch_records_queued(first, pool, slots, jnp.zeros(4, jnp.int32), **statics)
            return fetch_records_queued(second, pool, slots, queue, **statics)[0]

        pool = jax.device_put(jnp.asarray(packed), memory(pool_memory))
        want = before.copy()
        want[one_slots] = by_hand(packed[one], ROWS, code)
        want[two_slots] = by_hand(packed[two], ROWS, code)
        np.testing.assert_array_equal(np.asarray(jax.jit(both)(pool, jnp.asarray(before))), want)


def plan_of(rng: np.random.Generator, counts: list[int]) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """A plan with these counts and garbage beyond them, and the records and slots that it counts."""
    pairs = rng.choice(GARBAGE, (SEGMENTS, WIDTH, 2)).astype(np.int32)
    counted = np.arange(WIDTH) < np.array(counts)[:, None]
    records, slots = rng.permutation(RECORDS)[: sum(counts)], rng.permutation(SLOTS)[: sum(counts)]
    pairs[counted] = np.stack([records, slots], axis=-1)
    return pack_plan(jnp.asarray(counts, jnp.int32), jnp.asarray(pairs)), records, slots


class TestPackedCopy(PackedCopyCases):
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
class TestPackedCopyOnGpu(PackedCopyCases):
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
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("head_dim", [128, pytest.param(64, marks=pytest.mark.slow)])
def test_compiled_for_h200(backend: str, code: Code, head_dim: int) -> None:
    """Both directions are one kernel each, in place, without spilled registers or copies of pool or slots."""
    plan, slots = jnp.zeros(32 * (1 + 2 * 96), jnp.int32), jnp.zeros((256, ROWS, head_dim), jnp.bfloat16)
    pool = pinned_host((512, packed_rows(ROWS, head_dim), head_dim), code.words)
    for call, args in ((fetch_records, (plan, pool, slots)), (write_back_records, (plan, slots, pool))):
        compiled = compile_for_h200(functools.partial(call, segments=32, backend=backend), *args, donate_argnums=2)
        assert compiled.copies(1) == []
        assert compiled.memory_stats.temp_size_in_bytes < 1024
        assert compiled.memory_stats.host_temp_size_in_bytes == 0
        assert [kernel.spilled for kernel in compiled.kernels] == [0]
        aliased = compiled.memory_stats.alias_size_in_bytes + compiled.memory_stats.host_alias_size_in_bytes
        assert aliased == args[2].nbytes


def test_what_does_not_fit_is_refused() -> None:
    """Rows of another number, a pool of floats of another dtype, rows that can't be quartered."""
    plan, slots = jnp.zeros(3, jnp.int32), jnp.zeros((2, ROWS, 64), jnp.float32)
    for pool in (jnp.zeros((2, 33, 64), jnp.int32), jnp.zeros((2, 34, 64), jnp.int16), jnp.zeros((2, 34, 64))):
        with pytest.raises(ValueError, match="pool and slots must hold equal records, or the pool packed ones"):
            fetch_records(plan, pool, slots, segments=1)
    with pytest.raises(ValueError, match="rows=6 can't be packed: give a multiple of 4"):
        packed_rows(6, 64)
