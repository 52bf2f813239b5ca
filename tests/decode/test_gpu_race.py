"""Fetches beside other work, write-backs in between, random lists: no step ever reads a record that is not the newest.

A number of every record says which one it is, of which layer, and in which step its contents were written. So a read of
what has not arrived, a fetch before the write-back, or a write to a slot that is still read shows as a wrong number.
What each step must read is known beforehand: the lists, tails and tables are made by numpy, which replays the versions.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.cache.pool import HostPool
from sparda_jax.cache.state import CacheShape, DecodeState, LayerState, empty_state
from sparda_jax.decode_plan import GPU_OPTIONS
from sparda_jax.pallas_kernels.record_copy import fetch_records
from sparda_jax.pallas_kernels.residency import Residency, plan_residency
from sparda_jax.shapes import SHAPES

LAYERS, KV_HEADS, LANES, BLOCKS, SLOTS, WIDTH = 3, 2, 4, 32, 16, 12
CONFIG = dataclasses.replace(SHAPES["minicpm4.1-8b"], num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=64)
SHAPE = CacheShape(lanes=LANES, max_blocks=BLOCKS, num_blocks=LANES * BLOCKS + 32, slots_per_lane=SLOTS)
BLOCK, RECORD = CONFIG.sparse.block_size, (2 * CONFIG.sparse.block_size, CONFIG.head_dim)
LANE = np.arange(LANES)


class Replay:
    """The lanes' steps, made up before any of them runs, and what every record holds at each step and in the end."""

    def __init__(self, steps: int, seed: int) -> None:
        self._rng = rng = np.random.default_rng(seed)
        self._free = np.arange(SHAPE.num_blocks)
        self._table = np.full((LANES, BLOCKS), -1)
        tail = np.full(LANES, BLOCKS)
        # By physical block: the step that wrote the newest contents, and those in the pool. 0: as they were made.
        self.newest, self.in_pool = np.zeros(SHAPE.num_blocks, int), np.zeros(SHAPE.num_blocks, int)
        wanted = np.full((LAYERS, LANES, KV_HEADS, WIDTH), -1)
        made: list[dict[str, np.ndarray]] = []
        for step in range(steps):
            entering = (tail >= BLOCKS) | (rng.random(LANES) < 0.01)
            for lane in np.flatnonzero(entering).tolist():
                self._enter(lane)
                tail[lane] = rng.integers(BLOCKS // 3, BLOCKS)
            live = rng.random(LANES) < 0.9
            self.newest[self._table[LANE, tail][live]] = step + 1
            wanted = np.where(live[:, None, None], self._choose(wanted, tail), -1)
            advancing = live & (rng.random(LANES) < 0.25)
            made.append(
                {
                    "entering": entering,
                    "tail": np.where(live, tail, -1),
                    "written": tail.copy(),
                    "advancing": advancing,
                    "table": self._table.copy(),
                    "wanted": wanted,
                    "versions": self.newest[self._table],
                }
            )
            done = self._table[LANE, tail][advancing]
            self.in_pool[done] = self.newest[done]
            tail = tail + advancing
        self.writes_back = [bool(step["advancing"].any()) for step in made]
        self.steps = jax.tree.map(
            lambda *values: np.stack([value.astype(np.int32) for value in values]), made[0], *made[1:]
        )

    def _enter(self, lane: int) -> None:
        """A new sequence: other physical blocks, of which the pool holds what it holds; an unwritten tail is lost."""
        if self._table[lane, 0] >= 0:
            self.newest[self._table[lane]] = self.in_pool[self._table[lane]]
            self._free = np.concatenate([self._free, self._table[lane]])
        order = self._rng.permutation(self._free)
        self._table[lane], self._free = order[:BLOCKS], order[BLOCKS:]

    def _choose(self, before: np.ndarray, tail: np.ndarray) -> np.ndarray:
        """The tail, and past blocks, rather those that were wanted before."""
        rank = self._rng.random((LAYERS, LANES, KV_HEADS, BLOCKS))
        again = (before[..., None] == np.arange(BLOCKS)).any(axis=-2)
        rank = rank - 0.7 * again
        rank = np.where(np.arange(BLOCKS) < tail[:, None, None], rank, np.inf)
        rank[:, LANE, :, tail] = -np.inf
        count = self._rng.integers(WIDTH // 2, WIDTH + 1, rank.shape[:-1])[..., None]
        chosen = np.argsort(rank)[..., :WIDTH]
        known = np.take_along_axis(rank, chosen, axis=-1) < np.inf
        listed = np.sort(np.where(known & (np.arange(WIDTH) < count), chosen, BLOCKS))
        return np.where(listed < BLOCKS, listed, -1)


def contents(ids: Any, layer: int, versions: Any) -> Any:
    """Records [..., rows, head_dim]: whole numbers below 2^24, which float32 holds."""
    place = (np.arange(RECORD[0])[:, None] + np.arange(RECORD[1])) % 4
    return (((ids * 4 + layer) * 2048 + versions)[..., None, None] * 4 + place).astype(np.float32)


def left(residency: Residency, entering: jax.Array, slots: int) -> Residency:
    """The tables without what lanes held that another sequence enters."""
    own = jnp.repeat(entering > 0, slots)
    return dataclasses.replace(
        residency,
        slot_of_block=jnp.where(entering[:, None, None] > 0, -1, residency.slot_of_block),
        block_of_slot=jnp.where(own, -1, residency.block_of_slot),
        referenced=jnp.where(own, 0, residency.referenced),
        hand=jnp.where(entering[:, None] > 0, 0, residency.hand),
    )


def take(state: DecodeState, tally: dict[str, jax.Array], pools: Any, replay: Any, work: jax.Array, *, backend: Any):
    """A step: each layer's records are fetched while the layer before reads its own and multiplies matrices."""
    now = jax.tree.map(lambda steps: steps[tally["step"]], replay)
    tail, table = now["tail"], now["table"]
    lane, head = jnp.arange(LANES)[:, None], jnp.arange(KV_HEADS)
    layers, wrong, copied = list(state.layers), tally["wrong"], tally["copied"]

    def prepare(index: int) -> tuple[LayerState, jax.Array, jax.Array]:
        layer = layers[index]
        residency = left(layer.residency, now["entering"], SHAPE.slots_of(index))
        residency, slot_ids, plan = plan_residency(residency, now["wanted"][index], table, tail, now["written"])
        plan = jax.lax.optimization_barrier(plan)
        slots = fetch_records(plan, pools[index], layer.slots, segments=LANES * KV_HEADS, backend=backend)
        return dataclasses.replace(layer, slots=slots, residency=residency), slot_ids, plan

    ahead = prepare(0)
    for index in range(LAYERS):
        layer, slot_ids, plan = ahead
        if index + 1 < LAYERS:
            ahead = prepare(index + 1)
            work, plan_ahead = jax.lax.optimization_barrier((work, ahead[2]))
            ahead = (*ahead[:2], plan_ahead)
        place = layer.residency.slot_of_block[lane, head, jnp.maximum(tail, 0)[:, None]]
        place = jnp.where(tail[:, None] >= 0, place, layer.slots.shape[0])
        own = contents(table[lane, tail[:, None]] * KV_HEADS + head, index, tally["step"] + 1)
        slots = layer.slots.at[place].set(own, mode="drop")
        blocks = now["wanted"][index]
        ids = jnp.take_along_axis(table[:, None], jnp.maximum(blocks, 0), axis=2) * KV_HEADS + head[:, None]
        versions = jnp.take_along_axis(now["versions"][:, None], jnp.maximum(blocks, 0), axis=2)
        read = slots[jnp.maximum(slot_ids, 0)]
        differs = (read != contents(ids, index, versions)).any(axis=(3, 4)) | (slot_ids < 0)
        wrong += jnp.sum(differs & (blocks >= 0), dtype=jnp.int32)
        copied += jnp.sum(plan[: LANES * KV_HEADS])
        work, wrong = jax.lax.optimization_barrier((work, wrong))
        for _ in range(3):
            work = jnp.tanh(work @ work)
        layers[index] = dataclasses.replace(layer, slots=slots)
    lengths = jnp.where(now["advancing"] > 0, tail + 1, tail) * BLOCK
    state = dataclasses.replace(
        state, layers=tuple(layers), block_table=table, lengths=lengths, written=now["written"], live=tail >= 0
    )
    return state, {"step": tally["step"] + 1, "wrong": wrong, "copied": copied}, work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Records that were not what they had to be, of those that the steps read and of those there in the end."""

    read: int
    in_slots: int
    in_pool: int
    copied: int


@functools.cache
def program(backend: str | None) -> Any:
    step = functools.partial(take, backend=backend)
    return jax.jit(step, donate_argnums=(0, 1), compiler_options=GPU_OPTIONS)


def race(steps: int, *, seed: int, size: int, backend: str | None = None, lost: int | None = None) -> Found:
    """Runs the steps without ever waiting for one, and compares.

    Args:
        steps: so many.
        seed: of everything random.
        size: of the matrices that are multiplied beside the copies.
        backend: of the copies.
        lost: a step after which the write-back is left out.
    """
    replay, device = Replay(steps, seed), jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    pool = HostPool(CONFIG, SHAPE, jnp.dtype(jnp.float32), host, backend)
    records, none = np.arange(SHAPE.num_blocks * KV_HEADS), np.zeros(SHAPE.num_blocks * KV_HEADS, int)
    pool._pools = tuple(jax.device_put(contents(records, layer, none), host) for layer in range(LAYERS))
    state = jax.device_put(empty_state(CONFIG, SHAPE, jnp.dtype(jnp.float32)), device)
    tally = jax.device_put({name: np.int32(0) for name in ("step", "wrong", "copied")}, device)
    work, moves = jnp.ones((size, size), jnp.bfloat16), jax.device_put(replay.steps, device)
    for step in range(steps):
        state, tally, work = program(backend)(state, tally, pool.arrays, moves, work)
        if replay.writes_back[step] and step != lost:
            pool.write_back(state)
    table, in_slots, in_pool = replay.steps["table"][-1], 0, 0
    for index, layer in enumerate(state.layers):
        lane, head, block = np.nonzero(np.asarray(layer.residency.slot_of_block) >= 0)
        held = np.asarray(layer.slots)[np.asarray(layer.residency.slot_of_block)[lane, head, block]]
        expected = contents(table[lane, block] * KV_HEADS + head, index, replay.newest[table[lane, block]])
        in_slots += int((held != expected).any(axis=(1, 2)).sum())
        expected = contents(records, index, replay.in_pool[records // KV_HEADS])
        in_pool += int((pool.snapshot(index) != expected).any(axis=(1, 2)).sum())
    return Found(read=int(tally["wrong"]), in_slots=in_slots, in_pool=in_pool, copied=int(tally["copied"]))


def test_every_read_is_of_the_newest_contents() -> None:
    found = race(50, seed=1, size=8)
    assert found == Found(read=0, in_slots=0, in_pool=0, copied=found.copied)
    assert found.copied > 50 * LANES


def test_a_lost_write_back_shows() -> None:
    """Where it is read, and in the pool."""
    lost = next(step for step in range(10, 50) if Replay(50, 1).writes_back[step])
    found = race(50, seed=1, size=8, lost=lost)
    assert found.read > 0
    assert found.in_pool > 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton"])
def test_two_thousand_steps(backend: str) -> None:
    """Each with three layers' fetches beside products that take about as long."""
    found = race(2000, seed=2, size=1024, backend=backend)
    assert found == Found(read=0, in_slots=0, in_pool=0, copied=found.copied)
    assert found.copied > 2000 * LANES
