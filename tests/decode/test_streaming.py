"""Dense decode with hardly any slots: whole layers come from the host pool, and nothing else changes."""

import jax
import numpy as np
import pytest

from sparda_jax.config import ConfigError
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.lanes import DecodeLanes
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from sparda_jax.streaming import min_streaming_slots
from tests.decode.support import CONFIG, MAX_BLOCKS, STEPS, decoded, enter, hidden, make_lanes, run

DENSE, BLOCK = Mode.DENSE, CONFIG.sparse.block_size
SLOTS = min_streaming_slots(CONFIG.sparse, MAX_BLOCKS)


def streaming_lanes() -> DecodeLanes:
    lanes = make_lanes(DENSE, Fetch.STREAM, slots=SLOTS)
    assert lanes._state.layers[1].slots.shape[0] == 3 * SLOTS * CONFIG.num_kv_heads
    return lanes


def forget(lanes: DecodeLanes, lane: int, block: int) -> None:
    """Writes NaN over a lane's block in the pool."""
    entry = lanes._lanes[lane]
    assert entry is not None
    kv_heads = CONFIG.num_kv_heads
    place = slice(entry.blocks[block] * kv_heads, (entry.blocks[block] + 1) * kv_heads)

    def forgotten(index: int, pool: jax.Array) -> jax.Array:
        records = lanes._pool.snapshot(index)
        records[place] = np.nan
        return jax.device_put(records, pool.sharding)

    lanes._pool._pools = tuple(forgotten(index, pool) for index, pool in enumerate(lanes._pool.arrays))


def test_streamed_lanes_decode_what_the_contiguous_cache_decodes() -> None:
    lanes = streaming_lanes()
    for lane in range(3):
        enter(lanes, DENSE, lane, lane)
    found = []
    for _ in range(STEPS):
        written = np.array([lanes.length(lane) // BLOCK for lane in range(3)])
        found.append(np.asarray(lanes.step()))
        copies = np.asarray(lanes.copies)
        assert not copies[0].any(), "layer 0 is resident"
        np.testing.assert_array_equal(copies[1:], np.broadcast_to(written[:, None], copies[1:].shape))
    for lane in range(3):
        np.testing.assert_array_equal(np.stack(found, axis=1)[lane], decoded(DENSE, lane)[0])
    assert (lanes.return_stats().hits[1:] == STEPS * CONFIG.num_kv_heads).all(), "the tails only"


def test_streamed_lanes_have_the_bits_of_resident_ones() -> None:
    """Hundreds of ragged steps, sampled so that none falls into a loop; a lane empties, idles and changes hands."""
    few, many = streaming_lanes(), make_lanes(DENSE, Fetch.IN_TURN)

    def enter_both(lane: int, prompt: int, seed: int) -> None:
        for lanes in (few, many):
            enter(lanes, DENSE, lane, prompt, SamplingParams(temperature=1.0, seed=seed))

    def run_both(steps: int) -> None:
        used = [lane for lane in range(3) if few.length(lane)]
        np.testing.assert_array_equal(run(few, steps)[used], run(many, steps)[used])
        assert not np.asarray(many.copies).any()
        np.testing.assert_array_equal(hidden(few)[used], hidden(many)[used])
        assert np.isfinite(hidden(few)[used]).all()

    for lane in range(3):
        enter_both(lane, lane, seed=lane)
    run_both(119)
    for lanes in (few, many):
        lanes.leave(1)
    run_both(20)
    enter_both(1, 2, seed=9)
    run_both(3)
    run_both(200)


def test_the_newest_blocks_come_from_their_slots_and_all_others_from_the_pool() -> None:
    """So a block may wait for its write-back, and no slot hides that a copy is missing."""
    lanes = streaming_lanes()
    for lane in range(3):
        enter(lanes, DENSE, lane, lane)
    run(lanes, 70)
    before = hidden(lanes)
    assert np.isfinite(before).all()
    newest = lanes.length(0) // BLOCK
    for block in (newest, newest - 1):
        forget(lanes, 0, block)
    np.testing.assert_array_equal(hidden(lanes), before)
    forget(lanes, 0, newest - 2)
    after = hidden(lanes)
    assert np.isnan(after[0]).all()
    np.testing.assert_array_equal(after[1:], before[1:])


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match="fetch=stream brings whole layers, and mode=sparse"):
        DecodePlan(mode=Mode.SPARSE, fetch=Fetch.STREAM)
    with pytest.raises(ConfigError, match=f"slots_per_lane={SLOTS - 1} cannot hold the {SLOTS} blocks"):
        make_lanes(DENSE, Fetch.STREAM, slots=SLOTS - 1)
    with pytest.raises(ConfigError, match=f"use {MAX_BLOCKS} or more, or fetch=stream"):
        make_lanes(DENSE, Fetch.IN_TURN, slots=SLOTS)
    with pytest.raises(ConfigError, match="sample_every=50 compares selections, and fetch=stream has none"):
        make_lanes(DENSE, Fetch.STREAM, slots=SLOTS, sample_every=50)
