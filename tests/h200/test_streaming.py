"""Streamed dense decode, compiled for an H200: each layer's copy runs beside the layer before, through two buffers."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sparda_jax.cache.state import empty_state
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.lane_step import state_first, step_and_sample
from sparda_jax.model import abstract_decoder
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.selection import Mode
from tests.h200.harness import Compiled, compile_for_h200, needs_compiler, pinned_host
from tests.h200.test_decode_step import CONFIG, LANES, SHAPE

pytestmark = needs_compiler
LAYERS = 4
STREAMED = dataclasses.replace(CONFIG, num_layers=LAYERS)
FEW_SLOTS = dataclasses.replace(SHAPE, slots_per_lane=4)
POOL = (SHAPE.num_blocks * CONFIG.num_kv_heads, 2 * CONFIG.sparse.block_size, CONFIG.head_dim)
POOL_BYTES, RECORD_BYTES = 2 * math.prod(POOL), 2 * math.prod(POOL[1:])
SLOT_BYTES = LANES * FEW_SLOTS.slots_per_lane * CONFIG.num_kv_heads * RECORD_BYTES


@functools.cache
def compiled() -> Compiled:
    plan = DecodePlan(mode=Mode.DENSE, fetch=Fetch.STREAM)
    graphdef, weights = nnx.split(abstract_decoder(STREAMED, has_forecast=False, dtype=jnp.bfloat16))
    state = jax.eval_shape(lambda: empty_state(STREAMED, FEW_SLOTS, jnp.bfloat16))
    pools = tuple(pinned_host(POOL, jnp.bfloat16) for _ in range(LAYERS))
    ids = jax.ShapeDtypeStruct((LANES,), jnp.int32)
    sampling = jax.eval_shape(lambda: SamplingState.of([SamplingParams(seed=1)] * LANES))
    step = state_first(functools.partial(step_and_sample, graphdef, plan))
    flags = plan.compiler_options
    return compile_for_h200(step, weights, state, pools, ids, ids, sampling, flags=flags, donate_argnums=1)


@pytest.mark.slow
def test_a_layer_computes_between_the_start_and_the_end_of_the_next_copy() -> None:
    program = compiled()
    beside = ["kAsyncStart", "kCommandBuffer", "kAsyncDone"]
    assert program.launches == [*beside * (LAYERS - 1), "kCommandBuffer"]
    graphs = re.split(r"^\d+: kCommandBuffer", program.thunks, flags=re.MULTILINE)[1:]
    # Each graph holds the attention of one layer, with a Mosaic kernel or two; layer 0's also the fetch of nothing.
    first, *others = [len(re.findall(r"^ +\d+: kCustomCall", graph, re.MULTILINE)) for graph in graphs]
    assert others == [first - 1] * (LAYERS - 1)
    assert first > 1


def test_two_layers_of_records_are_there_at_a_time() -> None:
    program = compiled()
    stats = program.memory_stats
    assert 0 < stats.temp_size_in_bytes - 2 * POOL_BYTES < 4 << 20
    assert stats.host_temp_size_in_bytes == 0
    assert stats.host_output_size_in_bytes == 0
    # The pools come to the device, once each but for layer 0's, and neither slots nor pages nor what came are copied.
    large = program.copies(SLOT_BYTES)
    assert len(large) == LAYERS - 1
    assert all("copy-start(" in copy and "S(5)" in copy for copy in large)
    assert stats.alias_size_in_bytes > LANES * SHAPE.max_blocks * CONFIG.num_kv_heads * RECORD_BYTES
    assert [kernel for kernel in program.kernels if kernel.spilled] == []
