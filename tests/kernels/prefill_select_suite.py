"""The tests of block selection in prefill that every backend runs."""

import dataclasses
import functools
from typing import ClassVar

import jax
import numpy as np
import pytest

from sparda_jax.pallas_kernels.block_selection import Scorer, bits_to_mask, select_blocks_prefill
from tests.kernels.prefill_select_cases import GEOMETRIES, LONG, Case, Geometry, exact_choice, exact_row, make_case


@functools.partial(jax.jit, static_argnames=("scorer", "geometry", "backend"))
def _select(*operands: jax.Array, scorer: Scorer, geometry: Geometry, backend: str) -> jax.Array:
    bits = select_blocks_prefill(*operands, scorer=scorer, backend=backend, **geometry.limits)
    # What lies beyond the last block is looked at, too.
    return bits_to_mask(bits, 32 * bits.shape[-1])


def run(case: Case, backend: str) -> np.ndarray:
    """bool [batch, kv_heads, q_len, blocks]."""
    mask = np.asarray(_select(*case.operands, scorer=case.scorer, geometry=case.geometry, backend=backend))
    blocks = case.geometry.blocks
    assert not mask[..., blocks:].any()
    return mask[..., :blocks]


def check(case: Case, backend: str, *, every: int = 1, exact: bool = False) -> np.ndarray:
    """As many blocks as there should be, the forced ones among them, none of the future or for padding, and otherwise
    the choice of float64, or one between scores that nearly tie. Looks at one row in ``every``; returns all.
    """
    g, found = case.geometry, run(case, backend)
    for b, h, row in np.ndindex(g.batch, g.kv_heads, g.q_len):
        if row >= case.num_new[b]:
            assert not found[b, h, row].any()
            continue
        if (row + b + h) % every:
            continue
        scores, bound = exact_row(case, b, h, row)
        assert not found[b, h, row, len(scores) :].any()
        ours, theirs = found[b, h, row, : len(scores)], exact_choice(scores, g)
        assert ours.sum() == theirs.sum() == min(g.num_selected, len(scores))
        extra, lost = ours & ~theirs, theirs & ~ours
        if extra.any():
            assert not exact
            assert scores[lost].max() - scores[extra].min() <= 2e-5 * bound[lost | extra].max()
    return found


class SelectBlocksPrefill:
    """What every backend promises; a test class names its backend."""

    backend: ClassVar[str]

    @pytest.mark.parametrize("scorer", Scorer)
    @pytest.mark.parametrize("number", range(len(GEOMETRIES)))
    def test_random_contents(self, number: int, scorer: Scorer):
        """From any position on, with padding."""
        g = GEOMETRIES[number]
        last = 64 * g.blocks - g.q_len
        for seed, (start, num_new) in enumerate((([last, 700], [g.q_len, 60]), ([573, last - 37], [g.q_len, 93]))):
            check(make_case(g, scorer, start, num_new, seed), self.backend, every=3)

    @pytest.mark.parametrize("scorer", Scorer)
    def test_every_boundary(self, scorer: Scorer):
        """The first tokens of a sequence; and where blocks become more than are selected."""
        g = GEOMETRIES[0]
        check(make_case(g, scorer, [0, 64 * g.num_selected - 70], [g.q_len, g.q_len], 2), self.backend)

    @pytest.mark.parametrize("scorer", Scorer)
    def test_chunks_that_end_where_a_tile_of_blocks_does(self, scorer: Scorer):
        """Block 63 has its last window in common with block 64, which does not compete."""
        g = GEOMETRIES[0]
        for blocks in (66, 67):
            check(make_case(g, scorer, [64 * blocks - 31, 64 * blocks - 60], [90, 64], 10), self.backend)

    @pytest.mark.parametrize("scorer", Scorer)
    def test_nothing_new(self, scorer: Scorer):
        case = make_case(GEOMETRIES[0], scorer, [0, 3000], [0, 1], 3)
        assert check(case, self.backend).sum() == 2 * GEOMETRIES[0].num_selected

    @pytest.mark.parametrize("scorer", Scorer)
    def test_equal_scores_go_to_the_lowest_id(self, scorer: Scorer):
        """Keys and queries of few values: the sums are exact, so that float64 has the same ties."""
        g = GEOMETRIES[0]
        case = make_case(g, scorer, [4000, 1500], [g.q_len, g.q_len], 4, levels=1)
        if scorer is Scorer.INFLLM:
            # A softmax of equal logits is flat.
            case.queries[:] = 0
        check(case, self.backend, every=2, exact=True)

    @pytest.mark.parametrize("scorer", Scorer)
    def test_any_cut_gives_the_same_sets(self, scorer: Scorer):
        g = GEOMETRIES[0]
        whole = make_case(g, scorer, [2011, 3300], [g.q_len, 110], 5)
        expected = run(whole, self.backend)
        for cut in (1, 64, 101):
            for first, count in ((0, cut), (cut, g.q_len - cut)):
                part = dataclasses.replace(
                    whole,
                    queries=np.roll(whole.queries, -first, axis=1),
                    start=whole.start + first,
                    num_new=np.clip(whole.num_new - first, 0, count),
                )
                found = run(part, self.backend)
                for b, new in enumerate(part.num_new):
                    np.testing.assert_array_equal(found[b, :, :new], expected[b, :, first : first + new])

    @pytest.mark.parametrize("scorer", Scorer)
    def test_later_tokens_change_nothing(self, scorer: Scorer):
        """Nor do they when what they bring is infinite or NaN."""
        g = GEOMETRIES[0]
        case = make_case(g, scorer, [2011, 3300], [g.q_len, g.q_len], 6)
        expected = run(case, self.backend)
        token = 77
        for value in (1e30, np.inf, np.nan):
            changed = make_case(g, scorer, [2011, 3300], [g.q_len, g.q_len], 6)
            changed.queries[:, token:] = value
            for b, start in enumerate(case.start):
                changed.keys[b, :, (start + token - 16) // 16 :] = value
            np.testing.assert_array_equal(run(changed, self.backend)[:, :, :token], expected[:, :, :token])

    @pytest.mark.parametrize("scorer", Scorer)
    def test_a_sequence_selects_as_it_does_beside_others(self, scorer: Scorer):
        g = GEOMETRIES[0]
        case = make_case(g, scorer, [2011, 3300], [g.q_len, 110], 7)
        other = make_case(g, scorer, [150, 2011], [9, g.q_len], 8)
        other.queries[1], other.keys[1] = case.queries[0], case.keys[0]
        np.testing.assert_array_equal(run(other, self.backend)[1], run(case, self.backend)[0])

    def test_scores_that_overflow_take_no_forced_place(self):
        """Products of both signs overflow, and the sum of +inf and -inf is NaN."""
        g = GEOMETRIES[0]
        case = make_case(g, Scorer.FORECAST, [2011, 3300], [g.q_len, g.q_len], 9)
        case.queries[:] *= 2.0**100
        case.keys[:] *= 2.0**100
        found = run(case, self.backend)
        assert (found.sum(axis=-1) == g.num_selected).all()
        for b, row in np.ndindex(g.batch, g.q_len):
            own = (int(case.start[b]) + row) // 64
            assert found[b, :, row, [0, own - 2, own - 1, own]].all()
            assert not found[b, :, row, own + 1 :].any()


class SelectBlocksPrefillCompiled(SelectBlocksPrefill):
    """The same compiled for a GPU, and 128K tokens."""

    @pytest.mark.parametrize("scorer", Scorer)
    @pytest.mark.parametrize("number", range(len(LONG)))
    def test_long_contexts(self, number: int, scorer: Scorer):
        g = LONG[number]
        last = 64 * g.blocks - g.q_len
        for seed, levels in ((0, 0), (1, 2)):
            start = [last, last // 2 + 13][: g.batch]
            check(make_case(g, scorer, start, [g.q_len] * g.batch, seed, levels=levels), self.backend, every=29)
