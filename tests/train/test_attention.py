"""The frozen base's attention in training, against the definition of attention over a subset of the keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.block_selection import bits_to_mask, block_mask, mask_to_bits
from sparda_jax.pallas_kernels.sparse_attention import masked_attention
from sparda_jax.train.attention import block_attention

BLOCK = 8


def random_case(length: int, seed: int, dtype: type = np.float32) -> tuple[jax.Array, ...]:
    """q, k, v and for every query the bits of three random blocks up to its own, its own too; some rows have none."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, length, 2, 3, 16))
    k, v = rng.standard_normal((2, 2, length, 2, 16))
    own = np.arange(length) // BLOCK
    ids = rng.integers(0, own[:, None] + 1, (2, 2, length, 4))
    ids[..., 0] = own
    ids[..., 3] = -1
    ids[0, :, length // 2] = -1
    bits = mask_to_bits(block_mask(jnp.asarray(ids, jnp.int32), -(-length // BLOCK)))
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), bits


def definition(q: jax.Array, k: jax.Array, v: jax.Array, bits: jax.Array) -> jax.Array:
    length = q.shape[1]
    blocks = -(-length // BLOCK)
    allowed = jnp.repeat(bits_to_mask(bits, blocks), BLOCK, axis=-1)[..., :length]
    allowed &= jnp.arange(length) <= jnp.arange(length)[:, None]
    stored = jnp.ones((*k.shape[:1], k.shape[2], length), bool)
    return masked_attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), allowed, stored)


@pytest.mark.parametrize(("length", "chunk", "key_tile"), [(96, 32, 16), (100, 64, 40), (33, 128, 8), (64, 64, 1024)])
def test_as_defined(length: int, chunk: int, key_tile: int) -> None:
    case = random_case(length, seed=length)
    found = block_attention(*case, block_size=BLOCK, chunk=chunk, key_tile=key_tile)
    np.testing.assert_allclose(found, definition(*case), rtol=0, atol=2e-6)
    assert not np.asarray(found[0, length // 2]).any()


def test_bfloat16_rounds_like_the_definition() -> None:
    case = random_case(96, seed=1, dtype=jnp.bfloat16)
    found = block_attention(*case, block_size=BLOCK, chunk=32, key_tile=32)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, definition(*case))), rtol=0, atol=0.02)


def test_other_blocks_are_not_read() -> None:
    q, k, v, bits = random_case(64, seed=2)
    own = jnp.uint32(1) << (jnp.arange(64, dtype=jnp.uint32) // BLOCK)
    bits = jnp.broadcast_to(own[:, None], bits.shape)
    found = block_attention(q, k, v, bits, block_size=BLOCK, chunk=16, key_tile=16)
    changed = block_attention(
        q, k.at[:, :BLOCK].mul(7), v.at[:, :BLOCK].add(100), bits, block_size=BLOCK, chunk=16, key_tile=16
    )
    np.testing.assert_array_equal(found[:, BLOCK:], changed[:, BLOCK:])
    assert not np.array_equal(found[:, :BLOCK], changed[:, :BLOCK])


def test_no_array_is_long_in_both_queries_and_keys() -> None:
    length = 1024
    q, k, v, bits = random_case(length, seed=3)
    text = (
        jax.jit(lambda *x: block_attention(*x, block_size=BLOCK, chunk=32, key_tile=64)).lower(q, k, v, bits).as_text()
    )
    assert f"x{length}x" in text
    assert f"{length}x{length}" not in text


def test_a_tile_that_splits_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of block_size=8"):
        block_attention(*random_case(32, seed=4), block_size=BLOCK, key_tile=12)
