"""Block selection in decode: the Mosaic kernels."""

import pytest

from tests.kernels.select_suite import SelectBlocksCompiled, SelectBlocksDecode


class TestMosaic(SelectBlocksDecode):
    backend = "mosaic_gpu"
    seeds = 1


@pytest.mark.gpu
class TestMosaicCompiled(SelectBlocksCompiled):
    backend = "mosaic_gpu"
