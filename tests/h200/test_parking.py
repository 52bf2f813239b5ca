"""The programs around waiting sequences and shared prefixes, compiled for an H200: in place, small beside a layer."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from sparda_jax.cache.admission import PartialBasis, admit, write_pages
from sparda_jax.cache.kv import KVCache
from sparda_jax.cache.parking import seat
from sparda_jax.cache.pool import _load_layer, _write_tail
from sparda_jax.cache.state import empty_state
from sparda_jax.selection import Mode
from tests.h200.harness import compile_for_h200, needs_compiler, pinned_host
from tests.h200.test_decode_step import CONFIG, LAYERS, SHAPE

pytestmark = needs_compiler
POOL = (SHAPE.num_blocks * CONFIG.num_kv_heads, 2 * CONFIG.sparse.block_size, CONFIG.head_dim)
RECORD_BYTES = 2 * math.prod(POOL[1:])
CAPACITY = 8192
INT = jax.ShapeDtypeStruct((), jnp.int32)


def ids(count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count,), jnp.int32)


def pools() -> tuple:
    return tuple(pinned_host(POOL, jnp.bfloat16) for _ in range(LAYERS))


def state_of(mode: Mode):
    channels = mode.partial_channels(CONFIG)
    return jax.eval_shape(lambda: empty_state(CONFIG, SHAPE, jnp.bfloat16, partial_channels=channels))


def bases_of(state) -> PartialBasis:
    row = jax.eval_shape(lambda layers: tuple(layer.partial_basis for layer in layers), state.layers)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), row)


def held(state) -> int:
    """Bytes of the state."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


@pytest.mark.parametrize("mode", [Mode.SPARDA, Mode.INFINIGEN])
def test_a_lane_is_given_in_place(mode: Mode) -> None:
    state = state_of(mode)
    program = compile_for_h200(
        functools.partial(seat, backend=None),
        state,
        pools(),
        INT,
        ids(SHAPE.max_blocks),
        INT,
        bases_of(state),
        donate_argnums=0,
    )
    assert program.copies(1 << 12) == []
    stats = program.memory_stats
    assert stats.alias_size_in_bytes >= 0.99 * held(state)
    assert stats.temp_size_in_bytes < 1 << 20
    assert stats.host_temp_size_in_bytes == stats.host_output_size_in_bytes == 0


@pytest.mark.parametrize("program_of", [write_pages, admit])
def test_a_sequence_comes_in_place(program_of) -> None:
    state = state_of(Mode.SPARDA)
    cache = jax.eval_shape(lambda: KVCache.empty(CONFIG, 1, CAPACITY, jnp.bfloat16))
    lane = (INT,) if program_of is admit else ()
    program = compile_for_h200(
        functools.partial(program_of, config=CONFIG),
        state,
        cache,
        *lane,
        ids(CAPACITY // CONFIG.sparse.block_size),
        INT,
        donate_argnums=0,
    )
    assert program.copies(1 << 20) == []
    assert program.memory_stats.alias_size_in_bytes >= 0.99 * held(state)
    layer = 2 * CAPACITY * CONFIG.num_kv_heads * CONFIG.head_dim * 2
    assert program.memory_stats.temp_size_in_bytes < LAYERS * layer


def test_a_tail_is_written_in_place() -> None:
    program = compile_for_h200(
        functools.partial(_write_tail, backend=None), pools(), state_of(Mode.SPARDA), INT, donate_argnums=0
    )
    stats = program.memory_stats
    assert program.copies(1 << 12) == []
    assert stats.host_alias_size_in_bytes == LAYERS * 2 * math.prod(POOL)
    assert stats.host_temp_size_in_bytes == 0
    assert stats.temp_size_in_bytes < 1 << 20


def test_a_prefix_passes_through_one_layer_of_records() -> None:
    blocks = CAPACITY // CONFIG.sparse.block_size
    pages = state_of(Mode.SPARDA).layers[0].pages
    program = compile_for_h200(
        functools.partial(_load_layer, config=CONFIG, backend=None), pools()[0], pages, ids(blocks), INT
    )
    stats = program.memory_stats
    layer = blocks * CONFIG.num_kv_heads * RECORD_BYTES
    assert layer <= stats.temp_size_in_bytes < 1.1 * layer
    assert stats.host_temp_size_in_bytes == stats.host_output_size_in_bytes == 0
