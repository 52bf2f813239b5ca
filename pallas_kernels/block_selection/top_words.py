"""The largest scores of a row as bits, inside a Triton-lowered kernel whose program holds the row in registers."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.pallas_kernels.block_selection.kernel_parts import LOWEST_KEY, sort_key
from sparda_jax.pallas_kernels.block_selection.prefill_bits import WORD, lowest_bits, popcount


def top_words(score: Float[Array, "width"], competes: Bool[Array, "width"], free: int) -> Int[Array, "words"]:
    """The ``free`` largest scores among those that compete, as int32 words of bits; ties go to the lowest place.

    The least of them is found by halving an interval of the integer images of the scores, which ends as soon as a
    threshold separates exactly so many.
    """
    width = score.shape[0]
    # As many groups of scores as there are free places: so many scores reach the least of the groups' largest.
    groups = pl.next_power_of_2(max(free, 1))
    key = jnp.where(competes, sort_key(score), LOWEST_KEY)
    lowest = jnp.min(jnp.where(competes, key, 2**31 - 1))
    if groups < width:
        lowest = jnp.maximum(lowest, jnp.min(jnp.max(key.reshape(width // groups, groups), axis=0)))

    def halve(state):
        low, high, _ = state
        # The mean, without a sum that overflows.
        middle = (low & high) + ((low ^ high) >> 1)
        reached = jnp.sum((key >= middle).astype(jnp.int32))
        enough = reached >= free
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            (reached == free).astype(jnp.int32),
        )

    def unsettled(state):
        low, high, exact = state
        return (exact == 0) & (low + 1 < high)

    # At least so many reach the threshold, and fewer are above it.
    threshold, *_ = lax.while_loop(unsettled, halve, (lowest, jnp.max(key) + 1, jnp.int32(0)))

    def packed(chosen: Array) -> Array:
        lanes = chosen.astype(jnp.int32).reshape(width // WORD, WORD)
        return jnp.sum(lanes << jnp.arange(WORD)[None], axis=1)

    above, equal = packed(key > threshold), packed((key == threshold) & competes)
    count = popcount(equal)
    left = free - jnp.sum(popcount(above)) - (jnp.cumsum(count) - count)
    return above | lowest_bits(equal, jnp.clip(left, 0, count))
