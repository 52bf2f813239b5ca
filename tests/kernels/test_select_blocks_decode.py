"""Block selection in decode: the definition and the Triton kernels."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.block_selection import Scorer, select_blocks_decode, select_blocks_with_scratch
from tests.kernels.select_cases import GEOMETRIES, make_case
from tests.kernels.select_suite import SelectBlocksCompiled, SelectBlocksDecode


class TestReference(SelectBlocksDecode):
    backend = "reference"


class TestTriton(SelectBlocksDecode):
    backend = "triton"


@pytest.mark.gpu
class TestTritonCompiled(SelectBlocksCompiled):
    backend = "triton"


def test_forecast_takes_one_query_per_head():
    case = make_case(GEOMETRIES[0], Scorer.INFLLM, np.array([100, 100, 100]), 0)
    with pytest.raises(ValueError, match="scorer=forecast takes one query per KV head, not a group of 16: use infllm"):
        select_blocks_decode(*case.operands, scorer=Scorer.FORECAST, **case.geometry.limits)


def test_a_scorer_may_be_given_by_name():
    """As a backend may; a name that is unknown is no scorer."""
    case = make_case(GEOMETRIES[0], Scorer.FORECAST, np.array([2500, 1000, 64]), 1)
    by_name: Any = inspect.unwrap(select_blocks_with_scratch)
    found, _ = by_name(*case.operands, scorer="forecast", **case.geometry.limits)
    expected = select_blocks_decode(*case.operands, scorer=Scorer.FORECAST, **case.geometry.limits)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    with pytest.raises(ValueError, match="scorer='cosine' is unknown: use one of forecast, infllm"):
        by_name(*case.operands, scorer="cosine", **case.geometry.limits)


@pytest.mark.parametrize("scorer", list(Scorer))
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_scratch_passed_on_changes_nothing(backend: str, scorer: Scorer):
    """What it holds does not matter: NaN as well as the scores of other, longer sequences."""
    geometry = GEOMETRIES[0]
    case = make_case(geometry, scorer, np.array([2500, 1000, 64]), 1)
    shorter = make_case(geometry, scorer, np.array([130, 64, 2000]), 2)
    options = {"scorer": scorer, "backend": backend, **geometry.limits}
    first, scratch = select_blocks_with_scratch(*case.operands, **options)
    second, scratch = select_blocks_with_scratch(*shorter.operands, scratch=scratch, **options)
    poison = jnp.full_like(scratch, jnp.nan)
    third, _ = select_blocks_with_scratch(*case.operands, scratch=poison, **options)
    for found, of in ((first, case), (second, shorter), (third, case)):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(select_blocks_decode(*of.operands, **options)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": np.zeros((2, 2, 1, 64), np.float16)}, "queries are float16 and pages float32"),
        ({"pages": np.zeros((9, 1, 4, 64), np.float32)}, "has kv_heads=1, and queries has kv_heads=2"),
        ({"pages": np.zeros((9, 2, 3, 64), np.float32)}, "must have 4 compressed keys"),
        ({"block_table": np.zeros((3, 4), np.int32)}, r"block_table\[3, 4\] has batch=3, and queries has batch=2"),
        ({"block_table": np.zeros((2, 0), np.int32)}, "blocks must be at least 1"),
        ({"visible": np.zeros(1, np.int32)}, r"visible\[1\] has batch=1, and queries has batch=2"),
        ({"num_selected": np.zeros(2, np.float32)}, "num_selected is float32: it must be int32"),
        ({"width": 0}, "width=0 must be at least 1"),
        ({"local_blocks": -1}, "local_blocks=-1 must be at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, int | np.ndarray], message: str):
    lanes = np.zeros(2, np.int32)
    arguments: dict[str, int | np.ndarray] = {
        "queries": np.zeros((2, 2, 1, 64), np.float32),
        "pages": np.zeros((9, 2, 4, 64), np.float32),
        "block_table": np.zeros((2, 4), np.int32),
        "visible": lanes,
        "query_block": lanes,
        "num_selected": lanes,
        "init_blocks": 1,
        "local_blocks": 1,
        "width": 4,
    }
    arguments |= change
    operands: dict[str, Any] = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(select_blocks_with_scratch)(**operands, scorer=Scorer.FORECAST)
