"""Prompts of the toy model, prefilled in a contiguous cache, and what that cache decodes: the measure for the lanes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparda_jax.cache import KVCache
from sparda_jax.cache.state import CacheShape
from sparda_jax.decode import DecodePlan, Fetch
from sparda_jax.forward import forward
from sparda_jax.lanes import DecodeLanes
from sparda_jax.selection import Mode
from tests.core.support import CAPACITY, PROMPT_WIDTH, tokens, toy

MODEL = toy("deep").decoder
CONFIG = MODEL.config
MAX_BLOCKS = CAPACITY // CONFIG.sparse.block_size
# Selecting among 11 blocks, among 7, and a single partial block; lengths end inside and at the end of a block.
LENGTHS, SEEDS = (650, 384, 40), (5, 6, 7)
STEPS = 150


@functools.partial(jax.jit, static_argnames=("graphdef", "mode", "decode"))
def _forward(graphdef, weights, cache, new, num_new, sparse, *, mode, decode):
    return forward(
        nnx.merge(graphdef, weights), cache, new, num_new, sparse, mode=mode, decode=decode, max_len=CAPACITY
    )[:2]


def _advance(cache: KVCache, ids: np.ndarray, count: int, mode: Mode, *, decode: bool) -> tuple[KVCache, int]:
    graphdef, weights = toy("deep").split
    sparse = jnp.asarray([int(cache.lengths[0]) + count >= CONFIG.sparse.dense_len])
    x, cache = _forward(
        graphdef, weights, cache, jnp.asarray(ids)[None], jnp.asarray([count]), sparse, mode=mode, decode=decode
    )
    return cache, int(jnp.argmax(MODEL.logits(x[0, count - 1])))


@functools.cache
def prefilled(mode: Mode, prompt: int) -> tuple[KVCache, int]:
    """The cache of one of the prompts, and the token that follows it."""
    ids = np.zeros(PROMPT_WIDTH, np.int32)
    ids[: LENGTHS[prompt]] = tokens(1000, SEEDS[prompt])[: LENGTHS[prompt]]
    empty = KVCache.empty(CONFIG, 1, CAPACITY, jnp.float32)
    return _advance(empty, ids, LENGTHS[prompt], mode, decode=False)


@functools.cache
def decoded(mode: Mode, prompt: int) -> tuple[np.ndarray, KVCache]:
    """What the contiguous cache decodes greedily in `STEPS` steps after the first token, and the cache then."""
    cache, token = prefilled(mode, prompt)
    found = []
    for _ in range(STEPS):
        cache, token = _advance(cache, np.array([token], np.int32), 1, mode, decode=True)
        found.append(token)
    return np.array(found), cache


def make_lanes(
    mode: Mode, fetch: Fetch, *, slots: int = MAX_BLOCKS, lanes: int = 3, num_blocks: int = 3 * MAX_BLOCKS
) -> DecodeLanes:
    """Empty lanes over a cache of NaN: whatever is read before it is written shows."""
    plan = DecodePlan(mode=mode, fetch=fetch, max_len=CAPACITY)
    shape = CacheShape(lanes=lanes, max_blocks=MAX_BLOCKS, num_blocks=num_blocks, slots_per_lane=slots)
    made = DecodeLanes(MODEL, shape, plan)
    host = made._pool._pools[0].sharding
    made._pool._pools = tuple(
        jax.device_put(np.full(pool.shape, np.nan, np.float32), host) for pool in made._pool._pools
    )
    poison = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, made._state)
    made._state = jax.device_put(poison, made._device)
    return made
