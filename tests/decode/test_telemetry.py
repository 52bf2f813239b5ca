"""What the lanes count: exact sums, hits and copies of a replay, recall and waste by their definitions, the clock."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.config import ConfigError
from sparda_jax.decode import decode_step
from sparda_jax.decode_plan import Fetch
from sparda_jax.lanes import DecodeLanes
from sparda_jax.model import DecoderLayer
from sparda_jax.selection import Mode
from sparda_jax.telemetry import Counts, DecodeStats, HostClock, compare_selections, no_counts
from tests.decode.support import CONFIG, MAX_BLOCKS, WIDTH, decoded, enter, make_lanes, run, toy_of
from tests.oracle.select import pool_blocks, select_blocks, stage1_score

MODE = Mode.SPARDA
SPARSE, HEADS = CONFIG.sparse, CONFIG.num_kv_heads


def filled(**changes) -> DecodeLanes:
    lanes = make_lanes(MODE, Fetch.AHEAD, slots=WIDTH + 1, **changes)
    for lane in range(3):
        enter(lanes, MODE, lane, lane)
    return lanes


def own_blocks(q: np.ndarray, pages: np.ndarray, length: int) -> np.ndarray:
    """InfLLM-V2's choice [kv_heads, k] for one query [heads, head_dim] behind ``length - 1`` tokens, in float64."""
    entries = pages.swapaxes(1, 2).reshape(-1, HEADS, CONFIG.head_dim)
    windows = max(0, (length - SPARSE.kernel_size) // SPARSE.kernel_stride + 1)
    tail = np.array([(length - 1) // SPARSE.block_size])
    scores = stage1_score(q[None].astype(float), entries[1 : 1 + windows].astype(float), np.array([windows]))
    pooled = pool_blocks(scores, tail, tail[0] + 1, SPARSE.init_blocks, SPARSE.local_blocks)
    return select_blocks(pooled, tail, WIDTH)[:, 0]


@functools.partial(jax.jit, static_argnames=("graphdef", "plan"))
def _watched(graphdef, weights, state, pools, tokens, *, plan):
    """The blocks that a step attends to, and the queries of its layers."""
    lists, queries = {}, []
    project = DecoderLayer.project

    def choose(index, position, blocks):
        lists[index] = blocks
        return blocks

    def watch(self, x, cos, sin):
        projections = project(self, x, cos, sin)
        queries.append(projections.q[:, 0])
        return projections

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderLayer, "project", watch)
        decode_step(nnx.merge(graphdef, weights), state, pools, tokens, jnp.full_like(tokens, -1), plan, choose)
    return jnp.stack([lists[index] for index in range(CONFIG.num_layers)]), jnp.stack(queries)


def watched(lanes: DecodeLanes) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Lists and queries of the next step, and the slots of the blocks before it."""
    graphdef, weights = toy_of(MODE).split
    plan = dataclasses.replace(lanes.plan, compares=False)
    lists, queries = _watched(graphdef, weights, lanes._state, lanes._pool.arrays, lanes._tokens, plan=plan)
    slots = [np.array(layer.residency.slot_of_block) for layer in lanes._state.layers]
    return np.asarray(lists), np.asarray(queries), slots


def test_sums_are_exact_beyond_32_bits() -> None:
    rng = np.random.default_rng(0)
    counts, expected = no_counts(3, 2), np.zeros((3, 2), np.int64)
    add = jax.jit(Counts.add)
    for _ in range(12):
        amount = rng.integers(0, 2**31, (3, 2))
        counts, expected = add(counts, copied=jnp.asarray(amount, jnp.int32)), expected + amount
    assert (expected > 2**33).all()
    np.testing.assert_array_equal(counts.copied.read(), expected)
    assert not counts.attended.read().any()


def test_comparison_of_random_lists_is_that_of_sets() -> None:
    rng = np.random.default_rng(1)
    batch, heads, width, blocks = 5, 3, 9, 20
    table = rng.permutation(batch * blocks).reshape(batch, blocks)
    lists = np.full((2, batch, heads, width), -1)
    copied, records = np.zeros((batch, heads), int), rng.integers(0, heads * batch * blocks, (batch, heads, width))
    first, last = np.array([1, 2, 0, 4, 3]), np.array([15, 17, 20, 4, 18])
    expected = np.zeros((4, batch), int)
    for lane, head in np.ndindex(batch, heads):
        own, attended = (set(rng.choice(blocks, rng.integers(1, width + 1), replace=False).tolist()) for _ in range(2))
        for which, chosen in enumerate((own, attended)):
            lists[which, lane, head, : len(chosen)] = sorted(chosen)
        missing = sorted(attended)[:: 1 + lane % 2]
        copied[lane, head] = len(missing)
        records[lane, head, : len(missing)] = table[lane, missing] * heads + head
        free = own & set(range(first[lane], last[lane]))
        expected[:, lane] += len(free), len(free & attended), len(missing), len(set(missing) - own)
    own, attended = jnp.asarray(lists)
    free = (jnp.asarray(first), jnp.asarray(last))
    found = compare_selections(own, attended, jnp.asarray(copied), jnp.asarray(records), jnp.asarray(table), free)
    np.testing.assert_array_equal([found[name] for name in ("picked", "found", "sampled_copies", "wasted")], expected)


def test_hits_and_copies_are_those_of_a_replay_of_the_tables() -> None:
    """Over a block boundary of one lane; a block that begins needs a slot and no copy."""
    lanes = filled()
    attended, copied = np.zeros((2, CONFIG.num_layers, 3), int)
    steps, middle = 20, lanes.return_stats()
    for step in range(steps):
        before = [np.array(layer.residency.slot_of_block) for layer in lanes._state.layers]
        tail = np.array([lanes.length(lane) // SPARSE.block_size for lane in range(3)])
        lanes.step()
        attended += HEADS * np.minimum(WIDTH, tail + 1)
        for index, layer in enumerate(lanes._state.layers):
            came = (before[index] < 0) & (np.asarray(layer.residency.slot_of_block) >= 0)
            came[np.arange(3), :, tail] = False
            copied[index] += came.sum((1, 2))
        if step == 9:
            middle = lanes.return_stats()
    stats = lanes.return_stats()
    np.testing.assert_array_equal(stats.attended, attended)
    np.testing.assert_array_equal(stats.copied, copied)
    np.testing.assert_array_equal(stats.hits, attended - copied)
    assert (stats.steps, stats.sampled_steps, stats.timed) == (steps, 0, 0)
    assert copied[0].sum() == 0 < copied.sum()
    assert stats.bytes_copied == copied.sum() * 2 * SPARSE.block_size * CONFIG.head_dim * 4
    assert stats.hit_rate == 1 - copied[1:].sum() / attended[1:].sum()
    assert (stats.recall, stats.wasted_share, stats.exposed_wait) == (None, None, None)
    later = stats.since(middle)
    assert later.steps == 10
    np.testing.assert_array_equal(later.attended + middle.attended, attended)


def test_recall_and_waste_are_those_of_the_layers_own_queries() -> None:
    """Also: samples change no token, and the step that is taken twice counts once."""
    lanes = filled(sample_every=2)
    expected = np.zeros((4, CONFIG.num_layers, 3), int)
    attended, tokens = 0, []
    for step in range(1, 13):
        lists, queries, before = watched(lanes)
        tokens.append(np.asarray(lanes.step()))
        attended += sum(HEADS * min(WIDTH, -(-lanes.length(lane) // SPARSE.block_size)) for lane in range(3))
        if step % 2:
            continue
        table = np.asarray(lanes._state.block_table)
        for index, lane in np.ndindex(CONFIG.num_layers, 3):
            length = lanes.length(lane)
            tail = (length - 1) // SPARSE.block_size
            own = own_blocks(queries[index, lane], np.asarray(lanes._state.layers[index].pages)[table[lane]], length)
            for head in range(HEADS):
                picks, reads = set(own[head].tolist()) - {-1}, set(lists[index, lane, head].tolist()) - {-1}
                copied = {block for block in reads - {tail} if before[index][lane, head, block] < 0}
                free = {block for block in picks if SPARSE.init_blocks <= block < tail - SPARSE.local_blocks}
                free = free if tail + 1 > WIDTH else set()
                counted = (len(free), len(free & reads), len(copied), len(copied - picks))
                expected[:, index, lane] += counted
    np.testing.assert_array_equal(np.stack(tokens, axis=1), [decoded(MODE, lane)[0][:12] for lane in range(3)])
    stats = lanes.return_stats()
    np.testing.assert_array_equal([stats.picked, stats.found, stats.sampled_copies, stats.wasted], expected)
    picked, found, copies, wasted = expected
    assert 0 < found[1:].sum() < picked[1:].sum()
    assert 0 < wasted.sum() < copies.sum()
    assert stats.recall == found[1:].sum() / picked[1:].sum()
    assert stats.wasted_share == wasted.sum() / copies.sum()
    assert (stats.steps, stats.sampled_steps, stats.timed) == (12, 6, 5)
    assert stats.attended.sum() == attended * CONFIG.num_layers
    assert stats.exposed_wait == stats.wait / 5


@pytest.mark.slow
def test_a_layer_that_asks_its_own_query_finds_everything() -> None:
    lanes = make_lanes(Mode.SPARSE, Fetch.IN_TURN, slots=WIDTH + 1, sample_every=2)
    for lane in range(3):
        enter(lanes, Mode.SPARSE, lane, lane)
    run(lanes, 60)
    stats = lanes.return_stats()
    assert stats.sampled_copies.sum() > 0
    assert (stats.recall, stats.wasted_share) == (1, 0)


def test_samples_must_leave_room_for_steps() -> None:
    with pytest.raises(ConfigError, match="sample_every=1 is not allowed: use 2 or more"):
        make_lanes(MODE, Fetch.AHEAD, slots=MAX_BLOCKS, sample_every=1)


class Result:
    """What a launch returns; the device takes its time."""

    def __init__(self) -> None:
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready


def test_the_clock_tells_late_launches_and_bounds_their_gap() -> None:
    now = 0.0
    clock = HostClock(now=lambda: now)
    clock.launching()
    assert clock.launches == 0, "there is no step before the first"
    first, second, third = Result(), Result(), Result()
    clock.launched(first)
    now = 1.0
    clock.launching()
    clock.launched(second)
    assert (clock.launches, clock.late, clock.gap) == (1, 0, 0.0)
    now = 3.0
    clock.look()
    second.ready, now = True, 3.5
    clock.launching()
    assert (clock.launches, clock.late, clock.gap) == (2, 1, 0.5), "since it was last seen at work"
    clock.launched(third)
    third.ready, now = True, 5.5
    clock.launching()
    assert (clock.launches, clock.late, clock.gap) == (3, 2, 2.5)
    clock.launched(Result())
    clock.interrupted()
    now = 9.0
    clock.launching()
    assert clock.launches == 3, "a prefill came between"
    stats = DecodeStats.read(no_counts(2, 1), record_bytes=4, steps=5, clock=clock)
    assert stats.host_gap == 2.5 / 3
    assert stats.to_dict()["late"] == 2
    assert stats.to_dict()["hit_rate"] is None
