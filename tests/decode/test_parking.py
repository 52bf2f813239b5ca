"""Sequences wait and go on in any lane, begin without one, and share blocks; they decode what they would anyway."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.cache.blocks import BlockAllocator
from sparda_jax.cache.parking import Parked
from sparda_jax.cache.state import CacheShape
from sparda_jax.config import ConfigError
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.generate import Runner
from sparda_jax.lanes import DecodeLanes
from sparda_jax.programs import advance
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from sparda_jax.streaming import min_streaming_slots
from tests.core.support import tokens, toy
from tests.decode.support import (
    CAPACITY,
    CONFIG,
    GREEDY,
    LENGTHS,
    MAX_BLOCKS,
    MODEL,
    WIDTH,
    decoded,
    enter,
    hidden,
    make_lanes,
    prefilled,
    run,
)

BLOCK, HEADS = CONFIG.sparse.block_size, CONFIG.num_kv_heads
MODE = Mode.SPARDA
slow = pytest.mark.slow
WAYS = [
    (MODE, Fetch.AHEAD),
    pytest.param(Mode.SPARSE, Fetch.IN_TURN, marks=slow),
    pytest.param(Mode.INFINIGEN, Fetch.AHEAD, marks=slow),
    pytest.param(Mode.DENSE, Fetch.IN_TURN, marks=slow),
    pytest.param(Mode.DENSE, Fetch.STREAM, marks=slow),
]


def lanes_of(mode: Mode = MODE, fetch: Fetch = Fetch.AHEAD, *, lanes: int = 3, num_blocks: int = 40) -> DecodeLanes:
    """More blocks than slots, where the mode allows that."""
    dense = MAX_BLOCKS if fetch is Fetch.IN_TURN else min_streaming_slots(CONFIG.sparse, MAX_BLOCKS)
    slots = dense if mode is Mode.DENSE else WIDTH + 1
    return make_lanes(mode, fetch, slots=slots, lanes=lanes, num_blocks=num_blocks)


def poison(lanes: DecodeLanes) -> None:
    """Writes NaN wherever nothing may be read: free blocks, the slots of empty lanes, the records of tails in lanes."""
    stale = [block for block in range(lanes.shape.num_blocks) if not lanes.blocks._users[block]]
    unread = list(stale)
    for entry in lanes._lanes:
        if entry is not None and entry.length % BLOCK:
            unread.append(entry.blocks[-1])
    rows = (np.array(unread, int)[:, None] * HEADS + np.arange(HEADS)).reshape(-1)

    def record_poison(index: int, pool: jax.Array) -> jax.Array:
        records = lanes._pool.snapshot(index)
        records[rows] = np.nan
        return jax.device_put(records, pool.sharding)

    lanes._pool._pools = tuple(record_poison(index, pool) for index, pool in enumerate(lanes._pool.arrays))
    empty = np.array([entry is None for entry in lanes._lanes])

    def poisoned(layer):
        slots, pages, tables = np.array(layer.slots), np.array(layer.pages), layer.residency
        owner = np.arange(tables.block_of_slot.shape[1]) // np.asarray(tables.count)[0]
        slots[np.repeat(empty[owner], HEADS)] = np.nan
        pages[stale] = np.nan
        changes = {"slots": jnp.asarray(slots), "pages": jnp.asarray(pages)}
        if layer.partial_keys is not None:
            partial_keys, basis = np.array(layer.partial_keys), np.array(layer.partial_basis)
            partial_keys[stale] = np.nan
            basis[empty] = np.nan
            changes |= {"partial_keys": jnp.asarray(partial_keys), "partial_basis": jnp.asarray(basis)}
        return dataclasses.replace(layer, **changes)

    state = dataclasses.replace(lanes._state, layers=tuple(poisoned(layer) for layer in lanes._state.layers))
    lanes._state = jax.device_put(state, lanes._device)


def windows_of(lanes: DecodeLanes, lane: int) -> np.ndarray:
    """The complete compressed keys of a lane, of all layers."""
    entry = lanes._lanes[lane]
    assert entry is not None
    pages = np.stack([np.asarray(layer.pages)[np.array(entry.blocks)] for layer in lanes._state.layers])
    entries = pages.swapaxes(1, 2).reshape(len(pages), HEADS, -1, CONFIG.head_dim)
    return entries[:, :, 1 : entry.length // CONFIG.sparse.kernel_stride]


def programs_of(function: Any) -> int:
    """How many programs a jitted function has been compiled to."""
    return function._cache_size()


class Story:
    """The three prompts in lanes of the same number, at first; what each of them has decoded."""

    def __init__(self, lanes: DecodeLanes, mode: Mode):
        self.lanes, self.at, self.waits = lanes, {0: 0, 1: 1, 2: 2}, dict[int, Parked]()
        self.found: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for prompt in range(3):
            enter(lanes, mode, prompt, prompt)

    def park(self, *prompts: int) -> None:
        for prompt in prompts:
            self.waits[prompt] = self.lanes.park(self.at.pop(prompt))
        poison(self.lanes)

    def resume(self, prompt: int, lane: int) -> None:
        self.lanes.resume(lane, self.waits.pop(prompt))
        self.at[prompt] = lane
        poison(self.lanes)

    def run(self, steps: int) -> None:
        new = run(self.lanes, steps)
        for prompt, lane in self.at.items():
            self.found[prompt] += new[lane].tolist()

    def length(self, prompt: int) -> int:
        return LENGTHS[prompt] + len(self.found[prompt])


@pytest.mark.parametrize(("mode", "fetch"), WAYS)
def test_parked_and_resumed_is_never_parked(mode: Mode, fetch: Fetch) -> None:
    story = Story(lanes_of(mode, fetch), mode)
    story.park(1)  # at a boundary, before its first step
    story.run(1)
    story.resume(1, 1)
    story.run(1)
    assert story.length(1) == 6 * BLOCK + 1, "right behind a boundary"
    story.park(1, 2)
    story.run(3)
    story.resume(1, 2)
    story.resume(2, 1)
    story.run(6)
    assert story.length(2) == 48, "16 tokens: a window has just ended"
    for _ in range(2):
        story.park(2)
        story.resume(2, 1)
    story.run(8)
    assert story.length(1) % BLOCK == 15, "the next token ends a window that began in the block before"
    story.park(1)
    story.resume(1, 2)
    story.run(7)
    story.park(2)  # one token before its block is full
    story.run(2)
    story.resume(2, 1)
    story.run(1)
    assert story.length(2) == BLOCK
    story.park(2, 0)  # a block has just been finished
    story.run(4)
    story.resume(0, 1)
    story.resume(2, 0)
    story.run(30)
    story.park(0, 1, 2)
    for prompt in range(3):
        story.resume(prompt, prompt)
    story.run(30)
    for prompt in range(3):
        found = story.found[prompt]
        np.testing.assert_array_equal(found, decoded(mode, prompt)[0][: len(found)])
    assert len(story.found[0]) > BLOCK
    calm = lanes_of(mode, fetch)
    for prompt in range(3):
        enter(calm, mode, prompt, prompt)
    for _ in range(1 + max(map(len, story.found.values()))):
        for prompt in range(3):
            if calm.length(prompt) == story.length(prompt) and prompt in story.at:
                np.testing.assert_array_equal(hidden(story.lanes)[prompt], hidden(calm)[prompt])
                np.testing.assert_array_equal(windows_of(story.lanes, prompt), windows_of(calm, prompt))
                assert np.isfinite(hidden(calm)[prompt]).all()
                del story.at[prompt]
        calm.step()
    assert not story.at


@pytest.mark.parametrize("mode", [MODE, pytest.param(Mode.INFINIGEN, marks=slow)])
def test_adopted_and_resumed_is_entered(mode: Mode) -> None:
    """Also what is drawn: the sampling parameters wait with the sequence."""
    drawn = SamplingParams(temperature=1.0, seed=11)
    lanes = lanes_of(mode)
    enter(lanes, mode, 0, 0)
    enter(lanes, mode, 1, 1, drawn)
    waiting = [lanes.adopt(*prefilled(mode, prompt), params) for prompt, params in ((1, GREEDY), (2, GREEDY))]
    seeded = lanes.adopt(*prefilled(mode, 1), drawn)
    assert lanes.free_blocks == 40 - sum(-(-LENGTHS[prompt] // BLOCK) for prompt in (0, 1, 1, 1, 2))
    poison(lanes)
    entered = run(lanes, 20)
    lanes.leave(1)
    poison(lanes)
    for lane, parked in enumerate((seeded, waiting[1]), start=1):
        lanes.resume(lane, parked)
    resumed = run(lanes, 40)
    np.testing.assert_array_equal(resumed[1, :20], entered[1])
    assert (entered[1] != decoded(mode, 1)[0][:20]).any(), "drawn, not greedy"
    np.testing.assert_array_equal(resumed[2], decoded(mode, 2)[0][:40])
    lanes.leave(2)
    lanes.resume(2, waiting[0])
    np.testing.assert_array_equal(run(lanes, 20)[2], decoded(mode, 1)[0][:20])


def spoiled(prompt: int, blocks: int):
    """A prefilled cache with NaN in everything that the first blocks and their pages hold already."""
    cache, token = prefilled(MODE, prompt)
    windows = blocks * CONFIG.sparse.windows_per_block - 1
    layers = tuple(
        dataclasses.replace(
            layer,
            k=layer.k.at[:, :, : blocks * BLOCK].set(jnp.nan),
            v=layer.v.at[:, :, : blocks * BLOCK].set(jnp.nan),
            compressed_k=layer.compressed_k.at[:, :, :windows].set(jnp.nan),
        )
        for layer in cache.layers
    )
    return dataclasses.replace(cache, layers=layers), token


@pytest.mark.parametrize("prompt", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_shared_blocks_are_used_as_they_are(prompt: int) -> None:
    """All whole blocks of a prompt, whose end is inside a block or at one; the first owner leaves before the others."""
    lanes = lanes_of()
    enter(lanes, MODE, 0, prompt)
    shared, total = lanes.written_blocks(0), -(-LENGTHS[prompt] // BLOCK)
    assert len(shared) == LENGTHS[prompt] // BLOCK
    lanes.blocks.share(shared)
    lanes.enter(1, *prefilled(MODE, prompt), GREEDY, shared=shared)
    lanes.blocks.share(shared[:5])
    parked = lanes.adopt(*spoiled(prompt, 5), GREEDY, shared=shared[:5])
    assert lanes.free_blocks == 40 - total - (total - len(shared)) - (total - 5)
    first = run(lanes, 10)
    lanes.leave(0)
    assert lanes.free_blocks == 40 - len(shared) - 2 * (total - 5) + (len(shared) - 5) - (prompt == 1)
    poison(lanes)
    lanes.resume(2, parked)
    enter(lanes, MODE, 0, 2)
    later = run(lanes, 70)
    want = decoded(MODE, prompt)[0]
    np.testing.assert_array_equal(first[0], want[:10])
    np.testing.assert_array_equal(np.concatenate([first[1], later[1]]), want[:80])
    np.testing.assert_array_equal(later[2], want[:70])
    np.testing.assert_array_equal(later[0], decoded(MODE, 2)[0][:70])
    for lane in range(3):
        lanes.leave(lane)
    assert lanes.free_blocks == 40


def test_a_prefix_is_the_prefilled_cache_again() -> None:
    lanes = lanes_of()
    enter(lanes, MODE, 0, 0)
    enter(lanes, MODE, 1, 1)
    want, _ = prefilled(MODE, 0)
    blocks = lanes.written_blocks(0)
    for count, capacity in ((10, CAPACITY), (3, CAPACITY), (4, 4 * BLOCK)):
        cache, length = lanes.prefix(blocks[:count], capacity), count * BLOCK
        assert cache.lengths.tolist() == [length]
        assert cache.capacity == capacity
        assert len(cache.layers) == len(want.layers)
        windows = (length - CONFIG.sparse.kernel_size) // CONFIG.sparse.kernel_stride + 1
        for found, layer in zip(cache.layers, want.layers, strict=True):
            for name, rows in (("k", length), ("v", length), ("compressed_k", windows)):
                np.testing.assert_array_equal(getattr(found, name)[:, :, :rows], getattr(layer, name)[:, :, :rows])
            shapes = jax.tree.map(lambda x: (x.shape, x.dtype), found)
            if capacity == CAPACITY:
                assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), layer)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    assert programs_of(lanes._pool._load) == 2, "a program for each capacity"
    run(lanes, 64)
    grown = lanes.written_blocks(0)
    assert len(grown) == 11
    assert grown[:10] == blocks
    cache = lanes.prefix(grown, CAPACITY)
    for found, layer in zip(cache.layers, decoded(MODE, 0)[1].layers, strict=True):
        for name, rows in (("k", 704), ("v", 704), ("compressed_k", 43)):
            want_rows, rows_found = (np.asarray(getattr(x, name))[:, :, :rows] for x in (layer, found))
            np.testing.assert_allclose(rows_found, want_rows, rtol=1e-4, atol=1e-5)


def test_prefill_goes_on_behind_a_prefix() -> None:
    """Its tokens are those of the whole prompt, it runs the same programs, and its cache can share the blocks again.

    What is left is shorter than ``dense_len``, which the prompt is not.
    """
    model, params, block_count = toy("threshold").decoder, SamplingParams(max_tokens=20), 12
    prompt = [int(token) for token in tokens(900, 11)]
    runner = Runner(model, mode=MODE, max_model_len=CAPACITY)
    shape = CacheShape(lanes=2, max_blocks=MAX_BLOCKS, num_blocks=40, slots_per_lane=10)
    lanes = DecodeLanes(model, shape, DecodePlan(mode=MODE, fetch=Fetch.AHEAD, max_len=CAPACITY))

    def prefill(**prefix):
        sequence, chunks = runner.start(prompt, params, **prefix), 1
        begun = sequence.prefilled
        while (token := sequence.advance()) is None:
            chunks += 1
        return sequence, token, begun, chunks

    alone, first, begun, all_chunks = prefill()
    assert begun == 0
    whole = alone.take_cache()
    lanes.enter(0, whole, first, params)
    shared = lanes.written_blocks(0)[:block_count]
    lanes.blocks.share(shared)
    prefix, programs = lanes.prefix(shared, runner.capacity_for(len(prompt))), programs_of(advance)
    hit, token, begun, chunks = prefill(prefix=prefix)
    assert programs_of(advance) == programs
    assert (begun, token) == (block_count * BLOCK, first)
    assert chunks == all_chunks - 6
    assert hit.stats.prefill.tokens == len(prompt) - begun
    cache = hit.take_cache()
    for found, layer in zip(cache.layers, whole.layers, strict=True):
        np.testing.assert_array_equal(found.k[:, :, : len(prompt)], layer.k[:, :, : len(prompt)])
        np.testing.assert_array_equal(found.v[:, :, : len(prompt)], layer.v[:, :, : len(prompt)])
    lanes.enter(1, cache, token, params, shared=shared)
    both = run(lanes, 20)
    np.testing.assert_array_equal(both[0], both[1])
    alone, *_ = prefill(prefix=lanes.prefix(shared, CAPACITY))
    np.testing.assert_array_equal(both[0], [alone.advance() for _ in range(20)])
    for length in (block_count * BLOCK, block_count * BLOCK - 1):
        prefix = lanes.prefix(shared, CAPACITY)
        with pytest.raises(ValueError, match=rf"prefix holds \[768\] tokens: .* fewer than the prompt's {length}"):
            runner.start(prompt[:length], params, prefix=prefix)


def test_blocks_are_counted_exactly() -> None:
    blocks = BlockAllocator(30)
    lanes = make_lanes(MODE, Fetch.AHEAD, slots=WIDTH + 1, lanes=2, num_blocks=30)
    with pytest.raises(ConfigError, match=r"blocks.num_blocks=29 is not the pool's num_blocks=30"):
        DecodeLanes(MODEL, lanes.shape, lanes.plan, blocks=BlockAllocator(29))
    lanes = DecodeLanes(MODEL, lanes.shape, lanes.plan, blocks=blocks)
    assert lanes.blocks is blocks
    enter(lanes, MODE, 0, 0)
    parked = lanes.park(0)
    assert (lanes.length(0), lanes.written_blocks(0), lanes.free_blocks) == (0, [], 19)
    assert (parked.length, len(parked.blocks)) == (LENGTHS[0], 11)
    adopted = lanes.adopt(*prefilled(MODE, 1), GREEDY)
    assert lanes.free_blocks == blocks.num_free == 13
    third = lanes.adopt(*prefilled(MODE, 0), GREEDY)
    with pytest.raises(MemoryError, match="6 blocks asked for, 2 of 30"):
        lanes.adopt(*prefilled(MODE, 1), GREEDY)
    lanes.drop(third)
    assert lanes.free_blocks == 13
    lanes.resume(1, adopted)
    with pytest.raises(ValueError, match="lane 1 is in use"):
        lanes.resume(1, parked)
    with pytest.raises(ValueError, match="parked does not wait here"):
        lanes.resume(0, adopted)
    with pytest.raises(ValueError, match="parked does not wait here"):
        lanes.drop(adopted)
    with pytest.raises(ValueError, match="lane 0 is empty"):
        lanes.park(0)
    lanes.drop(parked)
    with pytest.raises(ValueError, match="parked does not wait here"):
        lanes.drop(parked)
    lanes.leave(1)
    assert lanes.free_blocks == 30


def test_what_can_t_be_shared_is_refused() -> None:
    lanes = lanes_of()
    enter(lanes, MODE, 0, 1)
    blocks, free = lanes.written_blocks(0), lanes.free_blocks
    with pytest.raises(ValueError, match="6 blocks are shared or written, and a sequence of 40 tokens"):
        lanes.enter(1, *prefilled(MODE, 2), GREEDY, shared=blocks)
    for chosen, capacity in (([], CAPACITY), (blocks, 5 * BLOCK), (blocks, CAPACITY - 1)):
        with pytest.raises(ValueError, match=f"capacity={capacity} was given for {len(chosen)} blocks"):
            lanes.prefix(chosen, capacity)
    infinigen = lanes_of(Mode.INFINIGEN)
    with pytest.raises(ConfigError, match="mode=infinigen can't share 1 blocks"):
        infinigen.prefix([0], CAPACITY)
    with pytest.raises(ConfigError, match="mode=infinigen can't share 6 blocks"):
        infinigen.adopt(*prefilled(Mode.INFINIGEN, 1), GREEDY, shared=blocks)
    assert (lanes.free_blocks, infinigen.free_blocks) == (free, 40)
