"""The pool's free list and reference counts, and the layout of records and pages."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda_jax.cache.blocks import BlockAllocator
from sparda_jax.cache.records import to_pages, to_records


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give back"]), st.integers(0, 5)), max_size=60))
def test_counts_agree_with_a_list_of_users(steps: list[tuple[str, int]]) -> None:
    allocator, users = BlockAllocator(8), []
    for action, number in steps:
        if action == "take":
            if number > allocator.num_free:
                with pytest.raises(MemoryError, match=f"{number} blocks asked for"):
                    allocator.take(number)
            else:
                taken = allocator.take(number)
                assert not set(taken) & set(users), "a block in use was handed out"
                assert len(set(taken)) == number
                users += taken
        elif users:
            block = users[number % len(users)]
            if action == "share":
                allocator.share([block])
                users.append(block)
            else:
                allocator.give_back([block])
                users.remove(block)
        assert allocator.num_free == 8 - len(set(users))


def test_free_blocks_are_not_given_back_or_shared() -> None:
    allocator = BlockAllocator(4)
    taken = allocator.take(2)
    for call in (allocator.give_back, allocator.share):
        with pytest.raises(ValueError, match="is not in use"):
            call([*taken, next(b for b in range(4) if b not in taken)])
        with pytest.raises(ValueError, match="name one twice"):
            call([taken[0], taken[0]])
    assert allocator.num_free == 2, "a refused call changes nothing"
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockAllocator(0)


def test_records_hold_the_k_rows_then_the_v_rows() -> None:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 3, 256, 8)).astype(np.float32) for _ in range(2))
    records = np.asarray(to_records(jnp.asarray(k), jnp.asarray(v), 64))
    assert records.shape == (2, 4, 3, 128, 8)
    for lane, block, head, row in [(0, 0, 0, 0), (1, 3, 2, 63), (0, 2, 1, 17)]:
        np.testing.assert_array_equal(records[lane, block, head, row], k[lane, head, 64 * block + row])
        np.testing.assert_array_equal(records[lane, block, head, 64 + row], v[lane, head, 64 * block + row])


def test_window_j_is_entry_j_plus_1_of_the_pages() -> None:
    windows = np.random.default_rng(1).standard_normal((2, 3, 16, 8)).astype(np.float32)
    pages = np.asarray(to_pages(jnp.asarray(windows), 4))
    assert pages.shape == (2, 4, 3, 4, 8)
    for j in range(15):
        np.testing.assert_array_equal(pages[:, (j + 1) // 4, :, (j + 1) % 4], windows[:, :, j])
    assert not pages[:, 0, :, 0].any()
