"""A prompt's last selection is kept in its cache, and decode begins with it in the slots."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.cache import KVCache
from sparda_jax.cache.admission import _by_worth
from sparda_jax.cache.kv import LayerCache
from sparda_jax.decode_plan import Fetch
from sparda_jax.forward import forward
from sparda_jax.selection import Mode
from tests.core.support import CAPACITY, tokens
from tests.decode.support import CONFIG, LENGTHS, SEEDS, WIDTH, enter, make_lanes, prefilled, toy_of

LENGTH = LENGTHS[0]


@pytest.mark.parametrize("mode", [Mode.SPARSE, Mode.SPARDA])
def test_the_cache_keeps_the_selection_of_the_last_token(mode: Mode) -> None:
    """Whether a prompt comes whole or in chunks, the last of which may be empty."""
    model = toy_of(mode).decoder
    ids = jnp.asarray(tokens(1000, SEEDS[0])[:LENGTH])[None]
    ways = {"mode": mode, "decode": False, "max_len": CAPACITY}
    empty = KVCache.empty(CONFIG, 1, CAPACITY, jnp.float32)
    sparse = jnp.array([True])
    _, whole, trace = forward(model, empty, ids, jnp.array([LENGTH]), sparse, **ways)
    chunks = empty
    padded = jnp.pad(ids, ((0, 0), (0, 700 - LENGTH)))
    for begin in (0, 350):
        count = jnp.array([min(350, LENGTH - begin)])
        _, chunks, _ = forward(model, chunks, padded[:, begin : begin + 350], count, sparse, **ways)
    _, chunks, _ = forward(model, chunks, padded[:, :350], jnp.array([0]), sparse, **ways)
    for layer, other, selected in zip(whole.layers, chunks.layers, trace.selected, strict=True):
        assert selected is not None
        np.testing.assert_array_equal(layer.selected, selected[:, :, -1])
        np.testing.assert_array_equal(other.selected, layer.selected)


def test_the_slots_hold_it() -> None:
    lanes = make_lanes(Mode.SPARSE, Fetch.IN_TURN, slots=WIDTH + 1)
    enter(lanes, Mode.SPARSE, 1, 0)
    for index, layer in enumerate(prefilled(Mode.SPARSE, 0)[0].layers):
        held = np.asarray(lanes._state.layers[index].residency.slot_of_block)[1] >= 0
        assert layer.selected is not None
        for head, ids in enumerate(np.asarray(layer.selected)[0]):
            assert held[head, ids[ids >= 0]].all()
            assert held[head].sum() == (min(WIDTH + 1, -(-LENGTH // 64)) if index else -(-LENGTH // 64))


def test_blocks_are_ordered_by_what_decode_wants() -> None:
    """Selected ones, the first and the local ones come last, behind them nothing; what does not exist comes first."""
    sparse, rng = CONFIG.sparse, np.random.default_rng(0)
    blocks, existing, width = 40, 33, sparse.num_selected_blocks
    chosen = np.stack([np.sort(rng.choice(existing, width - 2, replace=False)) for _ in range(CONFIG.num_kv_heads)])
    selected = np.pad(chosen, ((0, 0), (0, 2)), constant_values=-1)[None]
    none = jnp.zeros((1, CONFIG.num_kv_heads, blocks * 64, 4))
    layer = LayerCache(k=none, v=none, compressed_k=none, selected=jnp.asarray(selected, jnp.int32))
    order = np.asarray(_by_worth(layer, jnp.int32(existing), blocks, CONFIG))
    for head in range(CONFIG.num_kv_heads):
        forced = {*range(sparse.init_blocks), *range(existing - 1 - sparse.local_blocks, existing)}
        wanted = sorted(forced | set(chosen[head].tolist()))
        others = [block for block in range(existing) if block not in wanted]
        assert order[head].tolist() == [*range(existing, blocks), *others, *wanted]
