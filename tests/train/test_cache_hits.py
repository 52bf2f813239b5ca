"""Hit rates of a cache, against one that is kept as a list, token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.block_selection import mask_to_bits
from sparda_jax.train._cache_hits import cache_hits
from tests.train.support import tiny_model

GRID = tiny_model().config.sparse
LENGTH = 12 * GRID.block_size


def rows_of(lengths: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Positions of rows of documents, each from a whole block on, and what is no padding."""
    positions, valid = np.zeros((len(lengths), LENGTH), np.int32), np.zeros((len(lengths), LENGTH), bool)
    for row, documents in enumerate(lengths):
        place = 0
        for length in documents:
            positions[row, place : place + length] = np.arange(length)
            valid[row, place : place + length] = True
            place += -(-length // GRID.block_size) * GRID.block_size
    return positions, valid


def selections(positions: np.ndarray, valid: np.ndarray, kv_heads: int = 2) -> np.ndarray:
    """The own block of each query and random ones of its document, other ones now and then."""
    rng = np.random.default_rng(0)
    others: list[int] = []
    chosen = np.zeros((len(positions), kv_heads, LENGTH, LENGTH // GRID.block_size), bool)
    for row, head, token in np.ndindex(chosen.shape[:3]):
        if not valid[row, token]:
            continue
        own, first = token // GRID.block_size, (token - positions[row, token]) // GRID.block_size
        if token % GRID.block_size == 0 or rng.random() < 0.2:
            others = rng.permutation(np.arange(first, own))[: GRID.num_selected_blocks - 1].tolist()
        chosen[row, head, token, [own, *others]] = True
    return chosen


def replayed(chosen: np.ndarray, positions: np.ndarray, valid: np.ndarray, slots: int) -> tuple[int, int]:
    """Blocks that are asked for, and how many a list of at most ``slots`` held, the latest in front."""
    asked = hits = 0
    for row, head in np.ndindex(chosen.shape[:2]):
        cache: list[int] = []
        for token in np.flatnonzero(valid[row]):
            if positions[row, token] == 0:
                cache = []
            own, first = token // GRID.block_size, (token - positions[row, token]) // GRID.block_size
            blocks = np.flatnonzero(chosen[row, head, token]).tolist()
            if own - first + 1 > GRID.num_selected_blocks:
                wanted = [block for block in blocks if block != own]
                asked += len(wanted)
                hits += sum(block in cache for block in wanted)
            cache = [*blocks, *(block for block in cache if block not in blocks)][:slots]
    return asked, hits


@pytest.mark.parametrize("chunk", [LENGTH, 100])
def test_a_list_holds_the_same(chunk: int) -> None:
    positions, valid = rows_of([[LENGTH - 30], [380, 330], [LENGTH]])
    chosen = selections(positions, valid)
    bits = mask_to_bits(jnp.asarray(chosen))
    found = cache_hits(bits, jnp.asarray(positions), jnp.asarray(valid), GRID, chunk=chunk)
    width = GRID.num_selected_blocks
    asked, hits = replayed(chosen, positions, valid, width)
    _, more = replayed(chosen, positions, valid, 2 * width)
    assert 0 < hits < more < asked
    assert (int(found.chosen), int(found.hits), int(found.hits_of_twice)) == (asked, hits, more)
