"""A thousand steps of eight ragged lanes that come and go: few slots and many give the same tokens."""

import numpy as np
import pytest

from sparda_jax.cache.state import CacheShape
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.lanes import DecodeLanes
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from tests.decode.support import CONFIG, MODEL, prefilled

LANES, BLOCKS, STEPS = 8, 32, 1000
LONGEST = BLOCKS * CONFIG.sparse.block_size


def lanes_with(slots: int, mode: Mode, fetch: Fetch) -> DecodeLanes:
    shape = CacheShape(lanes=LANES, max_blocks=BLOCKS, num_blocks=LANES * BLOCKS, slots_per_lane=slots)
    return DecodeLanes(MODEL, shape, DecodePlan(mode=mode, fetch=fetch, max_len=LONGEST))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "fetch"), [(Mode.SPARDA, Fetch.AHEAD), (Mode.SPARSE, Fetch.IN_TURN)])
def test_a_thousand_steps(mode: Mode, fetch: Fetch) -> None:
    """Sampled, so that no lane falls into a loop; lanes that are full, and some that are not, start another prompt."""
    width = CONFIG.sparse.num_selected_blocks
    few, many = lanes_with(width, mode, fetch), lanes_with(BLOCKS, mode, fetch)
    rng = np.random.default_rng(0)
    copied, entered = 0, 0
    for step in range(STEPS):
        for lane in range(LANES):
            full = few.length(lane) + 1 >= LONGEST
            if few.length(lane) == 0 or full or rng.random() < 1 / 400:
                prompt, seed = int(rng.integers(3)), int(rng.integers(2**31))
                for lanes in (few, many):
                    lanes.leave(lane)
                    params = SamplingParams(temperature=1.0, seed=seed)
                    lanes.enter(lane, *prefilled(mode, prompt), params)
                entered += 1
        assert np.array_equal(few.step(), many.step()), f"step {step}"
        assert many.copies is not None
        assert not np.asarray(many.copies).any(), f"step {step}: everything has a slot, and yet something was fetched"
        copied += int(np.asarray(few.copies).sum())
    assert entered > LANES
    assert copied > STEPS * LANES
