"""Block selection in decode on contents drawn by hypothesis; one geometry, so that each kernel is interpreted once."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sparda_jax.pallas_kernels.block_selection import Scorer
from tests.kernels.select_cases import GEOMETRIES, exact_choice, exact_scores, make_case, split_parts
from tests.kernels.select_suite import check, run_choice

GEOMETRY = GEOMETRIES[0]
SHAPE = (GEOMETRY.batch, GEOMETRY.kv_heads, GEOMETRY.blocks)
LEVELS = st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 1e-30, 1.0, np.inf])
SCORES = arrays.arrays(np.float32, SHAPE, elements=LEVELS | st.floats(width=32, allow_nan=False, allow_subnormal=False))


def per_lane(low: int, high: int) -> st.SearchStrategy[np.ndarray]:
    return arrays.arrays(np.int32, GEOMETRY.batch, elements=st.integers(low, high))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@given(scores=SCORES, query_block=per_lane(-1, GEOMETRY.blocks - 1), num_selected=per_lane(0, GEOMETRY.width))
def test_the_choice_is_that_of_a_stable_sort(
    backend: str, scores: np.ndarray, query_block: np.ndarray, num_selected: np.ndarray
):
    parts = scores if backend == "reference" else split_parts(scores, backend)
    visible = np.full(GEOMETRY.batch, 4 * GEOMETRY.blocks - 1, np.int32)
    operands = (jnp.asarray(a) for a in (parts, visible, query_block, num_selected))
    found = np.asarray(run_choice(*operands, geometry=GEOMETRY, backend=backend))
    np.testing.assert_array_equal(found, exact_choice(scores, query_block, num_selected, GEOMETRY))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@settings(max_examples=15)
@given(lengths=per_lane(0, 64 * GEOMETRY.blocks), seed=st.integers(0, 1000), levels=st.integers(0, 2))
def test_any_lengths(backend: str, lengths: np.ndarray, seed: int, levels: int):
    """With few levels the sums are exact, and so is the choice."""
    case = make_case(GEOMETRY, Scorer.FORECAST, lengths, seed, levels=levels)
    found = check(case, backend)
    if levels:
        expected = exact_choice(exact_scores(case)[0], case.query_block, case.num_selected, GEOMETRY)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@settings(max_examples=10)
@given(lengths=per_lane(0, 64 * GEOMETRY.blocks), seed=st.integers(0, 1000), scale=st.sampled_from([0.0, 1.0, 30.0]))
def test_any_lengths_with_infllm(backend: str, lengths: np.ndarray, seed: int, scale: float):
    """From a flat softmax to one that is all in one window."""
    case = make_case(GEOMETRY, Scorer.INFLLM, lengths, seed)
    queries = np.asarray(jnp.asarray(case.queries * scale, GEOMETRY.dtype), np.float32)
    check(dataclasses.replace(case, queries=queries), backend)
