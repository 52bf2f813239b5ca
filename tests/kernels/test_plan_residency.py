"""The residency plan against a clock that is walked by hand, on every backend, over long sequences of steps."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from sparda_jax.pallas_kernels.backend import Backend, mosaic_interpreter
from sparda_jax.pallas_kernels.record_copy import unpack_plan
from sparda_jax.pallas_kernels.residency import empty_residency, mosaic_gpu, plan_residency, triton
from tests.h200.harness import compile_for_h200, needs_compiler
from tests.kernels.clock_oracle import Clock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Static shapes and the ranges (base, count) that the lanes own."""

    kv_heads: int
    max_blocks: int
    width: int
    num_slots: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def batch(self) -> int:
        """How many lanes there are."""
        return len(self.ranges)


SMALL = Geometry(kv_heads=2, max_blocks=24, width=8, num_slots=52, ranges=((0, 12), (12, 11), (30, 20)))
ODD = Geometry(kv_heads=3, max_blocks=37, width=5, num_slots=33, ranges=((20, 9), (2, 13)))
LONG = Geometry(kv_heads=1, max_blocks=700, width=12, num_slots=420, ranges=((5, 300), (310, 110)))
GEOMETRIES = {"small": SMALL, "odd": ODD, "long": LONG}


class Simulation:
    """Tables on the backend under test and clocks beside them, taken through the same steps."""

    def __init__(self, geometry: Geometry, backend: str, seed: int) -> None:
        self.geometry = geometry
        self.plan: Callable[..., Any] = functools.partial(plan_residency, backend=backend)
        self.rng = np.random.default_rng(seed)
        base, count = (jnp.asarray(x, jnp.int32) for x in zip(*geometry.ranges, strict=True))
        self.state = empty_residency(
            base=base,
            count=count,
            kv_heads=geometry.kv_heads,
            max_blocks=geometry.max_blocks,
            num_slots=geometry.num_slots,
        )
        self.clocks = [[Clock(count) for _ in range(geometry.kv_heads)] for _, count in geometry.ranges]
        self.table = self.rng.permutation(5 * geometry.batch * geometry.max_blocks)
        self.table = self.table[: geometry.batch * geometry.max_blocks].reshape(geometry.batch, -1).astype(np.int32)

    def step(self, wanted: list[list[list[int]]], query_block: list[int], written: list[int]) -> np.ndarray:
        """Takes one step, compares everything with the clocks, and returns the number of copies [batch, kv_heads]."""
        g = self.geometry
        before = np.array(self.state.slot_of_block)
        padded = np.full((g.batch, g.kv_heads, g.width), -1, np.int32)
        for b, heads in enumerate(wanted):
            for h, blocks in enumerate(heads):
                padded[b, h, : len(blocks)] = blocks
        self.state, slot_ids, plan = self.plan(
            self.state,
            jnp.asarray(padded),
            jnp.asarray(self.table),
            jnp.asarray(query_block, jnp.int32),
            jnp.asarray(written, jnp.int32),
        )
        slot_ids = np.asarray(slot_ids)
        counts, pairs = (np.asarray(x) for x in unpack_plan(plan, g.batch * g.kv_heads))
        for b, heads in enumerate(wanted):
            for h, blocks in enumerate(heads):
                slots, copies = self.clocks[b][h].step(blocks, query_block[b], written[b])
                want = [-1 if slot is None else self._global_id(b, h, slot) for slot in slots]
                np.testing.assert_array_equal(slot_ids[b, h], want + [-1] * (g.width - len(want)))
                segment = b * g.kv_heads + h
                expected = [
                    (self.table[b, block] * g.kv_heads + h, self._global_id(b, h, slot)) for block, slot in copies
                ]
                assert [tuple(pair) for pair in pairs[segment, : counts[segment]]] == expected
                self._check_invariants(before[b, h], slot_ids[b, h], blocks, written[b])
                tail = self.table[b, query_block[b]] * g.kv_heads + h
                assert query_block[b] < 0 or tail not in pairs[segment, : counts[segment], 0]
        self._compare_tables()
        return counts.reshape(g.batch, g.kv_heads)

    def _check_invariants(self, before: np.ndarray, slot_ids: np.ndarray, wanted: list[int], written: int) -> None:
        """What holds whatever the clock says: kept blocks keep their slots, and no two wanted blocks share one."""
        slots = slot_ids[slot_ids >= 0]
        assert len(set(slots.tolist())) == len(slots)
        for block, slot in enumerate(before):
            if slot >= 0 and (block >= written or block in wanted):
                assert block not in wanted or slot_ids[wanted.index(block)] == slot
                assert slot not in slots or block in wanted

    def _global_id(self, lane: int, head: int, slot: int) -> int:
        return (self.geometry.ranges[lane][0] + slot) * self.geometry.kv_heads + head

    def _compare_tables(self) -> None:
        """The tables say what the clocks say, and slots that no lane owns are untouched."""
        g = self.geometry
        slot_of_block = np.full((g.batch, g.kv_heads, g.max_blocks), -1)
        block_of_slot = np.full((g.kv_heads, g.num_slots), -1)
        bits = np.zeros((g.kv_heads, g.num_slots))
        hand = np.asarray(self.state.hand)
        for b, (base, count) in enumerate(g.ranges):
            for h, clock in enumerate(self.clocks[b]):
                assert hand[b, h] == clock.hand
                bits[h, base : base + count] = clock.bits
                for i, block in enumerate(clock.blocks):
                    if block is not None:
                        slot_of_block[b, h, block] = self._global_id(b, h, i)
                        block_of_slot[h, base + i] = block
        np.testing.assert_array_equal(self.state.slot_of_block, slot_of_block)
        np.testing.assert_array_equal(self.state.block_of_slot, block_of_slot)
        np.testing.assert_array_equal(self.state.referenced, bits)

    def choose(self, lane: int, head: int, query_block: int, written: int, keep: float) -> list[int]:
        """Blocks to want: the tail, what is dirty, some of what is held, and others up to the width."""
        g = self.geometry
        must = {query_block, *range(max(written, query_block - 1), query_block)}
        held = {block for block in self.clocks[lane][head].blocks if block is not None}
        past = np.arange(query_block)
        weight = np.array([1.0 if block in held else 1 - keep for block in past]) + 1e-9
        size = min(len(past), int(self.rng.integers(g.width // 2, g.width + 1)) - len(must))
        drawn = self.rng.choice(past, size, replace=False, p=weight / weight.sum()) if size > 0 else []
        return sorted(must | {int(block) for block in drawn})


class PlanResidencyCases:
    """What every backend must do."""

    @pytest.mark.parametrize("name", GEOMETRIES)
    @pytest.mark.parametrize("keep", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
    def test_long_runs_agree_with_the_clock(self, backend: str, steps: int, name: str, keep: float) -> None:
        """Tails move over block boundaries, write-back lags, lanes fall idle; there are more blocks than slots."""
        if name == "odd" and backend == Backend.MOSAIC_GPU:
            pytest.skip("the Mosaic kernel takes multiples of 4 only")
        simulation = Simulation(GEOMETRIES[name], backend, seed=len(name) + int(10 * keep))
        g, rng = simulation.geometry, simulation.rng
        query_block = [int(x) for x in rng.integers(g.max_blocks // 3, 2 * g.max_blocks // 3, g.batch)]
        written = list(query_block)
        evicted = 0
        for _ in range(steps):
            idle = rng.random(g.batch) < 0.15
            for b in range(g.batch):
                query_block[b] = min(query_block[b] + int(rng.random() < 0.3), g.max_blocks - 1)
                written[b] = min(max(written[b], query_block[b] - int(rng.integers(0, 2))), query_block[b])
            wanted = [
                [
                    [] if idle[b] else simulation.choose(b, h, query_block[b], written[b], keep)
                    for h in range(g.kv_heads)
                ]
                for b in range(g.batch)
            ]
            before = np.asarray(simulation.state.slot_of_block)
            simulation.step(wanted, [-1 if idle[b] else query_block[b] for b in range(g.batch)], written)
            evicted += int(((before >= 0) & (np.asarray(simulation.state.slot_of_block) < 0)).sum())
        assert evicted > 0 or name == "long"

    @pytest.mark.slow
    def test_short_chunks(self, backend: str) -> None:
        """The hand looks at 8 slots at a time, and its walks start and end anywhere in them, and wrap."""
        if backend == Backend.REFERENCE:
            pytest.skip("the reference has no chunks")
        kernels = {Backend.TRITON: triton.plan_residency, Backend.MOSAIC_GPU: mosaic_gpu.plan_residency}
        simulation = Simulation(SMALL, backend, seed=0)
        simulation.plan = jax.jit(functools.partial(kernels[Backend(backend)], chunk=8))
        for first in (0, 5, 13, 10, 3):
            simulation.step([[list(range(first, first + 8))] * 2] * 3, [22] * 3, [22] * 3)

    def test_second_chance(self, backend: str) -> None:
        """A full range whose bits are all set is swept once to clear them; the next victims follow the hand."""
        simulation = Simulation(dataclasses.replace(SMALL, ranges=((3, 9), (20, 9), (30, 9))), backend, seed=0)
        first, second, third = [list(range(8))] * 2, [list(range(8, 16))] * 2, [[0, 8, 9, 17]] * 2
        assert (simulation.step([first] * 3, [20] * 3, [20] * 3) == 8).all()
        assert (simulation.step([second] * 3, [20] * 3, [20] * 3) == 8).all()
        assert (simulation.step([third] * 3, [20] * 3, [20] * 3) == 2).all()

    def test_hits_only_move_no_hand(self, backend: str) -> None:
        """Where nothing is missing, no slot changes its block and no bit is lost."""
        simulation = Simulation(SMALL, backend, seed=0)
        blocks = [[[1, 4, 5, 9, 10, 11]] * 2] * 3
        assert (simulation.step(blocks, [15] * 3, [15] * 3) == 6).all()
        hand = np.asarray(simulation.state.hand)
        assert (simulation.step(blocks, [15] * 3, [15] * 3) == 0).all()
        np.testing.assert_array_equal(simulation.state.hand, hand)

    def test_tail_takes_a_slot_and_is_never_copied(self, backend: str) -> None:
        """New as a tail, held as a dirty block, and copied only when it was evicted after its write-back."""
        simulation = Simulation(SMALL, backend, seed=0)
        assert (simulation.step([[[20]] * 2] * 3, [20] * 3, [20] * 3) == 0).all()
        # Block 20 is not written yet: more other blocks than there are slots pass through, and it stays.
        for start in (0, 8):
            simulation.step([[list(range(start, start + 8))] * 2] * 3, [21] * 3, [20] * 3)
        assert (simulation.step([[[20]] * 2] * 3, [21] * 3, [20] * 3) == 0).all()
        for start in (0, 8):
            simulation.step([[list(range(start, start + 8))] * 2] * 3, [21] * 3, [21] * 3)
        assert (simulation.step([[[20]] * 2] * 3, [21] * 3, [21] * 3)[:2] == 1).all()

    def test_too_few_slots(self, backend: str) -> None:
        """What finds no slot gets none, and the next step, which wants less, goes on as if nothing had happened."""
        simulation = Simulation(dataclasses.replace(SMALL, ranges=((0, 5), (6, 1), (20, 30))), backend, seed=0)
        counts = simulation.step([[list(range(8))] * 2] * 3, [20] * 3, [20] * 3)
        np.testing.assert_array_equal(counts[:, 0], [5, 1, 8])
        # All five are dirty now: nothing may go.
        counts = simulation.step([[[6, 7]] * 2] * 3, [20] * 3, [0] * 3)
        np.testing.assert_array_equal(counts[:, 0], [0, 0, 0])
        counts = simulation.step([[[6, 7]] * 2] * 3, [20] * 3, [20] * 3)
        np.testing.assert_array_equal(counts[:, 0], [2, 1, 0])

    def test_idle_lanes_touch_nothing(self, backend: str) -> None:
        """An idle lane may own no slots and have garbage for its numbers."""
        simulation = Simulation(dataclasses.replace(SMALL, ranges=((0, 12), (12, 0), (30, 20))), backend, seed=0)
        counts = simulation.step([[[0, 3]] * 2, [[]] * 2, [[2]] * 2], [5, -1, 2], [5, -7, 2])
        np.testing.assert_array_equal(counts[:, 0], [2, 0, 0])
        assert simulation.step([[[]] * 2] * 3, [-1] * 3, [0] * 3).sum() == 0


class TestPlanResidency(PlanResidencyCases):
    """On the CPU; kernels are interpreted."""

    @pytest.fixture(params=list(Backend))
    def backend(self, request: pytest.FixtureRequest) -> Iterator[str]:
        """The backend under test."""
        with mosaic_interpreter() if request.param == Backend.MOSAIC_GPU else contextlib.nullcontext():
            yield request.param

    @pytest.fixture
    def steps(self, backend: str) -> int:
        """The Mosaic interpreter takes a third of a second for a step."""
        return 14 if backend == Backend.MOSAIC_GPU else 40


@pytest.mark.gpu
class TestPlanResidencyOnGpu(PlanResidencyCases):
    """Compiled."""

    @pytest.fixture(params=list(Backend))
    def backend(self, request: pytest.FixtureRequest) -> str:
        """The backend under test."""
        return request.param

    @pytest.fixture
    def steps(self) -> int:
        """Hundreds."""
        return 200


def test_mosaic_copies_start_at_multiples_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 stops with an illegal instruction where a TMA copy starts elsewhere in a row.

    The interpreter takes such copies, so its TMA is watched here. The lanes' ranges and the hand start at any slot.
    """
    starts = []

    class Copy(gpu_callbacks.AsyncCopyGmemToSmemTask):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            innermost = kwargs["src_access"].range[-1]
            starts.append(innermost.start)

    monkeypatch.setattr(gpu_callbacks, "AsyncCopyGmemToSmemTask", Copy)
    geometry = dataclasses.replace(LONG, ranges=((5, 301), (311, 109)))
    with mosaic_interpreter():
        simulation = Simulation(geometry, Backend.MOSAIC_GPU, seed=0)
        for first in (0, 11, 21):
            simulation.step([[list(range(first, first + 11))]] * 2, [600] * 2, [600] * 2)
    assert {start % 4 for start in starts} == {0}
    assert len(set(starts)) > 4


@needs_compiler
@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.MOSAIC_GPU])
def test_compiled_for_h200(backend: str) -> None:
    """The tables are updated in place by one kernel that spills no registers."""
    batch, kv_heads, width, max_blocks, count = 16, 2, 96, 2048, 160
    state = empty_residency(
        base=jnp.arange(batch) * count,
        count=jnp.full(batch, count),
        kv_heads=kv_heads,
        max_blocks=max_blocks,
        num_slots=batch * count,
    )
    wanted = jnp.zeros((batch, kv_heads, width), jnp.int32)
    table, lanes = jnp.zeros((batch, max_blocks), jnp.int32), jnp.zeros(batch, jnp.int32)
    plan = functools.partial(plan_residency, backend=backend)
    compiled = compile_for_h200(plan, state, wanted, table, lanes, lanes, donate_argnums=0)
    tables = sum(x.nbytes for x in jax.tree.leaves(state))
    assert compiled.memory_stats.alias_size_in_bytes == tables
    assert compiled.memory_stats.temp_size_in_bytes < 1024
    assert compiled.copies(1) == []
    assert [kernel.spilled for kernel in compiled.kernels] == [0]


@pytest.mark.parametrize(
    ("geometry", "backend", "message"),
    [(SMALL, "cuda", "'cuda' of residency is unknown"), (ODD, "mosaic_gpu", "does not take these operands")],
)
def test_what_no_kernel_takes_is_refused(geometry: Geometry, backend: str, message: str) -> None:
    """The message names the operation and the choice."""
    simulation = Simulation(geometry, backend, seed=0)
    with pytest.raises(ValueError, match=message):
        simulation.step([[[]] * geometry.kv_heads] * geometry.batch, [-1] * geometry.batch, [0] * geometry.batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wanted": np.zeros((3, 1, 8), np.int32)}, "has kv_heads=2, and wanted has kv_heads=1"),
        ({"wanted": np.zeros((3, 2, 0), np.int32)}, "width must be at least 1"),
        ({"block_table": np.zeros((3, 23), np.int32)}, "has blocks=24, and block_table has blocks=23"),
        ({"written": np.zeros(4, np.int32)}, r"written\[4\] has batch=4, and wanted has batch=3"),
        ({"query_block": np.zeros(3, np.float32)}, "query_block is float32: it must be int32"),
        ({"referenced": np.zeros((2, 51), np.int32)}, "has slots=51, and block_of_slot has slots=52"),
        ({"hand": np.zeros(3, np.int32)}, r"hand\[3\] must have the axes \[batch, kv_heads\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, np.ndarray], message: str) -> None:
    """Tables and lists of other sizes would be read beyond their ends."""
    state, lanes = Simulation(SMALL, "reference", seed=0).state, np.zeros(3, np.int32)
    tables = {name: jnp.asarray(x) for name, x in change.items() if hasattr(state, name)}
    arguments = {
        "wanted": np.zeros((3, 2, 8), np.int32),
        "block_table": np.zeros((3, 24), np.int32),
        "query_block": lanes,
        "written": lanes,
    } | {name: x for name, x in change.items() if name not in tables}
    operands = {name: jnp.asarray(x) for name, x in arguments.items()}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(plan_residency)(dataclasses.replace(state, **tables), **operands)
