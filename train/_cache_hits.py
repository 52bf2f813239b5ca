"""How often a cache would have held the blocks that a Forecast chooses, token after token, as decode reads them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from sparda_jax.pallas_kernels.block_selection import bits_to_mask
from sparda_jax.train._rows import SelectionGrid, count_blocks, split_chunks

# Tokens at a time. The largest arrays have batch * kv_heads * CHUNK * blocks int32.
CHUNK = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheHits:
    """Sums over the (query, KV head) pairs that have a choice, see `SelectionQuality`. Those of several calls add up.

    Each KV head has a cache of its own, and the least recently used block makes room (of several, that with the highest
    number). The query's own block never has to come from anywhere and is left out.

    Attributes:
        chosen: blocks that the Forecast chose or that are always selected.
        hits, hits_of_twice: how many of these were in a cache of as many slots as blocks are selected, or of twice as
            many. The former are the blocks that the token before had selected, too.
    """

    chosen: Int[Array, ""]
    hits: Int[Array, ""]
    hits_of_twice: Int[Array, ""]


def cache_hits(
    bits: UInt32[Array, "batch kv_heads length words"],
    positions: Int[Array, "batch length"],
    valid: Bool[Array, "batch length"],
    grid: SelectionGrid,
    *,
    chunk: int = CHUNK,
) -> CacheHits:
    """Replays the selections of whole rows.

    Args:
        bits: the selected blocks of each token, as `choose_blocks` returns them; padding has none.
        positions, valid: see `check_packing`.
        chunk: tokens at a time, for memory and time only.
    """
    length, width = bits.shape[2], grid.num_selected_blocks
    blocks = count_blocks(length, grid)
    chunk = min(chunk, length)
    ids = jnp.arange(blocks)
    start = jnp.where(valid, jnp.arange(length) - positions, 0) // grid.block_size

    def step(last: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, CacheHits]:
        index, first, chunk_bits = inputs
        selected = bits_to_mask(jnp.swapaxes(chunk_bits, 1, 2), blocks)
        uses = jnp.where(selected, index[:, None], -1)
        # When each block was last used, before each token and after the chunk.
        latest = jax.lax.cummax(jnp.concatenate([last[:, :, None], uses], axis=2), axis=2)
        first, own = first[:, None, :, None], (index // grid.block_size)[:, None]
        # Each block of a document was once a query's own, and those of earlier documents make room first.
        before = latest[:, :, :-1]
        asked = selected & (ids != own) & (own - first >= width)
        ordered = jnp.sort(before, axis=-1)

        def hits(slots: int) -> Array:
            oldest = ordered[..., blocks - min(slots, blocks), None]
            newer, level = before > oldest, before == oldest
            room = slots - jnp.sum(newer, axis=-1, keepdims=True)
            held = newer | (level & (jnp.cumsum(level, axis=-1) <= room))
            return jnp.sum(asked & held)

        found = CacheHits(chosen=jnp.sum(asked), hits=hits(width), hits_of_twice=hits(2 * width))
        return latest[:, :, -1], found

    index = jnp.arange(length + -length % chunk, dtype=jnp.int32).reshape(-1, chunk)
    inputs = (index, split_chunks(start, chunk), split_chunks(jnp.swapaxes(bits, 1, 2), chunk))
    nothing = jnp.full((*bits.shape[:2], blocks), -1, jnp.int32)
    _, found = jax.lax.scan(step, nothing, inputs)
    return jax.tree.map(jnp.sum, found)
