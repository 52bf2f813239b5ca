"""The attention geometry of MiniCPM4.1-8B: eight ragged lanes with hardly any slots decode what they decode with all.

On a GPU this goes through the kernels, whose fetches run beside the layers; on a CPU a short run shows that the check
itself is right.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.cache.kv import KVCache
from sparda_jax.cache.state import CacheShape
from sparda_jax.decode import decode_step
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.forward import forward
from sparda_jax.lanes import DecodeLanes
from sparda_jax.model import Decoder
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from tests import oracle
from tests.core.support import load

BLOCKS, LENGTHS = 32, (1300, 897, 600, 190)
WAYS = [(Mode.SPARDA, Fetch.AHEAD), (Mode.SPARSE, Fetch.IN_TURN)]


@functools.cache
def model() -> Decoder:
    """Three layers, 32 query and 2 KV heads of 128; 12 blocks selected, of which 4 are forced."""
    config = oracle.toy_config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=32,
        head_dim=128,
        vocab_size=512,
        sparse_config={"topk": 10},
    )
    return load(config, oracle.toy_weights(config, seed=4), jnp.bfloat16).decoder


@functools.partial(jax.jit, static_argnames=("graphdef", "mode"))
def _prefill(graphdef, weights, cache, ids, count, *, mode):
    decoder = nnx.merge(graphdef, weights)
    x, cache, _ = forward(decoder, cache, ids, count, jnp.ones(1, bool), mode=mode, decode=False, max_len=64 * BLOCKS)
    return decoder.logits(x[0, count[0] - 1]), cache


@functools.cache
def prefilled(mode: Mode, prompt: int) -> tuple[KVCache, int]:
    """The cache of a random prompt, and the token that follows it."""
    ids, length = np.zeros((1, max(LENGTHS)), np.int32), LENGTHS[prompt]
    ids[0, :length] = np.random.default_rng(prompt).integers(3, 512, length)
    cache = KVCache.empty(model().config, 1, 64 * BLOCKS, jnp.dtype(jnp.bfloat16))
    logits, cache = _prefill(*nnx.split(model()), cache, ids, np.array([length], np.int32), mode=mode)
    return cache, int(jnp.argmax(logits))


def lanes_with(slots: int, count: int, mode: Mode, fetch: Fetch) -> DecodeLanes:
    shape = CacheShape(lanes=count, max_blocks=BLOCKS, num_blocks=count * BLOCKS, slots_per_lane=slots)
    return DecodeLanes(model(), shape, DecodePlan(mode=mode, fetch=fetch, max_len=64 * BLOCKS))


@functools.partial(jax.jit, static_argnames=("graphdef", "plan"))
def _look(graphdef, weights, state, pools, last, *, plan):
    """A step that is not taken: its stream, the cache after it, and how many records it copied."""
    return decode_step(nnx.merge(graphdef, weights), state, pools, last, jnp.full_like(last, -1), plan)


def look(lanes: DecodeLanes) -> tuple[np.ndarray, np.ndarray, int, int]:
    """The next step's stream with what is missing fetched, then once more with everything there; the copies of both.

    The same program takes both, so nothing but the fetch can make a difference.
    """
    graphdef, weights = nnx.split(model())
    run = functools.partial(_look, graphdef, weights, plan=lanes.plan)
    state = lanes._state
    first, after, copied = run(state=state, pools=lanes._pool.arrays, last=lanes._tokens)
    after = dataclasses.replace(after, lengths=state.lengths)
    again, _, none = run(state=after, pools=lanes._pool.arrays, last=lanes._tokens)
    return np.asarray(first), np.asarray(again), int(copied.sum()), int(none.sum())


def compare(mode: Mode, fetch: Fetch, *, count: int, steps: int, look_every: int) -> None:
    """Sampled, so that no lane falls into a loop; lanes that are full, and some that are not, start another prompt."""
    few, many = (lanes_with(slots, count, mode, fetch) for slots in (12, BLOCKS))
    rng, copied, looked = np.random.default_rng(0), 0, 0
    for step in range(steps):
        for lane in range(count):
            full = few.length(lane) + 1 >= 64 * BLOCKS
            if few.length(lane) == 0 or full or rng.random() < 1 / 400:
                prompt, seed = (lane + step) % len(LENGTHS), int(rng.integers(2**31))
                for lanes in (few, many):
                    lanes.leave(lane)
                    lanes.enter(lane, *prefilled(mode, prompt), SamplingParams(temperature=1.0, seed=seed))
        np.testing.assert_array_equal(few.step(), many.step(), f"step {step}")
        assert few.copies is not None
        assert many.copies is not None
        assert not np.asarray(many.copies).any(), f"step {step}: everything has a slot, and yet something was fetched"
        copied += int(np.asarray(few.copies).sum())
        if step % look_every == look_every - 1 and all(few.length(lane) % 64 for lane in range(count)):
            fetched, there, missing, none = look(few)
            np.testing.assert_array_equal(fetched, there, f"step {step}")
            assert none == 0
            looked += missing > 0
            assert np.isfinite(fetched).all()
    # Several blocks a step are evicted in each lane that has more blocks than slots.
    assert copied > steps * count
    assert looked > 0


@pytest.mark.slow
def test_offloaded_lanes_decode_what_resident_ones_decode() -> None:
    compare(Mode.SPARDA, Fetch.AHEAD, count=2, steps=20, look_every=9)


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "fetch"), WAYS)
def test_a_thousand_steps(mode: Mode, fetch: Fetch) -> None:
    compare(mode, fetch, count=8, steps=1000, look_every=50)
