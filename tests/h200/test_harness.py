"""The harness itself: it has to see what the tests that use it assert the absence of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt

from tests.h200.harness import compile_for_h200, needs_compiler, pinned_host

pytestmark = needs_compiler
ROWS = jax.ShapeDtypeStruct((4, 256), jnp.float32)
MEGABYTE = 1 << 20


def copy_rows(x: jax.Array) -> jax.Array:
    """A Mosaic kernel: each row through shared memory."""

    def body(x_ref, o_ref, smem, arrived) -> None:
        row = lax.axis_index("row")
        plgpu.copy_gmem_to_smem(x_ref.at[row], smem, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(smem, o_ref.at[row])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=x.shape[:1],
        grid_names=("row",),
        scratch_types=[plgpu.SMEM(x.shape[1:], x.dtype), plgpu.Barrier()],
    )(x)


def matmul(a: jax.Array, b: jax.Array, *, num_warps: int) -> jax.Array:
    """A Triton kernel of one program."""

    def product(a_ref, b_ref, o_ref) -> None:
        o_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    return pl.pallas_call(
        product,
        out_shape=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
    )(a, b)


def square(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, size), jnp.bfloat16)


def test_triton_kernel_that_spills_is_seen() -> None:
    (small,) = compile_for_h200(lambda a, b: matmul(a, b, num_warps=4), square(64), square(64)).kernels
    (large,) = compile_for_h200(lambda a, b: matmul(a, b, num_warps=2), square(128), square(128)).kernels
    assert small.name == large.name == "product"
    assert 16 < small.registers <= 255
    assert small.spilled == 0
    assert large.spilled > 1000


@pytest.mark.parametrize("time", ["first", "second"])
def test_mosaic_kernel_is_seen_each_time(time: str) -> None:
    """Mosaic would compile it only once in a process."""
    compiled = compile_for_h200(copy_rows, ROWS)
    assert [kernel.name for kernel in compiled.kernels] == ["body_mosaic_gpu_kernel"], time
    assert compiled.kernels[0].spilled == 0


def test_program_of_many_kernels_is_one_graph_unless_something_is_left_out_of_it() -> None:
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = copy_rows(jnp.roll(x, 1, 0))
        return x

    assert compile_for_h200(chain, ROWS).launches == ["kCommandBuffer"]
    without = compile_for_h200(chain, ROWS, flags={"xla_gpu_enable_command_buffer": ""})
    assert "kCommandBuffer" not in without.launches
    assert len(without.launches) >= 8


def test_copies_and_donation() -> None:
    def overwrite(x: jax.Array, row: jax.Array) -> jax.Array:
        return x.at[0].set(row)

    args = jax.ShapeDtypeStruct((1024, 256), jnp.float32), jax.ShapeDtypeStruct((256,), jnp.float32)
    kept = compile_for_h200(overwrite, *args)
    donated = compile_for_h200(overwrite, *args, donate_argnums=0)
    assert len(kept.copies(MEGABYTE)) == 1
    assert not kept.copies(MEGABYTE + 1)
    assert not donated.copies(1024)
    assert (kept.memory_stats.alias_size_in_bytes, donated.memory_stats.alias_size_in_bytes) == (0, MEGABYTE)


def test_host_memory_stays_host_memory() -> None:
    def fetch(pool: jax.Array) -> jax.Array:
        return jax.device_put(pool, jax.memory.Space.Device) + 1

    compiled = compile_for_h200(fetch, pinned_host((1024, 256), np.float32))
    assert compiled.memory_stats.host_argument_size_in_bytes == MEGABYTE
    assert len(compiled.copies(MEGABYTE)) == 1


def test_cpu_remains_the_only_device() -> None:
    compile_for_h200(lambda x: x + 1, ROWS)
    assert {device.platform for device in jax.devices()} == {"cpu"}
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0
