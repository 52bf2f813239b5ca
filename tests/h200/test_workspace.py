"""The planner's estimate of temporary arrays, against what XLA allots on an H200."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sparda_jax.budget import Demand, decode_workspace, prefill_workspace, scoring_workspace
from sparda_jax.cache.kv import KVCache
from sparda_jax.cache.state import empty_state
from sparda_jax.decode_plan import Fetch
from sparda_jax.forward import forward
from sparda_jax.generate import MAX_CHUNK_BYTES, PREFILL_CHUNKS
from sparda_jax.lane_step import step_and_sample
from sparda_jax.logprobs import SCORED_TOKENS
from sparda_jax.model import abstract_decoder
from sparda_jax.programs import score_rows
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.selection import Mode
from sparda_jax.shapes import SHAPES
from tests.h200.harness import compile_for_h200, needs_compiler, pinned_host

pytestmark = [needs_compiler, pytest.mark.slow]
CONFIG = dataclasses.replace(SHAPES["minicpm4.1-8b"], num_layers=2)


def demand(max_model_len: int, batch: int = 1, mode: Mode = Mode.SPARDA, fetch: Fetch = Fetch.AHEAD) -> Demand:
    return Demand(
        config=CONFIG,
        dtype=jnp.dtype(jnp.bfloat16),
        mode=mode,
        has_forecast=True,
        max_model_len=max_model_len,
        batch=batch,
        fetch=fetch,
    )


def temporary(fn, *args, **kwargs) -> int:
    return compile_for_h200(fn, *args, donate_argnums=1, **kwargs).memory_stats.temp_size_in_bytes


@pytest.mark.parametrize(("length", "chunk"), [(131072, 256), (16384, 1024)])
def test_plain_prefill(length: int, chunk: int) -> None:
    """The smallest chunk of a long prompt; the longest chunk whose scores stay below their bound."""
    assert chunk * length * CONFIG.num_heads * 4 in (2 * MAX_CHUNK_BYTES, MAX_CHUNK_BYTES)
    graphdef, weights = nnx.split(abstract_decoder(CONFIG, has_forecast=True, dtype=jnp.bfloat16))

    def prefill(weights, cache, tokens, num_new, sparse):
        model = nnx.merge(graphdef, weights)
        x, cache, _ = forward(model, cache, tokens, num_new, sparse, mode=Mode.RANDOM, decode=False, max_len=length)
        return model.logits(x[:, -1]), cache

    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jax.eval_shape(lambda: KVCache.empty(CONFIG, 1, length, jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((1, chunk), jnp.int32)
    found = temporary(prefill, weights, cache, tokens, one, jax.ShapeDtypeStruct((1,), bool))
    assert found <= prefill_workspace(demand(length, mode=Mode.RANDOM, fetch=Fetch.IN_TURN)) <= 1.1 * found


def test_scoring() -> None:
    """Never the logits of a whole chunk."""
    graphdef, weights = nnx.split(abstract_decoder(CONFIG, has_forecast=True, dtype=jnp.bfloat16))
    stream = jax.ShapeDtypeStruct((1, PREFILL_CHUNKS["gpu"][-1], CONFIG.hidden_size), jnp.bfloat16)
    place, targets = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((SCORED_TOKENS,), jnp.int32)
    score = functools.partial(score_rows, graphdef, rows=SCORED_TOKENS)
    found = compile_for_h200(score, weights, stream, place, place, targets).memory_stats.temp_size_in_bytes
    assert found <= scoring_workspace(demand(32768)) <= 1.2 * found


@pytest.mark.parametrize(("mode", "fetch"), [(Mode.SPARDA, Fetch.AHEAD), (Mode.DENSE, Fetch.STREAM)])
def test_decode(mode: Mode, fetch: Fetch) -> None:
    """Of three layers two are streamed, each into a buffer of its own."""
    batch, layers = 4, 3
    config = dataclasses.replace(CONFIG, num_layers=layers)
    wanted = dataclasses.replace(demand(32768, batch, mode, fetch), config=config)
    shape = wanted.shape(wanted.least_slots)
    graphdef, weights = nnx.split(abstract_decoder(config, has_forecast=True, dtype=jnp.bfloat16))
    state = jax.eval_shape(lambda: empty_state(config, shape, jnp.bfloat16))
    pools = (pinned_host((shape.num_blocks * config.num_kv_heads, 128, 128), jnp.bfloat16),) * layers
    ids = jax.ShapeDtypeStruct((batch,), jnp.int32)
    sampling = jax.eval_shape(lambda: SamplingState.of([SamplingParams(seed=1)] * batch))
    plan = wanted.decode_plan
    step = functools.partial(step_and_sample, graphdef, plan)
    found = temporary(step, weights, state, pools, ids, ids, sampling, flags=plan.compiler_options)
    assert found <= decode_workspace(wanted) <= 1.5 * found
