"""Decode over the offload cache: what the contiguous cache decodes, with every slot or with hardly any."""

import numpy as np
import pytest

from sparda_jax.decode_plan import Fetch
from sparda_jax.selection import Mode
from tests.decode.support import CONFIG, STEPS, WIDTH, decoded, enter, hidden, make_lanes, run

WAYS = [(Mode.SPARSE, Fetch.IN_TURN), (Mode.SPARDA, Fetch.AHEAD), (Mode.INFINIGEN, Fetch.AHEAD)]
# Two programs each: the copy path is the same, so one way runs every time.
SOME_WAYS = [WAYS[1], *(pytest.param(*way, marks=pytest.mark.slow) for way in (WAYS[0], WAYS[2]))]
_REPEATED = ((mode, Fetch.IN_TURN) for mode in (Mode.SPARDA, Mode.INFINIGEN, Mode.RANDOM))
MORE_WAYS = [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in _REPEATED)]


@pytest.mark.parametrize(("mode", "fetch"), MORE_WAYS)
def test_lanes_decode_what_the_contiguous_cache_decodes(mode: Mode, fetch: Fetch) -> None:
    """Ragged lanes, more blocks than slots, over two block boundaries and nine compressed keys each."""
    lanes = make_lanes(mode, fetch, slots=WIDTH + 1)
    copied = np.zeros(CONFIG.num_layers)
    for lane in range(3):
        enter(lanes, mode, lane, lane)
    found = []
    for _ in range(STEPS):
        found.append(np.asarray(lanes.step()))
        copied += np.asarray(lanes.copies).sum((1, 2))
    for lane in range(3):
        np.testing.assert_array_equal(np.stack(found, axis=1)[lane], decoded(mode, lane)[0])
    # Layer 0 is resident; the others had to fetch.
    assert copied[0] == 0
    assert (copied[1:] > STEPS / 4).all()


@pytest.mark.parametrize(("mode", "fetch"), SOME_WAYS)
def test_few_slots_give_the_bits_of_many(mode: Mode, fetch: Fetch) -> None:
    few, many = make_lanes(mode, fetch, slots=WIDTH), make_lanes(mode, fetch)
    for lanes in (few, many):
        for lane in range(3):
            enter(lanes, mode, lane, lane)
    assert few._state.layers[1].slots.shape[0] < many._state.layers[1].slots.shape[0]
    for _ in range(4):
        np.testing.assert_array_equal(run(few, 16), run(many, 16))
        assert not np.asarray(many.copies).any()
        np.testing.assert_array_equal(hidden(few), hidden(many))
        assert np.isfinite(hidden(few)).all()


def test_dense_lanes_read_everything() -> None:
    lanes = make_lanes(Mode.DENSE, Fetch.IN_TURN)
    for lane in range(3):
        enter(lanes, Mode.DENSE, lane, lane)
    found = run(lanes, 40)
    for lane in range(3):
        np.testing.assert_array_equal(found[lane], decoded(Mode.DENSE, lane)[0][:40])
