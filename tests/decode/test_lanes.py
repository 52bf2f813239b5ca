"""Lanes change hands, fill and run out of blocks; what they finish reaches the pool and the pages."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.cache.state import CacheShape
from sparda_jax.config import ConfigError
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.generate import Runner
from sparda_jax.lanes import DecodeLanes
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from tests.core.support import tokens
from tests.decode.support import (
    CAPACITY,
    CONFIG,
    GREEDY,
    LENGTHS,
    MAX_BLOCKS,
    STEPS,
    WIDTH,
    decoded,
    enter,
    make_lanes,
    prefilled,
    run,
    toy_of,
)


def test_finished_blocks_reach_the_pool_and_the_pages() -> None:
    mode = Mode.SPARDA
    lanes = make_lanes(mode, Fetch.AHEAD, slots=WIDTH + 1)
    for lane in range(3):
        enter(lanes, mode, lane, lane)
    run(lanes, STEPS)
    kv_heads, block_size = CONFIG.num_kv_heads, CONFIG.sparse.block_size
    for lane in range(3):
        _, cache = decoded(mode, lane)
        entry = lanes._lanes[lane]
        assert entry is not None
        blocks = np.array(entry.blocks)
        whole = (LENGTHS[lane] + STEPS) // block_size
        assert int(lanes._state.written[lane]) == whole
        for index, layer in enumerate(cache.layers):
            records = lanes._pool.snapshot(index).reshape(-1, kv_heads, 2 * block_size, CONFIG.head_dim)[blocks[:whole]]
            k, v = (np.asarray(x[0]).reshape(kv_heads, -1, block_size, CONFIG.head_dim) for x in (layer.k, layer.v))
            want = np.concatenate([k, v], axis=2)[:, :whole].swapaxes(0, 1)
            np.testing.assert_allclose(records, want, rtol=1e-4, atol=1e-5)
            pages = (
                np.asarray(lanes._state.layers[index].pages)[blocks]
                .swapaxes(0, 1)
                .reshape(kv_heads, -1, CONFIG.head_dim)
            )
            windows = (LENGTHS[lane] + STEPS - 32) // 16 + 1
            want = np.asarray(layer.compressed_k)[0, :, :windows]
            np.testing.assert_allclose(pages[:, 1 : 1 + windows], want, rtol=1e-4, atol=1e-5)


def test_a_lane_changes_hands_beside_a_running_one() -> None:
    """What leaves gives its blocks back; what enters finds nothing of it; the neighbour does not notice."""
    mode = Mode.SPARDA
    lanes = make_lanes(mode, Fetch.AHEAD, slots=WIDTH + 1, lanes=2, num_blocks=30)
    enter(lanes, mode, 0, 0)
    enter(lanes, mode, 1, 1)
    first = run(lanes, 30)
    free = lanes.free_blocks
    lanes.leave(1)
    assert lanes.free_blocks == free + -(-(LENGTHS[1] + 30) // 64)
    alone = run(lanes, 20)
    enter(lanes, mode, 1, 2)
    last = run(lanes, 50)
    np.testing.assert_array_equal(np.concatenate([first[0], alone[0], last[0]]), decoded(mode, 0)[0][:100])
    np.testing.assert_array_equal(first[1], decoded(mode, 1)[0][:30])
    np.testing.assert_array_equal(last[1], decoded(mode, 2)[0][:50])
    assert (lanes.length(0), lanes.length(1)) == (LENGTHS[0] + 100, LENGTHS[2] + 50)
    lanes.leave(0)
    lanes.leave(1)
    lanes.leave(1)
    assert lanes.free_blocks == 30


def test_seeded_lanes_draw_the_same_wherever_they_are() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    lanes = make_lanes(Mode.SPARSE, Fetch.IN_TURN, slots=WIDTH + 1)
    enter(lanes, Mode.SPARSE, 0, 1, params)
    enter(lanes, Mode.SPARSE, 1, 2)
    enter(lanes, Mode.SPARSE, 2, 1, params)
    found = run(lanes, 20)
    np.testing.assert_array_equal(found[0], found[2])
    assert (found[0] != decoded(Mode.SPARSE, 1)[0][:20]).any()


def test_limits_are_named_and_nothing_is_lost() -> None:
    lanes = make_lanes(Mode.SPARSE, Fetch.IN_TURN, slots=WIDTH + 1, lanes=2, num_blocks=17)
    enter(lanes, Mode.SPARSE, 0, 0)
    with pytest.raises(ValueError, match="lane 0 is in use"):
        enter(lanes, Mode.SPARSE, 0, 1)
    enter(lanes, Mode.SPARSE, 1, 1)
    with pytest.raises(MemoryError, match="1 blocks asked for, 0 of 17"):
        lanes.step()
    assert (lanes.length(0), lanes.length(1)) == (LENGTHS[0], LENGTHS[1])
    lanes.leave(1)
    np.testing.assert_array_equal(run(lanes, 60)[0], decoded(Mode.SPARSE, 0)[0][:60])
    with pytest.raises(MemoryError, match="6 blocks asked for"):
        enter(lanes, Mode.SPARSE, 1, 1)
    assert lanes.length(1) == 0


def test_a_full_lane_is_refused() -> None:
    lanes = make_lanes(Mode.SPARSE, Fetch.IN_TURN, slots=WIDTH + 1, lanes=1)
    enter(lanes, Mode.SPARSE, 0, 0)
    run(lanes, CAPACITY - LENGTHS[0])
    with pytest.raises(ValueError, match="lane 0 is full"):
        lanes.step()


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"slots_per_lane={WIDTH - 1} cannot hold the {WIDTH} blocks"):
        make_lanes(Mode.SPARSE, Fetch.IN_TURN, slots=WIDTH - 1)
    with pytest.raises(ConfigError, match=f"cannot hold the {MAX_BLOCKS} blocks"):
        make_lanes(Mode.DENSE, Fetch.IN_TURN, slots=WIDTH)
    with pytest.raises(
        ConfigError, match=r"looks a layer ahead \(sparda, sparda-decode-only, infinigen\), and mode=sparse"
    ):
        DecodePlan(mode=Mode.SPARSE, fetch=Fetch.AHEAD)


@pytest.mark.parametrize("lane", [-1, 2])
def test_a_lane_that_is_not_there_is_refused(lane: int) -> None:
    """A negative number too, which would be a lane on the host and none on the device."""
    lanes = make_lanes(Mode.SPARSE, Fetch.IN_TURN, lanes=2)
    enter(lanes, Mode.SPARSE, 1, 2)
    parked = lanes.park(1)
    enter(lanes, Mode.SPARSE, 1, 2)
    for use in (lanes.length, lanes.written_blocks, lanes.park, lanes.leave, lambda lane: lanes.resume(lane, parked)):
        with pytest.raises(ValueError, match=f"lane={lane} is not one of these 2 lanes: use 0 to 1"):
            use(lane)
    with pytest.raises(ValueError, match=f"lane={lane} is not one"):
        enter(lanes, Mode.SPARSE, lane, 2)
    assert lanes.length(1) == LENGTHS[2]


def test_what_these_lanes_cannot_take_is_refused_and_costs_no_blocks() -> None:
    mode = Mode.SPARSE
    lanes = make_lanes(mode, Fetch.IN_TURN, lanes=2)
    cache, token = prefilled(mode, 2)
    free = lanes.free_blocks
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, cache)
    two = jax.tree.map(lambda x: jnp.concatenate([x, x]), cache)
    shorter = dataclasses.replace(cache, layers=cache.layers[:2])
    for other, given in ((halved, "3 layers of bfloat16[1,"), (two, "float32[2,"), (shorter, "2 layers of float32[1,")):
        with pytest.raises(ValueError, match=re.escape(given) + r".*one of 3 layers of float32\[1, 2, 1024, 16\]"):
            lanes.enter(0, other, token, GREEDY)
    for outside in (-1, CONFIG.vocab_size):
        with pytest.raises(ValueError, match=f"first_token={outside} is outside vocab_size={CONFIG.vocab_size}"):
            lanes.adopt(cache, outside, GREEDY)
    long = prefilled(mode, 1)
    for shared, said in (([3], "block 3 is not in use"), ([-1], "block -1 is not"), ([99], "block 99 is not")):
        with pytest.raises(ValueError, match=said):
            lanes.enter(0, *long, GREEDY, shared=shared)
        with pytest.raises(ValueError, match=said):
            lanes.prefix(shared, CAPACITY)
    assert (lanes.free_blocks, lanes.length(0)) == (free, 0)
    lanes.enter(0, cache, token, GREEDY)
    np.testing.assert_array_equal(run(lanes, 3)[0], decoded(mode, 2)[0][:3])


@pytest.mark.parametrize("name", ["lanes", "max_blocks", "num_blocks"])
def test_a_cache_has_lanes_and_blocks(name: str) -> None:
    sizes: dict[str, Any] = {"lanes": 2, "max_blocks": 4, "num_blocks": 8, "slots_per_lane": 4} | {name: 0}
    with pytest.raises(ConfigError, match=f"{name}=0 is not allowed: it must be at least 1"):
        CacheShape(**sizes)


def test_infinigen_needs_a_basis_and_channel_weights() -> None:
    mode = Mode.INFINIGEN
    lanes = make_lanes(mode, Fetch.AHEAD)
    with pytest.raises(ConfigError, match="infinigen needs a calibrated basis"):
        DecodeLanes(toy_of(mode).decoder, lanes.shape, lanes.plan)
    cache, token = prefilled(mode, 2)
    layers = tuple(dataclasses.replace(layer, channel_weight=None) for layer in cache.layers)
    with pytest.raises(ConfigError, match="a cache made for it"):
        lanes.enter(0, dataclasses.replace(cache, layers=layers), token, SamplingParams())
    assert lanes.free_blocks == lanes.shape.num_blocks, "what is refused takes no blocks"


def test_what_a_runner_prefilled_goes_on_in_a_lane() -> None:
    """In its chunks and its bucket of cache: the lane decodes what the runner would have."""
    mode, count = Mode.SPARDA, 900
    model, params = toy_of(mode).decoder, SamplingParams(max_tokens=40)
    prompt = [int(token) for token in tokens(count, 11)]
    runner = Runner(model, mode=mode, max_model_len=CAPACITY)
    alone, handed = runner.start(prompt, params), runner.start(prompt, params)
    with pytest.raises(ValueError, match="no cache to take"):
        handed.take_cache()
    while (first := handed.advance()) is None:
        pass
    lanes = make_lanes(mode, Fetch.AHEAD, slots=WIDTH + 1)
    lanes.enter(1, handed.take_cache(), first, params)
    found = [first, *run(lanes, 39)[1].tolist()]
    expected: list[int] = []
    while len(expected) < 40:
        if (token := alone.advance()) is not None:
            expected.append(token)
    assert found == expected
    with pytest.raises(ValueError, match="the cache has been taken"):
        handed.advance()
    with pytest.raises(ValueError, match="no cache to take"):
        handed.take_cache()
