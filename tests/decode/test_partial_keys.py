"""InfiniGen's partial keys: what the pages hold, and the block scores read from them."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.cache.state import CacheShape, empty_state
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.selection import Mode, partial_key_scores
from tests.decode.support import (
    CONFIG,
    LENGTHS,
    MAX_BLOCKS,
    STEPS,
    WIDTH,
    decoded,
    enter,
    make_lanes,
    run,
    skew_of,
    toy_of,
)
from tests.oracle import infinigen

MODE = Mode.INFINIGEN
CHANNELS = 32


def test_pages_hold_the_kept_channels_of_every_key() -> None:
    """Those of the prompt and of 150 tokens behind it, in the channels that weighed most over each prompt."""
    lanes = make_lanes(MODE, Fetch.AHEAD, slots=WIDTH + 1)
    for lane in range(3):
        enter(lanes, MODE, lane, lane)
    run(lanes, STEPS)
    skew, choices = skew_of(MODE), set()
    assert skew is not None
    assert lanes._state.layers[0].partial_keys is None, "layer 0 scores its compressed keys"
    for lane in range(3):
        _, cache = decoded(MODE, lane)
        entry, length = lanes._lanes[lane], LENGTHS[lane] + STEPS
        assert entry is not None
        for index in range(1, CONFIG.num_layers):
            layer, pages = cache.layers[index], lanes._state.layers[index].partial_keys
            assert pages is not None
            weight, k = np.asarray(layer.channel_weight)[0], np.asarray(layer.k)[0].swapaxes(0, 1)[:length]
            channels = np.argsort(-weight, axis=-1, kind="stable")[:, :CHANNELS]
            want = infinigen.partial_keys(k, np.asarray(skew[index]), channels)
            found = np.asarray(pages)[np.array(entry.blocks)].swapaxes(1, 2).reshape(-1, *want.shape[1:])
            np.testing.assert_allclose(found[:length], want, rtol=1e-4, atol=1e-4)
            choices.add((index, np.sort(channels).tobytes()))
    assert len(choices) > CONFIG.num_layers - 1, "prompts keep different channels, or nothing here tells lanes apart"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_are_those_of_the_definition(dtype: jnp.dtype) -> None:
    """Blocks scattered over the pool, tables of garbage behind the sequence, NaN in place of unwritten tokens."""
    rng = np.random.default_rng(4)
    positions = np.array([0, 1, 63, 64, 65, 200, 256])
    batch, blocks, heads, group, dim = len(positions), 5, 2, 3, 64
    num_blocks = batch * blocks
    q = rng.standard_normal((batch, heads * group, dim)).astype(np.float32)
    basis = np.stack([np.linalg.qr(rng.standard_normal((dim, dim)))[0] for _ in range(heads)]).astype(np.float32)
    channels = np.stack([[rng.permutation(dim)[:CHANNELS] for _ in range(heads)] for _ in range(batch)])
    partial = np.full((batch, blocks * 64, heads, CHANNELS), np.nan, np.float32)
    for lane, position in enumerate(positions):
        partial[lane, :position] = rng.standard_normal((position, heads, CHANNELS))
    partial = np.array(jnp.asarray(partial, dtype).astype(jnp.float32))
    table = rng.permutation(num_blocks).reshape(batch, blocks).astype(np.int32)
    pages = np.empty((num_blocks, heads, 64, CHANNELS), np.float32)
    pages[table] = partial.reshape(batch, blocks, 64, heads, CHANNELS).swapaxes(2, 3)
    table[np.arange(blocks) * 64 > positions[:, None]] = rng.choice([-7, 10**6])
    kept = np.stack([[basis[m][:, channels[lane, m]] for m in range(heads)] for lane in range(batch)])
    found = partial_key_scores(
        jnp.asarray(q.reshape(batch, heads, group, dim).sum(2)),
        jnp.asarray(kept),
        jnp.asarray(pages, dtype),
        jnp.asarray(table),
        jnp.asarray(positions, jnp.int32),
    )
    want = np.full((batch, heads, blocks), -np.inf)
    for lane, position in enumerate(positions):
        tokens = infinigen.token_score(q[lane][None], basis, channels[lane], partial[lane, :position])[:, 0]
        for b in range(blocks):
            covered = tokens[:, max(64 * b - 1, 0) : 64 * b + 64]
            if covered.shape[1]:
                want[lane, :, b] = covered.max(axis=1)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_only_infinigen_pays_for_partial_keys() -> None:
    config = toy_of(MODE).decoder.config
    shape = CacheShape(lanes=2, max_blocks=MAX_BLOCKS, num_blocks=20, slots_per_lane=WIDTH)
    for mode in Mode:
        state = empty_state(config, shape, jnp.bfloat16, partial_channels=mode.partial_channels(config))
        held = [None if layer.partial_keys is None else layer.partial_keys.shape for layer in state.layers]
        pages = (20, config.num_kv_heads, 64, CHANNELS)
        assert held == ([None, pages, pages] if mode is MODE else [None] * 3)


def test_lists_are_as_wide_as_a_selection() -> None:
    """A request is never dense, however long ``dense_len`` is."""
    config = toy_of(MODE).decoder.config
    assert config.sparse.dense_len == 2048
    assert DecodePlan(mode=MODE, fetch=Fetch.AHEAD).list_width(config, 1000) == WIDTH
    assert DecodePlan(mode=Mode.SPARSE, fetch=Fetch.IN_TURN).list_width(config, 1000) == 32
    # A model whose heads have fewer channels keeps them all.
    assert MODE.partial_channels(CONFIG) == CONFIG.head_dim
