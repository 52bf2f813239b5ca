"""Ways to compute the same thing: cut, batched, padded, continued, dense where all is selected (float32)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda_jax.selection import Mode
from tests import oracle
from tests.core.support import (
    ALL_MODES,
    CHUNK_WIDTH,
    LAYERS,
    SELECTING,
    Output,
    Session,
    alone,
    assert_same,
    assert_selects_as,
    join,
    kind_of,
    oracle_mode,
    oracle_prefill,
    skew_for,
    tokens,
    toy,
    whole,
)

_REPEATED = (Mode.SPARDA_DECODE_ONLY, Mode.INFINIGEN, Mode.RANDOM, Mode.STREAMING_LLM)
# Quest selects in decode only, see tests/eval/test_modes.py.
SOME_MODES = [
    pytest.param(mode, marks=pytest.mark.slow) if mode in _REPEATED else mode
    for mode in ALL_MODES
    if mode is not Mode.QUEST
]
# Three neighbours: one selects among 11 blocks, one among 7, one reads its single block.
LENGTHS, SEEDS = (650, 391, 40), (5, 6, 7)
STEPS = 12
CUTS = (1, 15, 16, 17, 63, 64, 65, 0, 128, 31, 32, 33, 127)


def batch_of(mode: Mode, *, poison: bool = True) -> Session:
    return Session(toy(kind_of(mode)), mode, len(LENGTHS), skew=skew_for(mode), poison=poison)


def feed_in_pieces(session: Session, sizes: list[list[int]]) -> list[Output]:
    """Each lane's prompt in pieces of its own sizes, in turn; a lane that has finished gets nothing."""
    ids = [tokens(1000, seed)[:length] for seed, length in zip(SEEDS, LENGTHS, strict=True)]
    done, outputs, turn = [0, 0, 0], [], 0
    while any(len(x) > n for x, n in zip(ids, done, strict=True)):
        pieces = [x[n : n + s[turn % len(s)]] for x, n, s in zip(ids, done, sizes, strict=True)]
        outputs.append(session.feed(pieces, CHUNK_WIDTH))
        done = [n + len(piece) for n, piece in zip(done, pieces, strict=True)]
        turn += 1
    return [join(lane) for lane in zip(*outputs, strict=True)]


@pytest.mark.parametrize("mode", SOME_MODES)
def test_cut_and_batched_equals_alone_in_one_call(mode: Mode):
    """Prompts in ragged pieces, then steps in which a lane may rest; unused rows of the cache are NaN all the time."""
    session = batch_of(mode)
    # Each lane starts at another place in the list of cuts, so that their pieces never match.
    outputs = feed_in_pieces(session, [list(CUTS), [*CUTS[5:], *CUTS[:5]], [*CUTS[9:], *CUTS[:9]]])
    for lane, (length, seed) in enumerate(zip(LENGTHS, SEEDS, strict=True)):
        assert_same(outputs[lane], whole(mode, length, seed))
    steps: list[list[Output]] = [[], [], []]
    done = list(LENGTHS)
    for turn in range(2 * STEPS):
        rests = [turn % 2 == 1, turn % 3 == 0, turn % 4 == 2]
        pieces = [
            tokens(1000, seed)[n : n + (0 if rest or n == length + STEPS else 1)]
            for seed, n, length, rest in zip(SEEDS, done, LENGTHS, rests, strict=True)
        ]
        for lane, output in enumerate(session.feed(pieces, 1, decode=True)):
            steps[lane].append(output)
            done[lane] += len(pieces[lane])
    assert done == [n + STEPS for n in LENGTHS]
    for lane, (length, seed) in enumerate(zip(LENGTHS, SEEDS, strict=True)):
        assert_same(join([outputs[lane], *steps[lane]]), alone(mode, length, STEPS, seed))


@pytest.mark.parametrize("mode", [Mode.SPARSE, Mode.SPARDA])
@given(
    sizes=st.lists(st.lists(st.sampled_from([n for n in CUTS if n]), min_size=1, max_size=4), min_size=3, max_size=3)
)
@settings(max_examples=5)
def test_any_cuts(mode: Mode, sizes: list[list[int]]):
    # Small pieces only would take too many calls.
    outputs = feed_in_pieces(batch_of(mode), [[*s, 128, 128] for s in sizes])
    for lane, (length, seed) in enumerate(zip(LENGTHS, SEEDS, strict=True)):
        assert_same(outputs[lane], whole(mode, length, seed))


@pytest.mark.parametrize("mode", [Mode.SPARDA, Mode.INFINIGEN])
def test_a_lane_without_new_tokens_stays_as_it_is(mode: Mode):
    session = batch_of(mode, poison=False)
    feed_in_pieces(session, [[128]] * 3)
    before = session.cache
    for decode, width in ((False, CHUNK_WIDTH), (True, 1)):
        session.cache = before
        outputs = session.feed([[9], [], [8]], width, decode=decode)
        assert session.cache.lengths.tolist() == [LENGTHS[0] + 1, LENGTHS[1], LENGTHS[2] + 1]
        assert outputs[1].blocks_visible == 0
        assert not outputs[1].blocks_read.any()
        for old, new in zip(before.layers, session.cache.layers, strict=True):
            for name in ("k", "v", "compressed_k", "channel_weight"):
                a, b = getattr(old, name), getattr(new, name)
                if a is not None and b is not None:
                    np.testing.assert_array_equal(a[1], b[1])
            assert np.any(old.k[0] != new.k[0])


# InfiniGen and decode-only change their selector at the first step, so they are no candidates.
@pytest.mark.parametrize("mode", [Mode.DENSE, Mode.SPARSE, Mode.SPARDA, Mode.RANDOM])
def test_decode_equals_prefill_of_the_longer_prompt(mode: Mode):
    """Over five windows and a block boundary (docs/semantics.md 13.6, 13.15)."""
    assert_same(alone(mode, 620, 80), whole(mode, 700))


@pytest.mark.parametrize("mode", [*SELECTING, Mode.RANDOM])
def test_all_selected_equals_dense(mode: Mode):
    """6 blocks hold 384 tokens, in a cache of 16; behind them the modes part (docs/semantics.md 13.23)."""
    dense = oracle_prefill(Mode.DENSE, 400, kind_of(mode)).logits
    found = alone(mode, 372, 28)
    assert all(ids is not None for ids in found.selected)
    np.testing.assert_allclose(found.logits[:384], dense[:384], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(whole(mode, 384).blocks_read, whole(mode, 384).blocks_visible)
    assert (
        np.abs(whole(mode, 620).logits[400:] - oracle_prefill(Mode.DENSE, 620, kind_of(mode)).logits[400:]).max() > 0.05
    )


@pytest.mark.parametrize("mode", [*SELECTING, Mode.RANDOM])
def test_every_mode_reads_the_same_number_of_blocks(mode: Mode):
    """What differs is which ones; forced blocks are always there."""
    found = whole(mode, 650)
    own = np.arange(650) // 64
    for layer, ids in enumerate(found.selected):
        assert ids is not None
        assert np.all((ids >= 0).sum(axis=-1) == np.minimum(own + 1, 6))
        for distance in range(3):
            assert np.all((ids == np.maximum(own - distance, 0)[:, None]).any(axis=-1))
        assert np.all((ids == 0).any(axis=-1))
        assert found.blocks_read[layer] == 2 * np.minimum(own + 1, 6).sum()
    assert found.blocks_visible == 2 * (own + 1).sum()


def test_random_is_random():
    """Every free block about equally often, other ones in every layer, KV head and row."""
    found = whole(Mode.RANDOM, 700)
    counts = np.zeros(8)
    for ids in found.selected:
        assert ids is not None
        for b in range(1, 8):
            counts[b] += (ids[:, 640:] == b).sum()
    # The last 60 rows are in block 10: forced are 0, 8, 9, 10, free places 2 for 7 blocks, in 2 layers and 2 heads.
    draws = 60 * LAYERS * 2
    np.testing.assert_allclose(counts[1:] / draws, 2 / 7, atol=0.1)
    a, b = found.selected[0], found.selected[1]
    assert a is not None
    assert b is not None
    for x, y in ((a, b), (a[:1], a[1:]), (a[:, 640:669], a[:, 641:670])):
        assert np.mean((x != y).any(axis=-1)[..., -29:]) > 0.7


@pytest.mark.parametrize("mode", [Mode.DENSE, Mode.SPARSE, Mode.SPARDA, Mode.INFINIGEN])
@pytest.mark.parametrize("at", [1, 31, 300, 447, 577])
def test_a_token_changes_nothing_before_it(mode: Mode, at: int):
    """Neither logits nor the selections of earlier rows (docs/semantics.md 13.29); from itself on it does."""
    base = whole(mode, 650)
    other = tokens()[:650].copy()
    other[at] = 3 + (other[at] - 2) % 93
    changed = Session(toy(kind_of(mode)), mode, skew=skew_for(mode)).feed([other])[0]
    np.testing.assert_allclose(changed.logits[:at], base.logits[:at], rtol=0, atol=1e-5)
    assert np.abs(changed.logits[at] - base.logits[at]).max() > 0.1
    for a, b in zip(changed.selected, base.selected, strict=True):
        if a is not None and b is not None:
            np.testing.assert_array_equal(a[:, :at], b[:, :at])


DENSE_LEN = 450
AROUND = (DENSE_LEN - 1, DENSE_LEN, 640)


@pytest.mark.parametrize("mode", [Mode.SPARSE, Mode.SPARDA])
def test_below_at_and_above_dense_len_in_one_batch(mode: Mode):
    """449 tokens are dense, 450 sparse; the first crosses the limit in its first step; each is as the oracle alone."""
    model = toy("threshold")
    session = Session(model, mode, 3, poison=True)
    runs = [oracle.forward(model.weights, model.config, tokens()[:n], oracle_mode(mode)) for n in AROUND]
    assert [run.selections[0] is None for run in runs] == [True, False, False]
    session.sparse = np.array(AROUND) >= DENSE_LEN
    outputs = []
    for start in range(0, max(AROUND), CHUNK_WIDTH):
        outputs.append(session.feed([tokens()[:n][start : start + CHUNK_WIDTH] for n in AROUND], CHUNK_WIDTH))
    prompts = [join(lane) for lane in zip(*outputs, strict=True)]
    for found, run, n in zip(prompts, runs, AROUND, strict=True):
        np.testing.assert_allclose(found.logits, run.logits, rtol=0, atol=1e-4)
        for layer in range(LAYERS):
            if n >= DENSE_LEN:
                assert_selects_as(found.selected[layer], run.selections[layer])
        if n < DENSE_LEN:
            np.testing.assert_array_equal(found.blocks_read, found.blocks_visible)
    states = [run.state for run in runs]
    for step in range(8):
        session.sparse = np.array(AROUND) + step + 1 >= DENSE_LEN
        fed = [tokens()[n + step] for n in AROUND]
        found = session.feed([[t] for t in fed], 1, decode=True)
        expected = [oracle.decode(state, int(t)) for state, t in zip(states, fed, strict=True)]
        states = [e.state for e in expected]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a.logits, b.logits, rtol=0, atol=1e-4)
            for layer in range(LAYERS):
                assert_selects_as(a.selected[layer], b.selections[layer])


def test_steps_below_dense_len_read_everything():
    """A dense request in a batch of the list path: its list names all its blocks, and its neighbour's does not."""
    model = toy("threshold")
    session = Session(model, Mode.SPARDA, 3, poison=True)
    lengths = (437, 500, 437)
    session.sparse = np.array(lengths) >= DENSE_LEN
    for start in range(0, max(lengths), CHUNK_WIDTH):
        session.feed([tokens()[:n][start : start + CHUNK_WIDTH] for n in lengths], CHUNK_WIDTH)
    dense = oracle_prefill(Mode.DENSE, 447).logits
    for n in range(437, 447):
        found = session.feed([tokens()[n : n + 1], tokens()[n + 63 : n + 64], tokens()[n : n + 1]], 1, decode=True)
        for lane in (0, 2):
            np.testing.assert_allclose(found[lane].logits[0], dense[n], rtol=0, atol=1e-4)
            assert found[lane].blocks_read.tolist() == [14] * LAYERS
        assert found[1].blocks_read.tolist() == [12] * LAYERS


def test_infinigen_is_never_dense():
    """Its steps choose 6 blocks also where the request is told to be dense (docs/semantics.md 2.3)."""
    session = Session(toy("wide"), Mode.INFINIGEN, skew=skew_for(Mode.INFINIGEN), sparse=False)
    found = session.feed([tokens()[:620]])[0]
    assert_same(found, whole(Mode.INFINIGEN, 620))
    assert session.decode(tokens()[None, 620:621])[0].blocks_read.tolist() == [12] * LAYERS


@pytest.mark.parametrize("capacity", [384, 640])
def test_small_caches_read_what_is_there(capacity: int):
    """A cache as wide as the selection needs none; one of 10 blocks does."""
    session = Session(toy(), Mode.SPARDA, capacity=capacity)
    found = session.feed([tokens()[:350]])[0]
    assert all((ids is None) == (capacity == 384) for ids in found.selected)
    np.testing.assert_allclose(found.logits, whole(Mode.SPARDA, 350).logits, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(found.blocks_read, whole(Mode.SPARDA, 350).blocks_read)
    assert found.blocks_visible == whole(Mode.SPARDA, 350).blocks_visible


def test_grown_caches_hold_the_same():
    """From 10 to 16 blocks in the middle of decoding."""
    session = Session(toy(), Mode.SPARDA, capacity=640)
    prompt = session.feed([tokens()[:620]])[0]
    steps = session.decode(tokens()[None, 620:640])[0]
    session.cache = session.cache.grow(1024)
    later = session.decode(tokens()[None, 640:700])[0]
    assert_same(join([prompt, steps, later]), whole(Mode.SPARDA, 700))
