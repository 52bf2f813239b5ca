"""The rule that chooses a backend, on made-up devices, and what the interpreters need to know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparda_jax.pallas_kernels.backend import (
    H200,
    MEASURED_BEST,
    Backend,
    Target,
    choose_backend,
    interpreting,
    mosaic_interpreter,
    target,
)


def gpu(kind: str) -> Target:
    return Target(platform="gpu", device_kind=f"NVIDIA {kind}")


CPU = Target(platform="cpu", device_kind="cpu")
HOPPER = [gpu(kind) for kind in ("H200", "H100 80GB HBM3", "H100 PCIe", "GH200 480GB", "H20", "H800")]
OTHERS = [gpu(kind) for kind in ("A100-SXM4-80GB", "B200", "L40S", "GeForce RTX 4090", "GB200")]


@pytest.mark.parametrize("operation", MEASURED_BEST)
def test_platform_decides(operation: str) -> None:
    assert choose_backend(None, operation, device=CPU) is Backend.REFERENCE
    for device in HOPPER:
        assert choose_backend(None, operation, device=device) is MEASURED_BEST[operation]
    for device in OTHERS:
        assert choose_backend(None, operation, device=device) is Backend.TRITON


def test_operation_without_kernels_is_its_reference() -> None:
    assert choose_backend(None, "compressed_keys", device=HOPPER[0]) is Backend.REFERENCE


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("device", [CPU, HOPPER[0]])
def test_named_backend_is_taken(backend: Backend, device: Target) -> None:
    assert choose_backend(backend.value, "residency", device=device) is backend


def test_without_the_best_the_next_available_one_runs() -> None:
    without_mosaic = (Backend.REFERENCE, Backend.TRITON)
    assert choose_backend(None, "sparse_attention", available=without_mosaic, device=HOPPER[0]) is Backend.TRITON
    assert choose_backend(None, "residency", available=[Backend.REFERENCE], device=OTHERS[0]) is Backend.REFERENCE


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend='cuda' of residency .* reference, triton, mosaic_gpu"):
        choose_backend("cuda", "residency", device=CPU)


def test_unavailable_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend='mosaic_gpu' of record_copy .* reference, triton\."):
        choose_backend("mosaic_gpu", "record_copy", available=(Backend.REFERENCE, Backend.TRITON), device=HOPPER[0])


@pytest.mark.parametrize("device", OTHERS)
def test_mosaic_is_refused_on_another_gpu(device: Target) -> None:
    with pytest.raises(ValueError, match=f"needs a Hopper GPU, and this is {device.device_kind}"):
        choose_backend("mosaic_gpu", "residency", device=device)


def test_target_is_the_mesh_and_then_the_first_device() -> None:
    assert target() == CPU
    assert interpreting()
    with jax.sharding.use_abstract_mesh(H200):
        assert target().device_kind == "NVIDIA H200"
        assert not interpreting()
        assert choose_backend(None, "sparse_attention") is MEASURED_BEST["sparse_attention"]


def test_trace_for_one_target_is_not_used_for_another() -> None:
    seen = []

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        seen.append(interpreting())
        return x

    x = jnp.zeros(2)
    jax.eval_shape(inner, x)
    with jax.sharding.use_abstract_mesh(H200):
        jax.eval_shape(inner, x)
    assert seen == [True, False]


def test_mosaic_kernel_is_interpreted_inside_a_program() -> None:
    def body(x_ref, o_ref, smem, arrived) -> None:
        row = lax.axis_index("row")
        plgpu.copy_gmem_to_smem(x_ref.at[row], smem, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(smem, o_ref.at[o_ref.shape[0] - 1 - row])
        plgpu.wait_smem_to_gmem(0)

    @jax.jit
    def reversed_rows_plus_one(x: jax.Array) -> jax.Array:
        with mosaic_interpreter():
            kernel = plgpu.kernel(
                body,
                out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
                grid=x.shape[:1],
                grid_names=("row",),
                scratch_types=[plgpu.SMEM(x.shape[1:], x.dtype), plgpu.Barrier()],
            )
            return kernel(x) + 1

    x = np.arange(3 * 128, dtype=np.float32).reshape(3, 128)
    np.testing.assert_array_equal(reversed_rows_plus_one(x), x[::-1] + 1)
