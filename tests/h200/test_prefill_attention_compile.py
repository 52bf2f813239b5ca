"""Block-sparse prefill attention compiled for an H200: registers that hold everything, no copies of operands."""

import functools

import jax
import jax.numpy as jnp
import pytest

from sparda_jax.pallas_kernels.backend import Backend
from sparda_jax.pallas_kernels.block_sparse_attention import block_sparse_attention_prefill
from tests.h200.harness import compile_for_h200, needs_compiler

pytestmark = needs_compiler

# Heads, KV heads, head_dim and capacity: MiniCPM4.1-8B at 128K, a group that fills whole rows, one that doesn't.
SHAPES = {"8b": (32, 2, 128, 131072), "small": (8, 1, 64, 16384), "bundled": (6, 2, 64, 16384)}


@pytest.mark.parametrize("backend", [Backend.TRITON, Backend.MOSAIC_GPU])
@pytest.mark.parametrize("shape", [pytest.param(x, marks=[pytest.mark.slow] if x == "small" else []) for x in SHAPES])
def test_kernels_fit_an_h200(shape: str, backend: Backend) -> None:
    heads, kv_heads, head_dim, capacity = SHAPES[shape]
    batch, q_len = 2, 4096
    cache = jax.ShapeDtypeStruct((batch, kv_heads, capacity, head_dim), jnp.bfloat16)
    compiled = compile_for_h200(
        functools.partial(block_sparse_attention_prefill, block_size=64, backend=backend),
        jax.ShapeDtypeStruct((batch, q_len, heads, head_dim), jnp.bfloat16),
        cache,
        cache,
        jax.ShapeDtypeStruct((batch, kv_heads, q_len, capacity // 2048), jnp.uint32),
        *[jax.ShapeDtypeStruct((batch,), jnp.int32)] * 2,
    )
    kernels = [kernel for kernel in compiled.kernels if kernel.name.startswith("block_sparse_attention")]
    assert {kernel.name: kernel.spilled for kernel in kernels} == {kernels[0].name: 0}
    assert kernels[0].name.endswith("_mosaic_gpu_kernel") == (backend is Backend.MOSAIC_GPU)
    if shape != "bundled":
        assert len(compiled.kernels) == 1
        assert compiled.copies(1) == []
        assert compiled.memory_stats.temp_size_in_bytes == 0
