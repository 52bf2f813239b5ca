"""The token append on every backend: the new rows, the finished means, and nothing else, bit for bit."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.backend import Backend
from sparda_jax.pallas_kernels.token_append import append_token, finish_window, write_token

LANES, KV_HEADS, BLOCK, BLOCKS, SLOTS, PAGES = 5, 2, 64, 6, 23, 40
WINDOW = {"kernel_size": 32, "kernel_stride": 16}
# Idle; the first token; no window; a window within a block; one over a block's border; a new block; the last row.
POSITIONS = [-1, 0, 30, 31, 47, 63, 64, 79, 128, 255, 300, 383]


class Cache:
    """Lanes with random contents: NaN wherever nothing that an append reads is."""

    def __init__(self, positions: list[int], head_dim: int, dtype: np.dtype, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.position = np.array(positions, np.int32)
        self.k, self.v = (rng.standard_normal((LANES, KV_HEADS, head_dim)).astype(dtype) for _ in range(2))
        # Each KV head has its own slots: slot n of head h is row n * KV_HEADS + h. A lane has at most two blocks here.
        self.slots = np.full((SLOTS * KV_HEADS, 2 * BLOCK, head_dim), np.nan, dtype)
        self.pages = rng.standard_normal((PAGES, KV_HEADS, 4, head_dim)).astype(dtype)
        self.slot_of_block = np.full((LANES, KV_HEADS, BLOCKS), -1, np.int32)
        self.block_table = rng.permutation(PAGES)[: LANES * BLOCKS].reshape(LANES, BLOCKS).astype(np.int32)
        free = [list(rng.permutation(SLOTS)) for _ in range(KV_HEADS)]
        for lane, position in enumerate(self.position):
            if position < 0:
                continue
            for head in range(KV_HEADS):
                for block in {position // BLOCK, max(position // BLOCK - 1, 0)}:
                    slot = free[head].pop() * KV_HEADS + head
                    self.slot_of_block[lane, head, block] = slot
                    rows = min(position - block * BLOCK, BLOCK)
                    self.slots[slot, :rows] = rng.standard_normal((rows, head_dim))

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots and pages after the append, by plain loops in float64."""
        slots, pages = self.slots.copy(), self.pages.copy()
        size, stride = WINDOW["kernel_size"], WINDOW["kernel_stride"]
        for lane, position in enumerate(self.position):
            for head in range(KV_HEADS if position >= 0 else 0):
                tail = self.slot_of_block[lane, head, position // BLOCK]
                if tail >= 0:
                    slots[tail, position % BLOCK] = self.k[lane, head]
                    slots[tail, BLOCK + position % BLOCK] = self.v[lane, head]
                if position + 1 < size or (position + 1) % stride:
                    continue
                rows = [self.k[lane, head]]
                for earlier in range(position - size + 1, position):
                    rows.append(self.slots[self.slot_of_block[lane, head, earlier // BLOCK], earlier % BLOCK])
                ordinal = (position + 1 - size) // stride + 1
                mean = np.mean(np.array(rows, np.float64), axis=0)
                pages[self.block_table[lane, ordinal // 4], head, ordinal % 4] = mean.astype(pages.dtype)
        return slots, pages

    def arrays(self) -> tuple[jax.Array, ...]:
        """Fresh operands of `append_token`."""
        names = ("slots", "pages", "k", "v", "slot_of_block", "block_table", "position")
        return tuple(jnp.array(getattr(self, name)) for name in names)


def close(got: jax.Array, want: np.ndarray) -> None:
    """Equal but for the last bit of a mean, whose sum may be taken in another order."""
    step = 2.0**-7 if want.dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(got, np.float64), want.astype(np.float64), rtol=step, atol=1e-6)


def same(got: jax.Array, want: np.ndarray) -> None:
    """Equal bit for bit, NaN included."""
    pattern = np.uint16 if want.dtype == jnp.bfloat16 else np.uint32
    np.testing.assert_array_equal(np.asarray(got).view(pattern), want.view(pattern))


@functools.cache
def jitted(function, backend: str, **static):
    return jax.jit(functools.partial(function, backend=backend, **static))


class TokenAppendCases:
    """What every backend must do."""

    @pytest.mark.parametrize(("head_dim", "dtype"), [(128, jnp.bfloat16), (64, np.float32)])
    def test_as_defined(self, backend: str, head_dim: int, dtype: np.dtype) -> None:
        """Rows, means, and every other bit, for ragged positions and idle lanes."""
        append = jitted(append_token, backend, **WINDOW)
        for seed in range(4):
            rng = np.random.default_rng(seed)
            cache = Cache([int(p) for p in rng.choice(POSITIONS, LANES, replace=False)], head_dim, dtype, seed)
            want_slots, want_pages = cache.expected()
            slots, pages = append(*cache.arrays())
            same(slots, want_slots)
            close(pages, want_pages)
            changed = np.any(want_pages != cache.pages, axis=-1)
            same(jnp.asarray(np.asarray(pages)[~changed]), cache.pages[~changed])

    def test_in_parts(self, backend: str) -> None:
        """The two parts give the bits of the whole."""
        cache = Cache([63, -1, 79, 31, 300], 64, np.dtype(np.float32), 9)
        slots, pages, k, v, slot_of_block, block_table, position = cache.arrays()
        whole = jitted(append_token, backend, **WINDOW)(*cache.arrays())
        finished = jitted(finish_window, backend, **WINDOW)(pages, slots, k, slot_of_block, block_table, position)
        written = jitted(write_token, backend)(slots, k, v, slot_of_block, position)
        same(whole[0], np.asarray(written))
        same(whole[1], np.asarray(finished))

    def test_a_tail_without_a_slot(self, backend: str) -> None:
        """Nothing is written for it, and the others get theirs."""
        cache = Cache([80, 200, -1, 5, 100], 64, np.dtype(np.float32), 3)
        cache.slot_of_block[1] = -1
        slots, pages = jitted(append_token, backend, **WINDOW)(*cache.arrays())
        same(slots, cache.expected()[0])
        same(pages, cache.pages)

    def test_what_it_waits_for_is_not_read(self, backend: str) -> None:
        """``after`` changes nothing, whatever it holds."""
        cache = Cache([31, 63, -1, 5, 127], 64, np.dtype(np.float32), 5)
        append = jitted(append_token, backend, **WINDOW)
        plain, tied = append(*cache.arrays()), append(*cache.arrays(), after=jnp.full((3, 5), jnp.nan))
        for one, other in zip(plain, tied, strict=True):
            same(one, np.asarray(other))


class TestReference(TokenAppendCases):
    @pytest.fixture
    def backend(self) -> str:
        return Backend.REFERENCE


class TestTriton(TokenAppendCases):
    @pytest.fixture
    def backend(self) -> str:
        return Backend.TRITON


@pytest.mark.gpu
class TestTritonOnGpu(TokenAppendCases):
    @pytest.fixture
    def backend(self) -> str:
        assert jax.default_backend() == "gpu"
        return Backend.TRITON


def test_bad_operands_are_refused() -> None:
    """Each with the operand's name."""
    slots, pages, k, v, slot_of_block, block_table, position = Cache(
        [1, 2, 3, 4, 5], 64, np.dtype(np.float32), 0
    ).arrays()
    good = (slots, pages, k, v, slot_of_block, block_table, position)

    def refused(match: str, *operands: jax.Array, **changes) -> None:
        with pytest.raises(ValueError, match=match):
            inspect.unwrap(append_token)(*operands, **(WINDOW | changes))

    refused("same dtype", slots, pages, k, v.astype(jnp.bfloat16), slot_of_block, block_table, position)
    refused("pages are", slots, pages.astype(jnp.bfloat16), k, v, slot_of_block, block_table, position)
    refused("position.*batch=3", *good[:-1], position[:3])
    refused("position is float32", *good[:-1], position.astype(jnp.float32))
    refused("no records", slots[:, :63], *good[1:])
    refused("kernel_size=128", *good, kernel_size=128)
    refused("does not take these operands", *good, kernel_size=24, backend=Backend.TRITON)
