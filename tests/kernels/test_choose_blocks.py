"""The choice of blocks for rows of several documents: every backend against a loop over the definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.block_selection import bits_to_mask, choose_blocks

LIMITS = {"init_blocks": 1, "local_blocks": 2, "num_selected": 9}
BACKENDS = ["reference", "triton"]


def definition(scores: np.ndarray, first: int, own: int, num_selected: int) -> np.ndarray:
    """One query's: forced blocks, then the best of the others and of the next block, the lowest among equals."""
    blocks = len(scores)
    forced = [b for b in range(first, own + 1) if b < first + 1 or b >= own - 2]
    free = [b for b in range(first, min(own + 2, blocks)) if b not in forced] if own >= 0 else []
    ranked = sorted(free, key=lambda b: (-scores[b], b))[: num_selected - 4]
    chosen = np.zeros(blocks, bool)
    chosen[[b for b in (*forced, *ranked) if b <= own]] = True
    return chosen


def case(blocks: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((2, 2, rows, blocks)).astype(np.float32)
    scores[:, :, ::4] = np.round(scores[:, :, ::4])
    scores[:, :, 1::4] = np.where(scores[:, :, 1::4] > 0, 0.0, -0.0)
    scores[:, :, 2] = 0.5
    scores[:, :, 3] = -np.inf
    own = rng.integers(0, blocks, (2, rows))
    own[:, :8], own[0, 8] = blocks - 1, -1
    first = np.where(rng.random((2, rows)) < 0.5, 0, rng.integers(0, np.maximum(own, 0) + 1))
    first[:, :6] = 0
    return scores, first.astype(np.int32), own.astype(np.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("blocks", "num_selected"), [(40, 9), pytest.param(300, 40, marks=pytest.mark.slow), (40, 4)])
def test_as_defined(blocks: int, num_selected: int, backend: str) -> None:
    scores, first, own = case(blocks, 24, seed=blocks)
    limits = LIMITS | {"num_selected": num_selected}
    bits = choose_blocks(jnp.asarray(scores), jnp.asarray(first), jnp.asarray(own), **limits, backend=backend)
    found = np.asarray(bits_to_mask(bits, 32 * bits.shape[-1]))
    assert not found[..., blocks:].any()
    for b, h, row in np.ndindex(scores.shape[:3]):
        expected = definition(scores[b, h, row], int(first[b, row]), int(own[b, row]), num_selected)
        np.testing.assert_array_equal(found[b, h, row, :blocks], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_next_block_can_take_a_place(backend: str) -> None:
    scores = np.zeros((1, 1, 2, 20), np.float32)
    scores[..., 15] = [[[1, -np.inf]]]
    first, own = jnp.zeros((1, 2), jnp.int32), jnp.full((1, 2), 14, jnp.int32)
    bits = choose_blocks(jnp.asarray(scores), first, own, **LIMITS, backend=backend)
    assert np.asarray(bits_to_mask(bits, 20)).sum(axis=-1).tolist() == [[[8, 9]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_overflown_scores_do_not_displace_forced_blocks(backend: str) -> None:
    """Infinite and NaN count as the largest number; ties go to the lowest id."""
    scores = np.zeros((1, 1, 2, 20), np.float32)
    scores[0, 0, 0, 4:15:2] = np.inf
    scores[0, 0, 1, 4:15:2] = np.nan
    first, own = jnp.zeros((1, 2), jnp.int32), jnp.full((1, 2), 18, jnp.int32)
    limits = LIMITS | {"num_selected": 7}
    bits = choose_blocks(jnp.asarray(scores), first, own, **limits, backend=backend)
    for row in np.asarray(bits_to_mask(bits, 20))[0, 0]:
        np.testing.assert_array_equal(np.flatnonzero(row), [0, 4, 6, 8, 16, 17, 18])


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_earlier_documents_do_not_take_the_places_of_scores_of_minus_infinity(backend: str) -> None:
    """As many as there are places for, and more."""
    scores = np.full((1, 1, 2, 20), -np.inf, np.float32)
    first, own = jnp.asarray([[9, 5]], jnp.int32), jnp.full((1, 2), 15, jnp.int32)
    bits = choose_blocks(jnp.asarray(scores), first, own, **LIMITS, backend=backend)
    found = [np.flatnonzero(row).tolist() for row in np.asarray(bits_to_mask(bits, 20))[0, 0]]
    assert found == [[*range(9, 16)], [*range(5, 11), 13, 14, 15]]


@pytest.mark.gpu
@pytest.mark.parametrize(("blocks", "num_selected"), [(8, 6), (16, 4), (32, 5), (40, 4), (300, 40), (1024, 96)])
def test_compiled(blocks: int, num_selected: int) -> None:
    """Also rows of less than a word of bits, where ptxas once mixed up two branches."""
    scores, first, own = (jnp.asarray(x) for x in case(blocks, 500, seed=blocks))
    limits = LIMITS | {"num_selected": num_selected}
    ours, theirs = (choose_blocks(scores, first, own, **limits, backend=backend) for backend in ("triton", "reference"))
    np.testing.assert_array_equal(ours, theirs)


def test_too_few_places() -> None:
    scores, first, own = (jnp.asarray(x) for x in case(40, 24, seed=1))
    with pytest.raises(ValueError, match="num_selected=3 must hold the 4"):
        choose_blocks(scores, first, own, init_blocks=1, local_blocks=2, num_selected=3)
