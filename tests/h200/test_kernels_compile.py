"""Every kernel is compiled for an H200: registers that hold everything, updates in place, no copies."""

import functools
import itertools
from typing import Any

import jax
import pytest

from sparda_jax.pallas_kernels.backend import Backend
from tests.h200.cases import GEOMETRIES, OPERATIONS, TRITON_OPERATIONS
from tests.h200.harness import compile_for_h200, needs_compiler

pytestmark = needs_compiler


def _cases() -> list[Any]:
    """All kernels at all sizes; the short run leaves out batch 1, and those that nothing chooses but at one size."""
    found = []
    for operation, geometry in itertools.product(OPERATIONS | TRITON_OPERATIONS, GEOMETRIES):
        for backend in (Backend.TRITON, Backend.MOSAIC_GPU) if operation in OPERATIONS else (Backend.TRITON,):
            # Block selection is Triton's on every GPU (MEASURED_BEST).
            unused = operation.startswith("select") and backend is Backend.MOSAIC_GPU and geometry != "8b-16"
            marks = [pytest.mark.slow] if unused or geometry == "8b-1" else []
            found.append(
                pytest.param(operation, geometry, backend, marks=marks, id=f"{operation}-{backend}-{geometry}")
            )
    return found


@pytest.mark.parametrize(("operation", "geometry", "backend"), _cases())
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
