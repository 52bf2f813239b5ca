"""Sequences enter, wait, go on, share and leave in random order, with NaN wherever nothing may be read."""

from collections import Counter

import numpy as np
import pytest

from sparda_jax.cache.parking import Parked
from sparda_jax.decode_plan import Fetch
from sparda_jax.selection import Mode
from tests.decode.support import GREEDY, LENGTHS, STEPS, decoded, prefilled
from tests.decode.test_parking import BLOCK, WAYS, lanes_of, poison

LANES, BLOCKS, ROUNDS = 3, 26, 200


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "fetch"), WAYS)
def test_any_order_gives_the_tokens_of_the_contiguous_cache(mode: Mode, fetch: Fetch) -> None:
    """A pool that runs out; each sequence is one of the three prompts, and has decoded a number of tokens."""
    rng = np.random.default_rng(1)
    lanes = lanes_of(mode, fetch, lanes=LANES, num_blocks=BLOCKS)
    running, waiting = dict[int, tuple[int, int]](), list[tuple[Parked, int, int]]()
    happened = Counter[str]()

    def arrive(prompt: int, lane: int) -> None:
        twins = [at for at, (other, _) in running.items() if other == prompt]
        shared: list[int] = []
        if twins and mode is not Mode.INFINIGEN:
            shared = lanes.written_blocks(twins[0])[: int(rng.integers(1 + LENGTHS[prompt] // BLOCK))]
        lanes.blocks.share(shared)
        free, missing = lanes.free_blocks, -(-LENGTHS[prompt] // BLOCK) - len(shared)
        try:
            if rng.random() < 0.5:
                lanes.enter(lane, *prefilled(mode, prompt), GREEDY, shared=shared)
                running[lane] = prompt, 0
            else:
                waiting.append((lanes.adopt(*prefilled(mode, prompt), GREEDY, shared=shared), prompt, 0))
        except MemoryError:
            assert missing > free == lanes.free_blocks
            lanes.blocks.give_back(shared)
            happened["refused"] += 1
            return
        assert lanes.free_blocks == free - missing
        happened["shared" if shared else "arrived"] += 1

    for _ in range(ROUNDS):
        empty = [lane for lane in range(LANES) if lane not in running]
        action = rng.choice(["arrive", "park", "resume", "leave", "drop", "go on"], p=[0.3, 0.2, 0.2, 0.05, 0.05, 0.2])
        if action == "arrive" and empty:
            arrive(int(rng.integers(3)), int(rng.choice(empty)))
        elif action == "park" and running:
            lane = int(rng.choice(list(running)))
            waiting.append((lanes.park(lane), *running.pop(lane)))
        elif action == "resume" and waiting and empty:
            parked, *at = waiting.pop(int(rng.integers(len(waiting))))
            lane = int(rng.choice(empty))
            lanes.resume(lane, parked)
            running[lane] = at[0], at[1]
            happened["resumed"] += 1
        elif action == "drop" and waiting:
            lanes.drop(waiting.pop(int(rng.integers(len(waiting))))[0])
        for lane in [lane for lane, (_, done) in running.items() if done == STEPS]:
            lanes.leave(lane)
            del running[lane]
        if running and (action == "leave" or lanes.free_blocks < LANES):
            lane = int(rng.choice(list(running)))
            lanes.leave(lane)
            del running[lane]
        if rng.random() < 0.1:
            poison(lanes)
        for _ in range(int(rng.integers(1, 8))):
            if lanes.free_blocks < LANES or any(done == STEPS for _, done in running.values()):
                break
            new = np.asarray(lanes.step())
            for lane, (prompt, done) in running.items():
                assert new[lane] == decoded(mode, prompt)[0][done], f"{prompt=}, token {done}, {happened}"
                running[lane] = prompt, done + 1
                happened["tokens"] += 1
    for lane in running:
        lanes.leave(lane)
    for parked, _, _ in waiting:
        lanes.drop(parked)
    assert lanes.free_blocks == BLOCKS
    expected = {"arrived", "refused", "resumed", "tokens"} | ({"shared"} if mode is not Mode.INFINIGEN else set())
    assert set(happened) == expected
    assert happened["tokens"] > ROUNDS
