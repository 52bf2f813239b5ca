"""Prefill by the kernels, interpreted: the same blocks and logits as the plain chunks give."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.decode_plan import Backends
from sparda_jax.pallas_kernels.backend import H200
from sparda_jax.pallas_kernels.block_selection import bits_to_ids
from sparda_jax.pallas_kernels.block_selection.prefill import SCORE_BYTES
from sparda_jax.prefill import Chunk, by_bits
from sparda_jax.selection import Mode, random_scores
from tests.core.support import CHUNK_WIDTH, LAYERS, Output, Session, assert_same, join, tokens, toy, whole

# Starts and ends on and off the boundaries of windows and blocks; a lane that rests, and one that ends early.
PIECES = ((128, 127, 128, 65, 128, 74), (100, 0, 128, 47, 16, 100))
LENGTHS = tuple(map(sum, PIECES))
SEEDS = (5, 6)
# Selection in float32 has no kernel; that of bits is the same for all backends.
FLOAT32 = Backends(block_selection="reference", block_sparse_attention="triton")
BFLOAT16 = Backends(block_selection="triton", block_sparse_attention="triton")
PLAIN = Backends(block_sparse_attention="reference")


@functools.cache
def prefilled(
    mode: Mode, backends: Backends, dtype: Any = jnp.float32, *, sparse: bool = True, kind: str = "base"
) -> list[Output]:
    """Two sequences in ragged pieces; what no token wrote is NaN all the time. The first one may be dense."""
    session = Session(toy(kind, dtype), mode, 2, poison=True, backends=backends, sparse=[sparse, True])
    outputs = []
    for turn in range(len(PIECES[0])):
        begin = [sum(sizes[:turn]) for sizes in PIECES]
        pieces = [
            tokens(1000, seed)[at : at + sizes[turn]] for seed, at, sizes in zip(SEEDS, begin, PIECES, strict=True)
        ]
        outputs.append(session.feed(pieces, CHUNK_WIDTH))
    return [join(lane) for lane in zip(*outputs, strict=True)]


_SLOW_MODES = [pytest.param(mode, marks=pytest.mark.slow) for mode in (Mode.SPARSE, Mode.STREAMING_LLM, Mode.RANDOM)]


@pytest.mark.parametrize("mode", [*_SLOW_MODES, Mode.SPARDA])
def test_same_blocks_and_logits(mode: Mode) -> None:
    for lane, found in enumerate(prefilled(mode, FLOAT32)):
        expected = whole(mode, LENGTHS[lane], SEEDS[lane])
        assert_same(found, expected)
        np.testing.assert_array_equal(found.blocks_read, expected.blocks_read)
        assert found.blocks_visible == expected.blocks_visible
        assert (found.blocks_read < found.blocks_visible).all()


def test_a_dense_sequence_among_sparse_ones_reads_everything() -> None:
    dense, sparse = prefilled(Mode.SPARDA, FLOAT32, sparse=False)
    expected = whole(Mode.DENSE, LENGTHS[0], SEEDS[0])
    np.testing.assert_allclose(dense.logits, expected.logits, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(dense.blocks_read, expected.blocks_read)
    assert_same(sparse, whole(Mode.SPARDA, LENGTHS[1], SEEDS[1]))


@pytest.mark.slow
def test_dense_mode() -> None:
    for lane, found in enumerate(prefilled(Mode.DENSE, FLOAT32)):
        assert_same(found, whole(Mode.DENSE, LENGTHS[lane], SEEDS[lane]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.SPARSE, Mode.SPARDA])
def test_bfloat16(mode: Mode) -> None:
    """Layer 0 selects from the same keys; behind it sums that round another way may turn a near tie."""
    assert_nearly_same(prefilled(mode, BFLOAT16, jnp.bfloat16), prefilled(mode, PLAIN, jnp.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [Mode.SPARSE, Mode.SPARDA, Mode.DENSE])
def test_bfloat16_with_the_fastest_kernels(mode: Mode) -> None:
    """On Hopper those of Mosaic, which take heads of 64 and 128."""
    found = prefilled(mode, Backends(), jnp.bfloat16, kind="wide")
    assert_nearly_same(found, prefilled(mode, PLAIN, jnp.bfloat16, kind="wide"))


def assert_nearly_same(all_found: list[Output], all_expected: list[Output]) -> None:
    for found, expected in zip(all_found, all_expected, strict=True):
        same = [
            np.mean((a == b).all(axis=-1))
            for a, b in zip(found.selected, expected.selected, strict=True)
            if a is not None and b is not None
        ]
        assert len(same) in (0, LAYERS)
        assert all(share > least for share, least in zip(same, (0.999, 0.95), strict=False))
        assert np.abs(found.logits - expected.logits).mean() < 0.02


def test_chunks_are_computed_so_where_attention_has_a_kernel() -> None:
    assert by_bits(FLOAT32)
    assert not by_bits(Backends())
    with jax.sharding.use_abstract_mesh(H200):
        assert by_bits(Backends())


def test_blocks_by_scores_without_keys_are_the_plain_ones() -> None:
    """In parts of 64 tokens, which is not how the plain ones are made; a lane of three tokens, and NaN nowhere."""
    config = toy().decoder.config
    num_new, row_bytes = jnp.asarray([700, 3]), SCORE_BYTES // 64
    chunk = Chunk(
        start=jnp.zeros(2, jnp.int32), num_new=num_new, sparse=jnp.ones(2, bool), config=config.sparse, backends=PLAIN
    )
    for layer in range(LAYERS):
        bits = chunk.best(lambda p, n=layer: random_scores(config, n, p, 16), q_len=700, row_bytes=row_bytes)
        found = np.asarray(bits_to_ids(bits, 6))
        expected = whole(Mode.RANDOM, 700).selected[layer]
        assert expected is not None
        np.testing.assert_array_equal(found[0], expected[:, :700])
        np.testing.assert_array_equal(found[1, :, :3], expected[:, :3])
        assert (found[1, :, 3:] == -1).all()
