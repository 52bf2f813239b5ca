"""Prompts of the toy model, prefilled in a contiguous cache, and what that cache decodes: the measure for the lanes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparda_jax.cache import KVCache
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.cache.state import CacheShape
from sparda_jax.decode import decode_step
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.forward import Skew, forward
from sparda_jax.infinigen import calibrate
from sparda_jax.lanes import DecodeLanes
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from tests import oracle
from tests.core.support import CAPACITY, PROMPT_WIDTH, Toy, load, tokens, toy

MODEL = toy("deep").decoder
CONFIG = MODEL.config
MAX_BLOCKS = CAPACITY // CONFIG.sparse.block_size
# Selecting among 11 blocks, among 7, and a single partial block; lengths end inside and at the end of a block.
LENGTHS, SEEDS = (650, 384, 40), (5, 6, 7)
STEPS = 150
GREEDY = SamplingParams()
WIDTH = CONFIG.sparse.num_selected_blocks


@functools.cache
def toy_of(mode: Mode) -> Toy:
    """For InfiniGen one of the same depth whose heads have 64 channels, of which it keeps half; its ``dense_len`` is
    longer than any sequence, which InfiniGen has to pass over.
    """
    if mode is not Mode.INFINIGEN:
        return toy("deep")
    sparse = {"dense_len": 2048}
    config = oracle.toy_config(head_dim=64, num_attention_heads=4, num_hidden_layers=3, sparse_config=sparse)
    return load(config, oracle.toy_weights(config, seed=3))


@functools.cache
def skew_of(mode: Mode) -> Skew | None:
    return calibrate(toy_of(mode).decoder, tokens()[:620].tolist(), CAPACITY) if mode is Mode.INFINIGEN else None


@functools.partial(jax.jit, static_argnames=("graphdef", "mode", "decode"))
def _forward(graphdef, weights, skew, cache, new, num_new, sparse, *, mode, decode):
    model = nnx.merge(graphdef, weights)
    return forward(model, cache, new, num_new, sparse, mode=mode, decode=decode, max_len=CAPACITY, skew=skew)[:2]


def _advance(cache: KVCache, ids: np.ndarray, count: int, mode: Mode, *, decode: bool) -> tuple[KVCache, int]:
    model, (graphdef, weights) = toy_of(mode).decoder, toy_of(mode).split
    sparse = jnp.asarray([int(cache.lengths[0]) + count >= model.config.sparse.dense_len])
    new, num_new = jnp.asarray(ids)[None], jnp.asarray([count])
    x, cache = _forward(graphdef, weights, skew_of(mode), cache, new, num_new, sparse, mode=mode, decode=decode)
    return cache, int(jnp.argmax(model.logits(x[0, count - 1])))


@functools.cache
def prefilled(mode: Mode, prompt: int) -> tuple[KVCache, int]:
    """The cache of one of the prompts, and the token that follows it."""
    ids = np.zeros(PROMPT_WIDTH, np.int32)
    ids[: LENGTHS[prompt]] = tokens(1000, SEEDS[prompt])[: LENGTHS[prompt]]
    infinigen = mode is Mode.INFINIGEN
    empty = KVCache.empty(toy_of(mode).decoder.config, 1, CAPACITY, jnp.float32, infinigen=infinigen)
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
    mode: Mode,
    fetch: Fetch,
    *,
    slots: int = MAX_BLOCKS,
    lanes: int = 3,
    num_blocks: int = 3 * MAX_BLOCKS,
    sample_every: int | None = None,
    kv_host_dtype: KvHostDtype = KvHostDtype.AUTO,
) -> DecodeLanes:
    """Empty lanes over a cache of NaN: whatever is read before it is written shows."""
    plan = DecodePlan(mode=mode, fetch=fetch, max_len=CAPACITY)
    shape = CacheShape(
        lanes=lanes,
        max_blocks=MAX_BLOCKS,
        num_blocks=num_blocks,
        slots_per_lane=slots,
        kv_host_dtype=kv_host_dtype,
    )
    made = DecodeLanes(toy_of(mode).decoder, shape, plan, skew_of(mode), sample_every=sample_every)
    host = made._pool._pools[0].sharding
    # All bits set are NaN, in the scales of packed records, too.
    made._pool._pools = tuple(
        jax.device_put(np.full(pool.shape, 0xFFFFFFFF, np.uint32).view(pool.dtype), host) for pool in made._pool._pools
    )
    poison = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, made._state)
    made._state = jax.device_put(poison, made._device)
    return made


def enter(lanes: DecodeLanes, mode: Mode, lane: int, prompt: int, params: SamplingParams = GREEDY) -> None:
    lanes.enter(lane, *prefilled(mode, prompt), params)


def run(lanes: DecodeLanes, steps: int) -> np.ndarray:
    """Tokens [lanes, steps]."""
    return np.stack([np.asarray(lanes.step()) for _ in range(steps)], axis=1)


def hidden(lanes: DecodeLanes) -> np.ndarray:
    """The stream of one more step, without taking it."""
    graphdef, weights = toy_of(lanes.plan.mode).split
    return np.asarray(_hidden(graphdef, weights, lanes._state, lanes._pool.arrays, lanes._tokens, plan=lanes.plan))


@functools.partial(jax.jit, static_argnames=("graphdef", "plan"))
def _hidden(graphdef, weights, state, pools, last, *, plan):
    return decode_step(nnx.merge(graphdef, weights), state, pools, last, jnp.full_like(last, -1), plan)[0]
