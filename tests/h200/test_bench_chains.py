"""What the kernel benchmark times, compiled for an H200: one graph of the calls' kernels and one more."""

import re

import pytest

from sparda_jax.bench._kernel_cases import Size
from sparda_jax.bench._timing import COMPILER_OPTIONS
from sparda_jax.bench.kernels import BENCHMARKS
from sparda_jax.pallas_kernels.backend import Backend
from tests.h200.harness import compile_for_h200, needs_compiler

pytestmark = needs_compiler
SIZE = Size(batch=1, context=64 * 256, calls=16, inputs=5, pool_bytes=1 << 20)


@pytest.mark.parametrize(
    ("name", "backend", "kernels"),
    [
        ("select+plan forecast", Backend.TRITON, 3),
        pytest.param("attention", Backend.MOSAIC_GPU, 2, marks=pytest.mark.slow),
        ("fetch", Backend.TRITON, 1),
        ("write back", Backend.MOSAIC_GPU, 1),
    ],
)
def test_chain_is_one_graph_of_its_calls(name: str, backend: Backend, kernels: int) -> None:
    chain = BENCHMARKS[name].chain(SIZE, backend)
    args = chain.state, chain.shared, tuple(chain.inputs)
    compiled = compile_for_h200(chain.calls, *args, flags=COMPILER_OPTIONS, donate_argnums=0)
    assert compiled.launches == ["kCommandBuffer"]
    # The last one takes a number of every call's result, or, where calls have none but the state, makes a zero.
    assert len(re.findall(r"^ +\d+: \w+", compiled.thunks, re.MULTILINE)) == kernels * SIZE.calls + 1
    assert not compiled.copies(16)
