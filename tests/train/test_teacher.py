"""The teacher: scores on the fine grid, alignment, and the blocks it routes to (docs/semantics.md section 11)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda_jax.config import SparseConfig
from sparda_jax.train._rows import make_keys, split_queries
from sparda_jax.train.teacher import TeacherScores, check_packing, route, teacher_scores
from tests.oracle.compress import num_compressed
from tests.train.loss_cases import GOLDEN, SMALL, Document, Row, closed_form, drawn, packed
from tests.train.loss_oracle import Grid, trace

DEPLOYED = SparseConfig(window_size=64, topk=4)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def scores_of(arrays: tuple[jax.Array, ...], grid: Grid, chunk: int, key_tile: int) -> TeacherScores:
    """The scores of all queries, chunks in front."""
    _, q, k, positions, valid = arrays
    keys = make_keys(k, positions, valid, grid, key_tile)
    queries = split_queries(q, positions, valid, chunk, jnp.int32(0))
    return jax.lax.map(lambda chunk: teacher_scores(chunk, keys, grid, key_tile), queries)


def aligned(row: Row, grid: Grid = SMALL, chunk: int = 64, key_tile: int = 64) -> np.ndarray:
    """[H, T, windows] of a row of batch 1."""
    scores = np.asarray(scores_of(row.arrays, grid, chunk, key_tile).aligned)[:, 0]
    length = row.arrays[4].shape[1]
    return np.swapaxes(scores, 0, 1).reshape(scores.shape[1], -1, scores.shape[-1])[:, :length]


def ids_of(row: Row, grid: Grid = SMALL, chunk: int = 64, key_tile: int = 64) -> np.ndarray:
    """[H, T, selected] of a row of batch 1."""
    return np.asarray(route(*row.arrays[1:], grid, chunk=chunk, key_tile=key_tile))[0]


def as_lists(ids: np.ndarray) -> list[list[list[int]]]:
    return [[[int(i) for i in query if i >= 0] for query in head] for head in ids]


class TestOracle:
    """The oracle itself, by published numbers."""

    @pytest.mark.parametrize("name", GOLDEN)
    def test_golden_numbers(self, name: str):
        golden = GOLDEN[name]
        document = closed_form(golden.length)
        traced = trace(document.student, document.q, document.k, golden.grid)
        kl = traced.published_kl(golden.grid)
        np.testing.assert_allclose(kl.mean(), golden.loss, rtol=1e-12)
        np.testing.assert_allclose(kl[0, -1], golden.last_kl, rtol=1e-12)
        assert traced.compressed.shape[1] == golden.windows
        assert traced.supervised.sum() == golden.supervised_blocks
        assert traced.supervised.any(axis=-1).sum() == golden.supervised_pairs
        assert traced.selected[0][-1] == list(golden.last_selection)

    def test_golden_intermediates(self):
        document = closed_form(256)
        traced = trace(document.student, document.q, document.k, SMALL)
        np.testing.assert_allclose(
            traced.compressed[0, 0, :3], [0.6007149630725591, 0.10541468945056891, -0.3867095160600061], rtol=1e-12
        )
        np.testing.assert_allclose(
            traced.aligned[0, 255, :4], [0.01101656368, 0.061151024734, 0.20362646718, 0.20362646718], rtol=1e-9
        )
        np.testing.assert_allclose(traced.aligned.sum(), 787.7634469854618, rtol=1e-12)
        np.testing.assert_allclose(
            traced.student[1, 255, :3], [0.012426314484, 0.016194163794, 0.027044999002], rtol=1e-9
        )
        assert traced.selected[1][200] == [0, 2, 7, 10, 11, 12]
        assert traced.selected[0][100] == [0, 1, 2, 4, 5, 6]
        np.testing.assert_allclose(traced.published_kl(SMALL)[1, 200], 0.9551091150424218, rtol=1e-12)


class TestScores:
    @pytest.mark.parametrize("length", [250, 256])
    def test_equal_the_oracle(self, length: int):
        document = closed_form(length)
        traced = trace(document.student, document.q, document.k, SMALL)
        ours = aligned(packed([document]))
        windows = traced.aligned.shape[-1]
        np.testing.assert_allclose(ours[..., :windows], traced.aligned, rtol=2e-5, atol=1e-6)
        assert not ours[..., windows:].any()

    @pytest.mark.parametrize("length", [64, 79, 80, 1000])
    def test_windows_are_the_complete_ones(self, length: int):
        k = jnp.ones((1, length, 1, 4))
        everywhere = jnp.ones((1, length), bool)
        keys = make_keys(k, jnp.arange(length)[None], everywhere, DEPLOYED, 2048)
        exists = np.asarray(keys.window_exists)[0]
        assert exists.sum() == num_compressed(length)
        assert exists[: num_compressed(length)].all()
        assert np.asarray(keys.fine_exists).sum() == length - 1

    @pytest.mark.parametrize("key_tile", [16, 64, 2048])
    def test_mass_of_a_row_is_the_group(self, key_tile: int):
        mass = np.asarray(scores_of(packed([drawn(0, 150, group=3)]).arrays, SMALL, 32, key_tile).mass)
        rows = np.moveaxis(mass[:, 0], 0, 1).reshape(2, -1, mass.shape[-1])[:, :150]
        np.testing.assert_allclose(rows.sum(axis=-1), 3, rtol=1e-5)

    def test_the_first_query_sees_one_fine_key(self):
        """Its softmax is over one entry, which the first window alone holds."""
        scores = aligned(packed([drawn(1, 80)]))
        np.testing.assert_allclose(scores[:, 0, 0], 2, rtol=1e-6)
        assert not scores[:, 0, 1:].any()

    def test_a_query_sees_one_token_ahead_and_no_more(self):
        document = drawn(2, 96)
        before = aligned(packed([document]))
        for ahead, changes in ((1, True), (2, False)):
            k = document.k.copy()
            k[40 + ahead] += 5
            after = aligned(packed([Document(student=document.student, q=document.q, k=k)]))
            assert (after[:, 40] != before[:, 40]).any() == changes

    def test_the_last_query_sees_all_fine_keys(self):
        document = drawn(3, 64)
        last = aligned(packed([document]))[:, -1]
        assert (last[:, : num_compressed(64, 8, 4)] > 0).all()

    def test_large_logits_give_no_nan(self):
        document = drawn(4, 96)
        scores = aligned(packed([Document(student=document.student, q=1e4 * document.q, k=document.k)]))
        assert np.isfinite(scores).all()
        assert scores.max() <= 2 * (1 + 1e-6)


class TestRoute:
    @pytest.mark.parametrize("name", GOLDEN)
    def test_golden_selections(self, name: str):
        golden = GOLDEN[name]
        ids = ids_of(packed([closed_form(golden.length)]), golden.grid)
        assert tuple(ids[0, -1]) == golden.last_selection

    @settings(max_examples=10)
    @given(seed=st.integers(0, 1000), cut=st.sampled_from([(48, 32), (64, 64), (200, 512)]))
    def test_equals_the_oracle(self, seed: int, cut: tuple[int, int]):
        document = drawn(seed, 150)
        traced = trace(document.student, document.q, document.k, SMALL)
        chunk, key_tile = cut
        assert as_lists(ids_of(packed([document]), chunk=chunk, key_tile=key_tile)) == traced.selected

    def test_equals_the_oracle_on_the_deployed_grid(self):
        document = drawn(5, 650)
        grid = Grid(kernel_size=32, kernel_stride=16, block_size=64, local_blocks=1, num_selected_blocks=5)
        traced = trace(document.student, document.q, document.k, grid)
        row = packed([document], grid)
        ids = np.asarray(route(*row.arrays[1:], DEPLOYED, chunk=256, key_tile=128))[0]
        assert ids.shape[-1] == DEPLOYED.num_selected_blocks
        assert as_lists(ids) == traced.selected

    def test_forced_blocks_are_always_there(self):
        grid = Grid(init_blocks=2, local_blocks=3, num_selected_blocks=7)
        ids = as_lists(ids_of(packed([drawn(6, 200)], grid), grid))
        for head in ids:
            for query, chosen in enumerate(head):
                own = query // 16
                forced = {b for b in range(own + 1) if b < 2 or b >= own - 3}
                assert forced <= set(chosen)
                assert len(chosen) >= min(own + 1, 6)

    def test_equal_scores_go_to_the_lowest_block(self):
        document = drawn(7, 240)
        even = Document(student=document.student, q=0 * document.q, k=document.k)
        ids = ids_of(packed([even]))
        # Own block 14: forced are 0 and 12 .. 14, and of equal ones the two lowest stay.
        assert ids[:, -1].tolist() == [[0, 1, 2, 12, 13, 14]] * 2

    def test_the_block_after_the_query_can_take_a_place(self):
        """As published: it is struck out afterwards, and the list is one shorter."""
        document = drawn(8, 240)
        q, k = np.zeros_like(document.q), np.zeros_like(document.k)
        # Token 223 ends block 13. Its own key stands out, so fine keys 222 and 223 do, the second one at window 56.
        k[223, :, 0], q[223, ..., 0] = 10, 10
        ids = as_lists(ids_of(packed([Document(student=document.student, q=q, k=k)])))
        assert ids[0][223] == [0, 1, 11, 12, 13]
        assert ids[0][222] == [0, 1, 2, 11, 12, 13]

    def test_few_blocks_are_all_selected(self):
        ids = ids_of(packed([drawn(9, 40)]))
        assert ids.shape == (2, 40, 3)
        assert ids[0, 39].tolist() == [0, 1, 2]
        assert ids[0, 20].tolist() == [0, 1, -1]

    def test_a_packed_document_is_routed_as_alone(self):
        documents = [drawn(10, 150), drawn(11, 5), drawn(12, 131)]
        row = packed(documents, after=21)
        assert row.places == (0, 160, 176)
        ids = ids_of(row, chunk=48, key_tile=32)
        for place, document in zip(row.places, documents, strict=True):
            here = ids[:, place : place + len(document)]
            shifted = np.where(here >= 0, here - place // 16, -1)
            alone = ids_of(packed([document], after=11), chunk=48, key_tile=32)[:, : len(document)]
            assert as_lists(shifted) == as_lists(alone)
        assert (ids[:, 150:160] == -1).all()
        assert (ids[:, 307:] == -1).all()

    def test_rows_of_a_batch_are_apart(self):
        rows = [packed([drawn(seed, 100)]) for seed in (13, 14)]
        both = tuple(jnp.concatenate(pair) for pair in zip(rows[0].arrays, rows[1].arrays, strict=True))
        ids = np.asarray(route(*both[1:], SMALL, chunk=64, key_tile=64))
        for number, row in enumerate(rows):
            np.testing.assert_array_equal(ids[number], ids_of(row))

    def test_no_gradient_goes_through(self):
        row = packed([drawn(15, 100)])

        def total(q: jax.Array) -> jax.Array:
            return jnp.sum(route(q, *row.arrays[2:], SMALL).astype(jnp.float32)) + jnp.sum(q)

        np.testing.assert_array_equal(jax.grad(total)(row.arrays[1]), 1)


class TestRefusals:
    def test_rows_shorter_than_a_window(self):
        row = packed([drawn(0, 7)])
        with pytest.raises(ValueError, match="q_len=7"):
            route(*row.arrays[1:], SMALL)

    def test_tiles_that_cut_blocks(self):
        row = packed([drawn(0, 40)])
        with pytest.raises(ValueError, match="key_tile=24"):
            route(*row.arrays[1:], SMALL, key_tile=24)

    def test_check_packing_takes_what_packed_makes(self):
        row = packed([drawn(10, 150), drawn(11, 5), drawn(12, 131)], after=21)
        check_packing(np.asarray(row.arrays[3]), np.asarray(row.arrays[4]), SMALL)

    @pytest.mark.parametrize(
        ("positions", "valid", "message"),
        [
            (np.r_[0:20, 0:20], np.ones(40), "multiple of block_size=16"),
            (np.r_[0:16, 5:29], np.ones(40), "multiple of block_size=16"),
            (np.r_[0:16, 17:41], np.ones(40), "multiple of block_size=16"),
            (np.r_[0:40], np.r_[np.ones(10), np.zeros(2), np.ones(28)], "without padding in between"),
            (np.r_[0:7], np.ones(7), "q_len=7"),
        ],
    )
    def test_check_packing_refuses(self, positions: np.ndarray, valid: np.ndarray, message: str):
        with pytest.raises(ValueError, match=message):
            check_packing(positions[None], valid[None].astype(bool), SMALL)
