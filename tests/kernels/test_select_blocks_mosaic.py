"""Block selection in decode: the Mosaic kernels."""

import jax
import jax.numpy as jnp
import pytest

from sparda_jax.pallas_kernels.block_selection.mosaic_gpu import top_blocks
from tests.kernels.select_suite import SelectBlocksCompiled, SelectBlocksDecode


# Nothing chooses these kernels (MEASURED_BEST has Triton's), and interpreting them takes minutes.
@pytest.mark.slow
class TestMosaic(SelectBlocksDecode):
    backend = "mosaic_gpu"
    seeds = 1


@pytest.mark.gpu
class TestMosaicCompiled(SelectBlocksCompiled):
    backend = "mosaic_gpu"


@pytest.mark.parametrize(
    ("padded", "width", "message"),
    [(1056, 6, "width=6 is not a multiple of 4"), (2**15 + 32, 8, "32768 blocks are too many")],
)
def test_limits_of_the_top_k(padded: int, width: int, message: str):
    parts, numbers = jax.ShapeDtypeStruct((1, 2, 2, padded), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *a: top_blocks(*a, init_blocks=1, local_blocks=2, width=width), parts, *3 * [numbers])
