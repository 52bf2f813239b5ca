"""Lanes over a pool of packed records decode what lanes do whose pool is rounded, record by record, by an oracle."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.cache.host_dtype import KvHostDtype, host_record
from sparda_jax.cache.state import CacheShape
from sparda_jax.config import ConfigError
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.lanes import DecodeLanes
from sparda_jax.selection import Mode
from tests.decode.support import CONFIG, GREEDY, MAX_BLOCKS, MODEL, WIDTH, enter, hidden, make_lanes, prefilled, run
from tests.kernels.test_packed_records import oracle

BLOCK, MODE = CONFIG.sparse.block_size, Mode.SPARDA
FORMATS = [KvHostDtype.INT8, pytest.param(KvHostDtype.FP8, marks=pytest.mark.slow)]


def rounding(lanes: DecodeLanes, kv_host_dtype: KvHostDtype) -> DecodeLanes:
    """Lanes in whose pool every record that is written is exchanged for what would arrive if it were packed."""
    pool, code = lanes._pool, kv_host_dtype.code
    assert code is not None
    known = [pool.snapshot(layer) for layer in range(CONFIG.num_layers)]

    def exchange() -> None:
        arrays = list(pool.arrays)
        for layer, before in enumerate(known):
            now = pool.snapshot(layer)
            written = (now.view(np.uint32) != before.view(np.uint32)).any((1, 2))
            # A row behind a sequence's end may hold anything, NaN in these tests: it must arrive as such.
            rows = np.isfinite(now).all(-1, keepdims=True)
            arrived = np.where(rows, oracle(np.where(rows, now, 0), code)[0], np.nan).astype(np.float32)
            known[layer] = np.where(written[:, None, None], arrived, now)
            arrays[layer] = jax.device_put(known[layer], arrays[layer].sharding)
        pool._pools = tuple(arrays)

    def exchanging(write: Any) -> Any:
        @functools.wraps(write)
        def wrapped(*args: Any) -> None:
            write(*args)
            exchange()

        return wrapped

    for name in ("store", "write_back", "write_tail"):
        setattr(pool, name, exchanging(getattr(pool, name)))
    return lanes


@pytest.mark.parametrize("kv_host_dtype", FORMATS)
def test_packed_lanes_decode_what_a_rounded_pool_decodes(kv_host_dtype: KvHostDtype) -> None:
    """More blocks than slots, over block boundaries; one waits and goes on elsewhere; a prefix is read back."""
    make = functools.partial(make_lanes, MODE, Fetch.AHEAD, slots=WIDTH + 1, num_blocks=60)
    packed, rounded = make(kv_host_dtype=kv_host_dtype), rounding(make(), kv_host_dtype)
    record = host_record((2 * BLOCK, CONFIG.head_dim), jnp.dtype(jnp.float32), kv_host_dtype)
    assert packed._pool.arrays[0].shape[1:] == record.shape
    copied = 0
    for lanes in (packed, rounded):
        for lane in range(2):
            enter(lanes, MODE, lane, lane)
        lanes.resume(2, lanes.adopt(*prefilled(MODE, 2), GREEDY))

    def go_on(steps: int) -> None:
        nonlocal copied
        for _ in range(steps):
            np.testing.assert_array_equal(run(packed, 1), run(rounded, 1))
            copied += int(np.asarray(packed.copies).sum())
        got, want = hidden(packed), hidden(rounded)
        assert np.isfinite(got).all()
        # The oracle divides by a row's scale, so a number between two bytes could go the other way. Without rounding
        # the streams differ by a hundredth at first, and soon altogether.
        assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()

    go_on(40)
    for lanes in (packed, rounded):
        waiting = [lanes.park(lane) for lane in (0, 1)]
        lanes.resume(1, waiting[0])
        lanes.resume(0, waiting[1])
    go_on(40)
    blocks = packed.written_blocks(1)
    assert blocks == rounded.written_blocks(1)
    assert len(blocks) > WIDTH
    capacity = MAX_BLOCKS * BLOCK
    caches = [lanes.prefix(blocks, capacity) for lanes in (packed, rounded)]
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("k", "v", "compressed_k"):
            got, want = (np.asarray(getattr(layer, name)) for layer in (one, other))
            assert got.dtype == np.float32
            # A block that was rounded twice may differ by a step of the code.
            np.testing.assert_allclose(got, want, atol=np.abs(want).max() / 50)
            assert np.abs(got - want).mean() < 1e-3 * np.abs(want).max()
    assert copied > 100
    assert packed.return_stats().record_bytes == record.size * 4
    assert rounded.return_stats().record_bytes == 2 * BLOCK * CONFIG.head_dim * 4


def test_layers_are_not_streamed_out_of_a_packed_pool() -> None:
    shape = CacheShape(lanes=2, max_blocks=20, num_blocks=40, slots_per_lane=5, kv_host_dtype=KvHostDtype.INT8)
    plan = DecodePlan(mode=Mode.DENSE, fetch=Fetch.STREAM)
    wrong = "--kv-host-dtype int8 packs the records.*fetch=stream.*use --kv-host-dtype auto"
    with pytest.raises(ConfigError, match=wrong):
        DecodeLanes(MODEL, shape, plan)
    in_turn = dataclasses.replace(plan, fetch=Fetch.IN_TURN)
    DecodeLanes(MODEL, dataclasses.replace(shape, slots_per_lane=20), in_turn)
