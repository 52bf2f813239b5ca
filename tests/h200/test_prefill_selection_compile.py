"""Block selection in prefill, compiled for an H200: no spills, one graph, and never all scores of a chunk."""

import functools

import jax
import jax.numpy as jnp
import pytest

from sparda_jax.pallas_kernels.block_selection import Scorer, select_blocks_prefill
from tests.h200.harness import compile_for_h200, needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("scorer", Scorer)
@pytest.mark.parametrize(
    ("batch", "q_len", "group", "head_dim", "blocks"),
    [
        pytest.param(1, 4096, 16, 128, 2048, id="8b-4k"),
        pytest.param(2, 2048, 16, 128, 2048, id="8b-two-2k", marks=pytest.mark.slow),
        pytest.param(1, 1000, 3, 64, 256, id="small"),
    ],
)
def test_prefill_selection_fits_an_h200(
    scorer: Scorer, batch: int, q_len: int, group: int, head_dim: int, blocks: int
) -> None:
    queries = (batch, q_len, 2, 1 if scorer is Scorer.FORECAST else group, head_dim)
    call = functools.partial(
        select_blocks_prefill, scorer=scorer, init_blocks=1, local_blocks=32, num_selected=96, backend="triton"
    )
    compiled = compile_for_h200(
        call,
        jax.ShapeDtypeStruct(queries, jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, 2, 4 * blocks, head_dim), jnp.bfloat16),
        *[jax.ShapeDtypeStruct((batch,), jnp.int32)] * 2,
    )

    assert {kernel.name: kernel.spilled for kernel in compiled.kernels if kernel.spilled} == {}
    assert {kernel.name for kernel in compiled.kernels} >= {"prefill_top_bits"}
    # XLA makes a graph of five launches and more.
    assert len(compiled.launches) < 5 or q_len < 4096
    # The scores of one piece, the bits of all, and InfLLM's denominators.
    bits, logs = batch * q_len * 2 * blocks // 8, 4 * batch * q_len * 2 * group
    assert compiled.memory_stats.temp_size_in_bytes <= (64 << 20) + 2 * bits + logs + 4096
