"""The tests of block selection in decode that every backend runs: cases random and adversarial."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.block_selection import Scorer, mosaic_gpu, reference, select_blocks_decode, triton
from tests.kernels.select_cases import (
    GEOMETRIES,
    LONG,
    Case,
    Geometry,
    exact_choice,
    exact_scores,
    joined_parts,
    make_case,
    split_parts,
)
from tests.oracle.golden import allowed_by_ties, load_golden, tie_rows

# Lengths around every boundary: no window, one window, a window that ends a block, a new block.
BOUNDARIES = (1, 15, 31, 32, 33, 47, 48, 63, 64, 65, 79, 80, 95, 96, 111, 112, 127, 128, 129, 130)
KERNELS = {"triton": triton, "mosaic_gpu": mosaic_gpu}


@functools.partial(jax.jit, static_argnames=("geometry", "backend"))
def run_choice(parts: jax.Array, *operands: jax.Array, geometry: Geometry, backend: str) -> jax.Array:
    """A backend's choice from what its score kernel leaves: parts, visible, query_block, num_selected."""
    if backend == "reference":
        return reference.choose_blocks_decode(parts, *operands[1:], **geometry.limits)
    return KERNELS[backend].top_blocks(parts, *operands, **geometry.limits)


@functools.partial(jax.jit, static_argnames=("scorer", "geometry", "backend"))
def run_steps(*operands: jax.Array, scorer: Scorer, geometry: Geometry, backend: str) -> tuple[jax.Array, jax.Array]:
    """Scores, and the choice from them: what `select_blocks_decode` does, with the scores to look at."""
    score = reference.block_scores_decode if backend == "reference" else KERNELS[backend].score_pages
    scores = score(*operands[:4], scorer=scorer)
    return scores, run_choice(scores, *operands[3:], geometry=geometry, backend=backend)


@functools.partial(jax.jit, static_argnames=("scorer", "geometry", "backend"))
def run_public(*operands: jax.Array, scorer: Scorer, geometry: Geometry, backend: str) -> jax.Array:
    return select_blocks_decode(*operands, scorer=scorer, **geometry.limits, backend=backend)


def run(case: Case, backend: str) -> tuple[np.ndarray, np.ndarray]:
    """Block scores and ids."""
    found = run_steps(*case.operands, scorer=case.scorer, geometry=case.geometry, backend=backend)
    scores, ids = (np.asarray(a) for a in found)
    assert ids.dtype == np.int32
    if backend != "reference":
        scores = joined_parts(scores, case.visible, case.geometry.blocks, backend)
    return scores, ids


def takes(case: Case, backend: str) -> bool:
    queries, pages = case.scored[:2]
    return backend != "mosaic_gpu" or mosaic_gpu.takes(queries, pages, scorer=case.scorer, width=case.geometry.width)


def check(case: Case, backend: str) -> np.ndarray:
    """Scores within 1e-5 of the definition in float64, relative to the size of what is added up; the choice exactly
    that of the backend's own scores; and where it isn't that of float64, scores that nearly tie. Returns the ids.
    """
    own_scores, found = run(case, backend)
    scores, scale = exact_scores(case)
    np.testing.assert_array_equal(np.isfinite(own_scores), np.isfinite(scores))
    seen = np.isfinite(scores)
    assert np.all(np.abs(own_scores[seen] - scores[seen]) <= 1e-5 * scale[seen] + 1e-37)
    np.testing.assert_array_equal(found, exact_choice(own_scores, case.query_block, case.num_selected, case.geometry))
    expected = exact_choice(scores, case.query_block, case.num_selected, case.geometry)
    for b, h in np.ndindex(found.shape[:2]):
        ours, theirs = ({*row[row >= 0].tolist()} for row in (found[b, h], expected[b, h]))
        extra, lost = sorted(ours - theirs), sorted(theirs - ours)
        assert len(extra) == len(lost)
        if extra:
            gap = scores[b, h, lost].max() - scores[b, h, extra].min()
            assert gap <= 2e-5 * scale[b, h, lost + extra].max()
    return found


class SelectBlocksDecode:
    """What every backend promises; a test class names its backend."""

    backend: ClassVar[str]
    seeds: ClassVar[int] = 3

    @pytest.mark.parametrize("scorer", Scorer)
    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"g{g.group}d{g.head_dim}")
    def test_random_contents(self, geometry: Geometry, scorer: Scorer):
        for seed in range(self.seeds):
            lengths = np.random.default_rng(seed).integers(1, 64 * geometry.blocks + 1, geometry.batch)
            lengths[seed % geometry.batch] = 64 * geometry.blocks
            case = make_case(geometry, scorer, lengths, seed)
            if not takes(case, self.backend):
                with pytest.raises(ValueError, match="'mosaic_gpu' of block_selection does not take these operands"):
                    run_public(*case.operands, scorer=scorer, geometry=geometry, backend=self.backend)
                return
            check(case, self.backend)

    @pytest.mark.parametrize("scorer", Scorer)
    def test_every_boundary(self, scorer: Scorer):
        """A lane for each length; and as a Forecast sees them that was scored before the newest window was there."""
        geometry = dataclasses.replace(GEOMETRIES[0], batch=len(BOUNDARIES), blocks=3)
        case = make_case(geometry, scorer, np.array(BOUNDARIES), 3)
        check(case, self.backend)
        if scorer is Scorer.FORECAST:
            np.subtract(case.visible, 1, out=case.visible, where=case.visible > 0)
            check(case, self.backend)

    @pytest.mark.parametrize("scorer", Scorer)
    def test_idle_lanes_select_nothing(self, scorer: Scorer):
        case = make_case(GEOMETRIES[0], scorer, np.array([0, 700, 0]), 5)
        assert case.query_block.tolist() == [-1, 10, -1]
        assert (check(case, self.backend)[[0, 2]] == -1).all()

    @pytest.mark.parametrize("scorer", Scorer)
    def test_equal_scores_go_to_the_lowest_id(self, scorer: Scorer):
        """Keys and queries of few values: the sums are exact, so that float64 has the same ties."""
        geometry = GEOMETRIES[2]
        case = make_case(geometry, scorer, np.array([8192, 5000, 7777]), 6, levels=1)
        scores = exact_scores(case)[0]
        if scorer is Scorer.INFLLM:
            # A softmax of equal logits is flat.
            case.queries[:] = 0
            scores = np.zeros_like(scores)
        expected = exact_choice(scores, case.query_block, case.num_selected, geometry)
        np.testing.assert_array_equal(check(case, self.backend), expected)

    @pytest.mark.parametrize("number", [0, 2])
    def test_the_choice_from_given_scores(self, number: int):
        """Ties, infinities, signed zeros, one level, and every number of places."""
        rng = np.random.default_rng(number)
        normal = rng.standard_normal((2, GEOMETRIES[number].blocks))
        contents = (
            normal,
            np.round(normal),
            np.full_like(normal, 0.5),
            np.where(normal > 0, 0.0, -0.0),
            np.where(normal > 1, np.inf, normal),
            np.where(normal > 0, -np.inf, normal),
            np.full_like(normal, -np.inf),
            np.full_like(normal, np.inf),
            normal * 1e-30,
            normal * 1e38,
            -np.abs(normal),
        )
        scores = np.stack(contents).astype(np.float32)
        geometry = dataclasses.replace(GEOMETRIES[number], batch=len(scores))
        for everything in (True, False):
            query_block = rng.integers(-1, geometry.blocks, geometry.batch).astype(np.int32)
            num_selected = rng.integers(0, geometry.width + 1, geometry.batch).astype(np.int32)
            if everything:
                query_block[:], num_selected[:] = geometry.blocks - 1, geometry.width
            parts = scores if self.backend == "reference" else split_parts(scores, self.backend)
            visible = np.full(geometry.batch, 4 * geometry.blocks - 1, np.int32)
            operands = (jnp.asarray(a) for a in (parts, visible, query_block, num_selected))
            found = np.asarray(run_choice(*operands, geometry=geometry, backend=self.backend))
            np.testing.assert_array_equal(found, exact_choice(scores, query_block, num_selected, geometry))

    def test_one_valid_block_and_more_places_than_blocks(self):
        geometry = GEOMETRIES[3]
        case = make_case(geometry, Scorer.FORECAST, np.array([40, 200, 576]), 9)
        case.num_selected[:] = geometry.width
        found = run(case, self.backend)[1]
        for b, count in enumerate((1, 4, 9)):
            np.testing.assert_array_equal(found[b, :, :count], np.broadcast_to(np.arange(count), (2, count)))
            assert (found[b, :, count:] == -1).all()

    def test_overflowing_scores_do_not_push_out_forced_blocks(self):
        geometry = GEOMETRIES[0]
        case = make_case(geometry, Scorer.FORECAST, np.full(3, 64 * 40), 10)
        case.pages[:] = np.where(np.isnan(case.pages), np.nan, np.abs(case.pages) * 2.0**100)
        case.queries[:] = np.abs(case.queries) * 2.0**100
        case.num_selected[:] = 6
        found = run(case, self.backend)[1]
        assert (found[..., :6] == [0, 1, 2, 37, 38, 39]).all()
        assert (found[..., 6:] == -1).all()

    @pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in matmul:RuntimeWarning")
    @pytest.mark.parametrize("scorer", Scorer)
    def test_scores_that_overflow_to_nan_take_no_forced_place_and_lose_none(self, scorer: Scorer):
        """Products of both signs overflow, and the sum of +inf and -inf is NaN, of either sign."""
        geometry = GEOMETRIES[0]
        case = make_case(geometry, scorer, np.array([64 * 40, 1000, 1300]), 15)
        case.pages[:] *= 2.0**100
        case.queries[:] *= 2.0**100
        case.num_selected[:] = 8
        # Scores are unspecified here.
        ids = run(case, self.backend)[1]
        for lane, query_block in enumerate(case.query_block):
            for row in ids[lane]:
                chosen = row[row >= 0]
                assert len(chosen) == 8
                assert np.all(np.diff(chosen) > 0)
                assert {0, *range(query_block - 2, query_block + 1)} <= {*chosen.tolist()} <= {*range(query_block + 1)}

    @pytest.mark.parametrize("scorer", Scorer)
    def test_nan_queries_stay_in_their_lane(self, scorer: Scorer):
        geometry = GEOMETRIES[0]
        case = make_case(geometry, scorer, np.array([2000, 2100, 2200]), 11)
        expected = run(case, self.backend)[1]
        case.queries[1] = np.nan
        found = run(case, self.backend)[1]
        np.testing.assert_array_equal(found[[0, 2]], expected[[0, 2]])
        for row in found[1]:
            chosen = row[row >= 0]
            assert len(chosen) == min(case.num_selected[1], case.query_block[1] + 1)
            assert np.all(np.diff(chosen) > 0)
            assert chosen[-1] <= case.query_block[1]

    @pytest.mark.parametrize("scorer", Scorer)
    def test_a_lane_alone_selects_as_in_the_batch(self, scorer: Scorer):
        """The scores too are equal, bit for bit."""
        geometry = GEOMETRIES[0]
        case = make_case(geometry, scorer, np.array([2500, 1000, 64]), 12)
        scores, ids = run(case, self.backend)
        idle = make_case(geometry, scorer, np.array([0, 0, 0]), 13)
        for name in ("queries", "block_table", "visible", "query_block", "num_selected"):
            getattr(idle, name)[2] = getattr(case, name)[0]
        idle.pages[:] = case.pages
        other_scores, other_ids = run(idle, self.backend)
        np.testing.assert_array_equal(other_scores[2], scores[0])
        np.testing.assert_array_equal(other_ids[2], ids[0])

    @pytest.mark.parametrize("scorer", Scorer)
    def test_the_public_function_does_both_steps(self, scorer: Scorer):
        case = make_case(GEOMETRIES[0], scorer, np.array([2500, 0, 800]), 14)
        found = run_public(*case.operands, scorer=scorer, geometry=case.geometry, backend=self.backend)
        np.testing.assert_array_equal(np.asarray(found), run(case, self.backend)[1])

    @pytest.mark.parametrize(("kind", "scorer"), [("g16", Scorer.INFLLM), ("sparda", Scorer.FORECAST)])
    def test_golden_step(self, kind: str, scorer: Scorer):
        """The published kernels' own decode step: two sequences of 2048 keys, whose query is in the 33rd block."""
        step = load_golden("decode")
        windows, blocks, geometry = 127, 33, Geometry(batch=2, group=16, head_dim=128, blocks=33, width=8)
        pages = np.full((2 * blocks, 2, 4, 128), np.nan, np.float32)
        table = np.random.default_rng(0).permutation(2 * blocks).reshape(2, blocks).astype(np.int32)
        entry = np.arange(1, windows + 1)
        for b in range(2):
            pages[table[b, entry // 4], :, entry % 4] = step["compressed_k"][windows * b : windows * (b + 1)]
        queries = step["q"].reshape(2, 2, 16, 128) if scorer is Scorer.INFLLM else step["q_forecast"][:, :, None]
        case = Case(
            geometry=geometry,
            scorer=scorer,
            queries=queries,
            pages=pages,
            block_table=table,
            visible=np.full(2, windows, np.int32),
            query_block=np.full(2, 32, np.int32),
            num_selected=np.full(2, 6, np.int32),
        )
        pooled = step[f"pooled_{kind}"].swapaxes(0, 1)
        scores, ids = run(case, self.backend)
        compared = np.isfinite(pooled) & np.isfinite(scores)
        assert compared.mean() > 0.8
        np.testing.assert_allclose(scores[compared], pooled[compared], rtol=2**-7, atol=1e-5)
        ids, pooled, query_block = ids.swapaxes(0, 1), pooled.swapaxes(0, 1), np.full(2, 32)
        assert allowed_by_ties(pooled, ids, query_block, 6).all()
        settled = ~tie_rows(pooled, 6)
        assert settled.any()
        np.testing.assert_array_equal(ids[settled][:, :6], np.sort(step[f"topk_{kind}"], axis=-1)[settled])


class SelectBlocksCompiled(SelectBlocksDecode):
    """The same compiled for a GPU, and 128K tokens."""

    @pytest.mark.parametrize("scorer", Scorer)
    @pytest.mark.parametrize("geometry", LONG, ids=lambda g: f"g{g.group}d{g.head_dim}")
    def test_long_contexts(self, geometry: Geometry, scorer: Scorer):
        for seed, levels in ((0, 0), (1, 2)):
            case = make_case(geometry, scorer, np.array([64 * geometry.blocks, 100_003, 70_000]), seed, levels=levels)
            if takes(case, self.backend):
                check(case, self.backend)
