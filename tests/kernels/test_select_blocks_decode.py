"""Block selection in decode: the definition and the Triton kernels."""

import numpy as np
import pytest

from sparda_jax.pallas_kernels.block_selection import Scorer, select_blocks_decode
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
