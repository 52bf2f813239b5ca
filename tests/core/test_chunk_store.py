"""The blocks that a chunk finishes, and no others, arrive in the pool at their places."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparda_jax.cache.chunk_store import ChunkStore, written_by
from sparda_jax.cache.kv import LayerCache

BLOCK, BLOCKS, HEADS, HEAD_DIM, CHUNK, POOL = 64, 9, 2, 8, 128, 20
HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


@functools.partial(jax.jit, donate_argnums=0)
def store(pool: jax.Array, layer: LayerCache, where: ChunkStore) -> jax.Array:
    return where.write(pool, layer, chunk=CHUNK, block_size=BLOCK)


def random_layer(rng: np.random.Generator) -> LayerCache:
    """Rows that nobody has written yet are NaN."""
    k, v = (jnp.asarray(rng.normal(size=(1, HEADS, BLOCKS * BLOCK, HEAD_DIM)), jnp.float32) for _ in range(2))
    return LayerCache(k=k, v=v, compressed_k=jnp.full((1, HEADS, BLOCKS * BLOCK // 16, HEAD_DIM), jnp.nan))


@settings(max_examples=40)
@given(st.data())
def test_a_chunk_writes_what_it_finishes(data: st.DataObject) -> None:
    num_new = data.draw(st.integers(0, CHUNK), label="num_new")
    start = data.draw(st.integers(0, BLOCKS * BLOCK - num_new), label="start")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    layer, end = random_layer(rng), start + num_new
    behind = jnp.arange(BLOCKS * BLOCK)[:, None] >= end
    layer = dataclasses.replace(layer, k=jnp.where(behind, jnp.nan, layer.k), v=jnp.where(behind, jnp.nan, layer.v))
    ids = rng.permutation(POOL)[:BLOCKS]
    finished = range(start // BLOCK, end // BLOCK)
    # What the host need not know may be anything.
    told = np.where(np.isin(np.arange(BLOCKS), finished), ids, -7)
    pool = np.asarray(rng.normal(size=(POOL * HEADS, 2 * BLOCK, HEAD_DIM)), np.float32)
    expected = pool.copy()
    for block in finished:
        for head in range(HEADS):
            rows = slice(block * BLOCK, block * BLOCK + BLOCK)
            record = np.concatenate([np.asarray(layer.k)[0, head, rows], np.asarray(layer.v)[0, head, rows]])
            expected[ids[block] * HEADS + head] = record
    where = ChunkStore(
        block_ids=jnp.asarray(told, jnp.int32), start=jnp.int32(start), num_new=jnp.int32(num_new)
    )  # fmt: skip
    on_host = jax.device_put(jnp.asarray(pool), HOST)
    found = store(on_host, layer, where)
    assert found.sharding.memory_kind == "pinned_host"
    assert on_host.is_deleted(), "in place"
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_each_layer_has_its_own_pool() -> None:
    rng = np.random.default_rng(1)
    pools = tuple(jnp.full((POOL * HEADS, 2 * BLOCK, HEAD_DIM), float(layer)) for layer in range(3))
    where = ChunkStore(
        block_ids=jnp.arange(BLOCKS, dtype=jnp.int32), start=jnp.int32(0), num_new=jnp.int32(BLOCK)
    )  # fmt: skip
    written, on_layer = written_by(pools, where, chunk=CHUNK, block_size=BLOCK)
    layer = random_layer(rng)
    on_layer(1, layer)
    assert written[0] is pools[0]
    assert written[2] is pools[2]
    np.testing.assert_array_equal(np.asarray(written[1])[0, :BLOCK], np.asarray(layer.k)[0, 0, :BLOCK])
    assert np.all(np.asarray(written[1])[2:] == 1.0), "the second block is not finished"
