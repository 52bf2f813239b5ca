"""Every kernel is compiled for an H200: registers that hold everything, updates in place, no copies."""

import functools

import jax
import pytest

from sparda_jax.pallas_kernels.backend import Backend
from tests.h200.cases import GEOMETRIES, OPERATIONS, TRITON_OPERATIONS
from tests.h200.harness import compile_for_h200, needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(
    ("operation", "backend"),
    [(name, backend) for name in OPERATIONS for backend in (Backend.TRITON, Backend.MOSAIC_GPU)]
    + [(name, Backend.TRITON) for name in TRITON_OPERATIONS],
)
def test_kernels_fit_an_h200(operation: str, geometry: str, backend: Backend) -> None:
    case = (OPERATIONS | TRITON_OPERATIONS)[operation](GEOMETRIES[geometry])
    call = functools.partial(case.call, backend=backend)
    compiled = compile_for_h200(call, *case.args, donate_argnums=() if case.donated is None else case.donated)

    assert {kernel.name: kernel.spilled for kernel in compiled.kernels if kernel.spilled} == {}
    mosaic = [kernel.name.endswith("_mosaic_gpu_kernel") for kernel in compiled.kernels]
    assert mosaic
    assert all(mosaic) == any(mosaic) == (backend is Backend.MOSAIC_GPU), (
        "an operation runs kernels of one backend only"
    )

    stats = compiled.memory_stats
    assert stats.temp_size_in_bytes <= case.temporaries
    assert stats.host_temp_size_in_bytes == 0
    if case.donated is not None:
        assert compiled.copies(1) == []
        donated = jax.tree.leaves(case.args[case.donated])
        aliased = stats.alias_size_in_bytes + stats.host_alias_size_in_bytes
        assert aliased == sum(array.size * array.dtype.itemsize for array in donated)
