"""What the kernels of block selection share, whatever they are lowered through."""

import jax.numpy as jnp
from jax import Array, lax


def pages_seen(visible: Array, blocks: int) -> Array:
    """How many pages of a sequence hold a visible window, at most ``blocks``."""
    return jnp.where(visible > 0, jnp.minimum(lax.div(visible, 4) + 1, blocks), 0)


def sort_key(scores: Array) -> Array:
    """int32 in the order of the float32 scores, for which -0 is 0 and NaN and +inf are the largest finite number."""
    largest = jnp.finfo(jnp.float32).max
    scores = jnp.where(scores <= largest, scores, largest)
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


LOWEST_KEY, FORCED_KEY = -(2**31), 0x7F800000
"""Below every score's key, and above: for blocks that are never and always chosen."""
