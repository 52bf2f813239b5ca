"""Sets of blocks as bits: block b of a row is bit ``b % 32`` of the row's word ``b // 32``."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

WORD = 32


def num_words(blocks: int) -> int:
    """Words of a row of ``blocks`` blocks."""
    return -(-blocks // WORD)


def mask_to_bits(mask: Bool[Array, "*rows blocks"]) -> UInt32[Array, "*rows words"]:
    """The bits of a mask; those beyond its last block are 0."""
    blocks = mask.shape[-1]
    words = num_words(blocks)
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, words * WORD - blocks)])
    lanes = padded.reshape(*mask.shape[:-1], words, WORD).astype(jnp.uint32)
    return jnp.sum(lanes << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def bits_to_mask(bits: UInt32[Array, "*rows words"], blocks: int) -> Bool[Array, "*rows blocks"]:
    """True for the blocks whose bit is set."""
    lanes = (bits[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return lanes.reshape(*bits.shape[:-1], -1)[..., :blocks] == 1


def bits_to_ids(bits: UInt32[Array, "*rows words"], width: int) -> Int[Array, "*rows width"]:
    """The first ``width`` blocks whose bit is set, ascending, int32; -1 at the end."""
    mask = bits_to_mask(bits, bits.shape[-1] * WORD)
    blocks = mask.shape[-1]
    ids = jnp.sort(jnp.where(mask, jnp.arange(blocks, dtype=jnp.int32), blocks), axis=-1)[..., :width]
    ids = jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, width - ids.shape[-1])], constant_values=blocks)
    return jnp.where(ids == blocks, -1, ids)


def bits_below(limit: Array, word: Array) -> Array:
    """int32 words numbered ``word`` in which the bits of the blocks below ``limit`` are set."""
    count = jnp.clip(limit - WORD * word, 0, WORD)
    # In two shifts, each of less than a word. With a select for whole words instead, ptxas 13.5 gave one branch of a
    # kernel a register that only the other one sets (`row_top_bits`, rows of fewer than 32 blocks).
    half = count >> 1
    return ((1 << half) << (count - half)) - 1


def popcount(x: Array) -> Array:
    """How many bits of an int32 are set; not every lowering has an instruction for it."""
    x = x - (lax.shift_right_logical(x, 1) & 0x55555555)
    x = (x & 0x33333333) + (lax.shift_right_logical(x, 2) & 0x33333333)
    x = (x + lax.shift_right_logical(x, 4)) & 0x0F0F0F0F
    return lax.shift_right_logical(x * 0x01010101, 24)


def lowest_bits(word: Array, count: Array) -> Array:
    """The int32 ``word`` without its set bits beyond the first ``count``."""
    # The position of set bit number ``count``, by halves.
    position, left = jnp.zeros_like(word), count
    for width in (16, 8, 4, 2, 1):
        here = popcount(lax.shift_right_logical(word, position) & ((1 << width) - 1))
        beyond = left >= here
        left, position = jnp.where(beyond, left - here, left), jnp.where(beyond, position + width, position)
    return jnp.where(count < popcount(word), word & ((1 << position) - 1), word)
