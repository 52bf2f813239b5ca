"""Block selection in decode: every backend on the same cases, random and adversarial."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.block_selection import Scorer, reference, select_blocks_decode, triton
from tests.kernels.select_cases import (
    GEOMETRIES,
    LONG,
    Case,
    Geometry,
    exact_choice,
    exact_scores,
    joined_parts,
    make_case,
)
from tests.oracle.golden import allowed_by_ties, load_golden, tie_rows

# Lengths around every boundary: no window, one window, a window that ends a block, a new block.
BOUNDARIES = (1, 15, 31, 32, 33, 47, 48, 63, 64, 65, 79, 80, 95, 96, 111, 112, 127, 128, 129, 130)
BACKENDS = ("reference", "triton")
KERNELS = {"triton": triton}


@functools.partial(jax.jit, static_argnames=("scorer", "backend"))
def run_scores(*operands: jax.Array, scorer: Scorer, backend: str) -> jax.Array:
    """Block scores from the reference, scores of pages from a kernel."""
    if backend == "reference":
        return reference.block_scores_decode(*operands, scorer=scorer)
    return KERNELS[backend].score_pages(*operands, scorer=scorer)


@functools.partial(jax.jit, static_argnames=("geometry", "backend"))
def run_choice(scores: jax.Array, *operands: jax.Array, geometry: Geometry, backend: str) -> jax.Array:
    """The choice of a backend from given block scores."""
    if backend == "reference":
        return reference.choose_blocks_decode(scores, *operands, **geometry.limits)
    # As if every block's score came from its own page, and all pages were visible.
    parts = jnp.stack([scores, jnp.full(scores.shape, -jnp.inf)], axis=2)
    visible = jnp.full(len(scores), 4 * scores.shape[-1] - 1, jnp.int32)
    return KERNELS[backend].top_blocks(parts, visible, *operands, **geometry.limits)


@functools.partial(jax.jit, static_argnames=("scorer", "geometry", "backend"))
def run_all(*operands: jax.Array, scorer: Scorer, geometry: Geometry, backend: str) -> jax.Array:
    return select_blocks_decode(*operands, scorer=scorer, **geometry.limits, backend=backend)


def found_scores(case: Case, backend: str) -> np.ndarray:
    found = np.asarray(run_scores(*case.scored, scorer=case.scorer, backend=backend))
    return found if backend == "reference" else joined_parts(found, case.visible)


def found_ids(case: Case, backend: str) -> np.ndarray:
    found = run_all(*case.operands, scorer=case.scorer, geometry=case.geometry, backend=backend)
    assert found.dtype == jnp.int32
    return np.asarray(found)


def check_scores(case: Case, backend: str) -> None:
    """Within 1e-5 of the definition in float64, relative to the size of what is added up."""
    found, (expected, scale) = found_scores(case, backend), exact_scores(case)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    seen = np.isfinite(expected)
    assert np.all(np.abs(found[seen] - expected[seen]) <= 1e-5 * scale[seen] + 1e-37)


def check_ids(case: Case, backend: str) -> None:
    """The choice from the backend's own scores, exactly; and where it isn't that of float64, the scores nearly tie."""
    found = found_ids(case, backend)
    np.testing.assert_array_equal(
        found, exact_choice(found_scores(case, backend), case.query_block, case.num_selected, case.geometry)
    )
    scores, scale = exact_scores(case)
    expected = exact_choice(scores, case.query_block, case.num_selected, case.geometry)
    for b, h in np.ndindex(found.shape[:2]):
        ours, theirs = ({*row[row >= 0].tolist()} for row in (found[b, h], expected[b, h]))
        extra, lost = sorted(ours - theirs), sorted(theirs - ours)
        assert len(extra) == len(lost)
        if extra:
            gap = scores[b, h, lost].max() - scores[b, h, extra].min()
            assert gap <= 2e-5 * scale[b, h, lost + extra].max()


class TestSelectBlocksDecode:
    """What every backend promises."""

    @pytest.fixture(params=BACKENDS)
    def backend(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.mark.parametrize("scorer", Scorer)
    @pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"g{g.group}d{g.head_dim}")
    def test_random_contents(self, backend: str, geometry: Geometry, scorer: Scorer):
        for seed in range(3):
            lengths = np.random.default_rng(seed).integers(1, 64 * geometry.blocks + 1, geometry.batch)
            lengths[seed % geometry.batch] = 64 * geometry.blocks
            case = make_case(geometry, scorer, lengths, seed)
            check_scores(case, backend)
            check_ids(case, backend)

    @pytest.mark.parametrize("scorer", Scorer)
    def test_every_boundary(self, backend: str, scorer: Scorer):
        """Also a Forecast that was scored before the newest window was there."""
        geometry = GEOMETRIES[0]
        for start in range(0, len(BOUNDARIES), geometry.batch):
            lengths = np.resize(BOUNDARIES[start : start + geometry.batch], geometry.batch)
            case = make_case(geometry, scorer, lengths, start)
            check_scores(case, backend)
            check_ids(case, backend)

    @pytest.mark.parametrize("scorer", Scorer)
    def test_idle_lanes_select_nothing(self, backend: str, scorer: Scorer):
        geometry = GEOMETRIES[0]
        case = make_case(geometry, scorer, np.array([0, 700, 0]), 5)
        assert case.query_block.tolist() == [-1, 10, -1]
        found = found_ids(case, backend)
        assert (found[[0, 2]] == -1).all()
        check_ids(case, backend)

    @pytest.mark.parametrize("scorer", Scorer)
    def test_equal_scores_go_to_the_lowest_id(self, backend: str, scorer: Scorer):
        """Keys and queries of few values: all sums are exact, so that all backends see the same ties."""
        geometry = GEOMETRIES[2]
        case = make_case(geometry, scorer, np.array([8192, 5000, 7777]), 6, levels=1)
        if scorer is Scorer.INFLLM:
            # A softmax of equal logits is flat.
            case.queries[:] = 0
        check_ids(case, backend)
        if scorer is Scorer.INFLLM:
            expected = exact_choice(np.zeros((3, 2, geometry.blocks)), case.query_block, case.num_selected, geometry)
            np.testing.assert_array_equal(found_ids(case, backend), expected)

    def test_the_choice_from_given_scores(self, backend: str):
        """Ties, infinities, signed zeros, one level, and every number of places."""
        rng = np.random.default_rng(8)
        for geometry in (GEOMETRIES[0], GEOMETRIES[2]):
            shape = (geometry.batch, geometry.kv_heads, geometry.blocks)
            normal = rng.standard_normal(shape).astype(np.float32)
            contents = [
                normal,
                np.round(normal),
                np.full(shape, 0.5),
                np.where(normal > 0, 0.0, -0.0),
                np.where(normal > 1, np.inf, normal),
                np.where(normal > 0, -np.inf, normal),
                np.full(shape, -np.inf),
                np.full(shape, np.inf),
                normal * 1e-30,
                normal * 1e38,
                -np.abs(normal),
            ]
            for scores in contents:
                scores = scores.astype(np.float32)
                query_block = rng.integers(-1, geometry.blocks, geometry.batch).astype(np.int32)
                query_block[0] = geometry.blocks - 1
                num_selected = rng.integers(0, geometry.width + 1, geometry.batch).astype(np.int32)
                num_selected[0] = geometry.width
                operands = [jnp.asarray(a) for a in (scores, query_block, num_selected)]
                found = np.asarray(run_choice(*operands, geometry=geometry, backend=backend))
                np.testing.assert_array_equal(found, exact_choice(scores, query_block, num_selected, geometry))

    def test_one_valid_block_and_more_places_than_blocks(self, backend: str):
        geometry = GEOMETRIES[3]
        case = make_case(geometry, Scorer.FORECAST, np.array([40, 200, 576]), 9)
        case.num_selected[:] = geometry.width
        found = found_ids(case, backend)
        for b, count in enumerate((1, 4, 9)):
            np.testing.assert_array_equal(found[b, :, :count], np.broadcast_to(np.arange(count), (2, count)))
            assert (found[b, :, count:] == -1).all()

    def test_overflowing_scores_do_not_push_out_forced_blocks(self, backend: str):
        geometry = GEOMETRIES[0]
        case = make_case(geometry, Scorer.FORECAST, np.full(3, 64 * 40), 10)
        case.pages[:] = np.where(np.isnan(case.pages), np.nan, np.abs(case.pages) * 2.0**100)
        case.queries[:] = np.abs(case.queries) * 2.0**100
        case.num_selected[:] = 6
        found = found_ids(case, backend)
        assert (found[..., :6] == [0, 1, 2, 37, 38, 39]).all()
        assert (found[..., 6:] == -1).all()

    @pytest.mark.parametrize("scorer", Scorer)
    def test_nan_queries_stay_in_their_lane(self, backend: str, scorer: Scorer):
        geometry = GEOMETRIES[0]
        case = make_case(geometry, scorer, np.array([2000, 2100, 2200]), 11)
        expected = found_ids(case, backend)
        case.queries[1] = np.nan
        found = found_ids(case, backend)
        np.testing.assert_array_equal(found[[0, 2]], expected[[0, 2]])
        for row in found[1]:
            chosen = row[row >= 0]
            assert len(chosen) == min(case.num_selected[1], case.query_block[1] + 1)
            assert np.all(np.diff(chosen) > 0)
            assert chosen[-1] <= case.query_block[1]

    @pytest.mark.parametrize("scorer", Scorer)
    def test_a_lane_alone_selects_as_in_the_batch(self, backend: str, scorer: Scorer):
        """The scores too are equal, bit for bit."""
        geometry = GEOMETRIES[0]
        case = make_case(geometry, scorer, np.array([2500, 1000, 64]), 12)
        scores, ids = found_scores(case, backend), found_ids(case, backend)
        idle = make_case(geometry, scorer, np.array([0, 0, 0]), 13)
        for name in ("queries", "block_table", "visible", "query_block", "num_selected"):
            getattr(idle, name)[2] = getattr(case, name)[0]
        idle.pages[:] = case.pages
        np.testing.assert_array_equal(found_scores(idle, backend)[2], scores[0])
        np.testing.assert_array_equal(found_ids(idle, backend)[2], ids[0])


class TestGolden:
    """The reference's own decode step: two sequences of 2048 keys, whose query is in the 33rd block."""

    @pytest.fixture(params=BACKENDS)
    def backend(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.mark.parametrize(("kind", "scorer"), [("g16", Scorer.INFLLM), ("sparda", Scorer.FORECAST)])
    def test_choice_and_scores(self, backend: str, kind: str, scorer: Scorer):
        step = load_golden("decode")
        windows, blocks, geometry = 127, 33, Geometry(batch=2, group=16, head_dim=128, blocks=33, width=6)
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
        scores = found_scores(case, backend)
        compared = np.isfinite(pooled) & np.isfinite(scores)
        assert compared.mean() > 0.8
        np.testing.assert_allclose(scores[compared], pooled[compared], rtol=2**-7, atol=1e-5)
        ids = found_ids(case, backend).swapaxes(0, 1)
        pooled, query_block = pooled.swapaxes(0, 1), np.full(2, 32)
        assert allowed_by_ties(pooled, ids, query_block, 6).all()
        settled = ~tie_rows(pooled, 6)
        assert settled.any()
        np.testing.assert_array_equal(ids[settled], np.sort(step[f"topk_{kind}"], axis=-1)[settled])


@pytest.mark.gpu
class TestCompiled(TestSelectBlocksDecode):
    """The same on a GPU, and at the lengths of 128K contexts."""

    @pytest.fixture(params=KERNELS)
    def backend(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.mark.parametrize("scorer", Scorer)
    @pytest.mark.parametrize("geometry", LONG, ids=lambda g: f"g{g.group}d{g.head_dim}")
    def test_long_contexts(self, backend: str, geometry: Geometry, scorer: Scorer):
        for seed, levels in ((0, 0), (1, 2)):
            case = make_case(geometry, scorer, np.array([64 * geometry.blocks, 100_003, 70_000]), seed, levels=levels)
            check_scores(case, backend)
            check_ids(case, backend)


def test_forecast_takes_one_query_per_head():
    case = make_case(GEOMETRIES[0], Scorer.INFLLM, np.array([100, 100, 100]), 0)
    with pytest.raises(ValueError, match="scorer=forecast takes one query per KV head, not a group of 16: use infllm"):
        select_blocks_decode(*case.operands, scorer=Scorer.FORECAST, **case.geometry.limits)
