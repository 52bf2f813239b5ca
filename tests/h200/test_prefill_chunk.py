"""A chunk of 4096 tokens over a cache of 128K, compiled for an H200: little memory, and the cache updated in place."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sparda_jax.budget import Demand, prefill_workspace
from sparda_jax.cache.chunk_store import ChunkStore, written_by
from sparda_jax.cache.host_dtype import KvHostDtype, host_record
from sparda_jax.cache.kv import KVCache
from sparda_jax.decode_plan import GPU_OPTIONS
from sparda_jax.forward import forward
from sparda_jax.model import abstract_decoder
from sparda_jax.selection import Mode
from sparda_jax.shapes import SHAPES
from tests.h200.harness import compile_for_h200, needs_compiler, pinned_host

pytestmark = needs_compiler
CONFIG = dataclasses.replace(SHAPES["minicpm4.1-8b"], num_layers=6)
CHUNK, LENGTH = 4096, 131072


@pytest.mark.parametrize(
    "mode", [Mode.SPARDA, *(pytest.param(m, marks=pytest.mark.slow) for m in (Mode.SPARSE, Mode.RANDOM, Mode.DENSE))]
)
def test_a_long_chunk_takes_little_memory(mode: Mode) -> None:
    has_forecast = mode.needs_forecast
    graphdef, weights = nnx.split(abstract_decoder(CONFIG, has_forecast=has_forecast, dtype=jnp.bfloat16))
    cache = jax.eval_shape(lambda: KVCache.empty(CONFIG, 1, LENGTH, jnp.bfloat16))

    def prefill(weights, cache, tokens, num_new, sparse):
        model = nnx.merge(graphdef, weights)
        ways = {"mode": mode, "decode": False, "max_len": LENGTH}
        x, cache, trace = forward(model, cache, tokens, num_new, sparse, **ways)
        return model.logits(x[:, -1]), cache, trace.blocks_read

    one, tokens = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, CHUNK), jnp.int32)
    sparse = jax.ShapeDtypeStruct((1,), bool)
    compiled = compile_for_h200(prefill, weights, cache, tokens, one, sparse, donate_argnums=1)
    stats = compiled.memory_stats
    cached = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert stats.alias_size_in_bytes >= cached
    assert compiled.copies(CONFIG.num_kv_heads * CONFIG.head_dim * LENGTH) == []
    # No array has a place for each pair of a new token and a cached one.
    shapes = re.findall(r"\w+\[([\d,]+)\]", compiled.hlo)
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest < CHUNK * LENGTH
    assert {kernel.name: kernel.spilled for kernel in compiled.kernels if kernel.spilled} == {}
    demand = Demand(
        config=CONFIG,
        dtype=jnp.dtype(jnp.bfloat16),
        mode=mode,
        has_forecast=has_forecast,
        max_model_len=LENGTH,
        batch=1,
    )
    assert stats.temp_size_in_bytes <= prefill_workspace(demand) <= 1.2 * stats.temp_size_in_bytes
    assert prefill_workspace(demand) < 1.5e9


@pytest.mark.parametrize("kv_host_dtype", [KvHostDtype.AUTO, pytest.param(KvHostDtype.INT8, marks=pytest.mark.slow)])
def test_finished_blocks_are_copied_beside_the_chunk(kv_host_dtype: KvHostDtype) -> None:
    """One graph in which a layer's records wait for its keys and values, and nothing waits for them."""
    record = host_record((2 * CONFIG.sparse.block_size, CONFIG.head_dim), jnp.dtype(jnp.bfloat16), kv_host_dtype)
    layers, pool_shape = 2, (64 * CONFIG.num_kv_heads, *record.shape)
    config = dataclasses.replace(CONFIG, num_layers=layers)
    graphdef, weights = nnx.split(abstract_decoder(config, has_forecast=True, dtype=jnp.bfloat16))

    def chunk(weights, pools, cache, tokens, num_new, block_ids):
        where = ChunkStore(block_ids=block_ids, start=cache.lengths[0], num_new=num_new[0])
        written, on_layer = written_by(pools, where, chunk=CHUNK, block_size=config.sparse.block_size)
        sparse = jnp.ones(1, bool)
        ways = {"mode": Mode.SPARDA, "decode": False, "max_len": LENGTH, "on_layer": on_layer}
        x, cache, _ = forward(nnx.merge(graphdef, weights), cache, tokens, num_new, sparse, **ways)
        return tuple(written), cache, x

    program = compile_for_h200(
        chunk,
        weights,
        tuple(pinned_host(pool_shape, record.dtype) for _ in range(layers)),
        jax.eval_shape(lambda: KVCache.empty(config, 1, LENGTH, jnp.bfloat16)),
        jax.ShapeDtypeStruct((1, CHUNK), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((LENGTH // config.sparse.block_size,), jnp.int32),
        donate_argnums=(1, 2),
        flags=GPU_OPTIONS,
    )
    assert program.launches == ["kCommandBuffer"]
    assert program.copies(1 << 20) == []
    stats = program.memory_stats
    assert (
        stats.host_alias_size_in_bytes
        == stats.host_output_size_in_bytes
        == layers * math.prod(pool_shape) * record.dtype.itemsize
    )
    assert stats.host_temp_size_in_bytes == 0
    # Attention and the copies are Mosaic's, custom calls; only a copy has nothing behind it.
    calls = re.findall(r"^ +\d+: kCustomCall +\[prev=\d+[^|]*\| (next|sink)", program.thunks, re.MULTILINE)
    assert sorted(calls) == ["next"] * layers + ["sink"] * layers
