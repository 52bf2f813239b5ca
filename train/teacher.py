"""The Forecast's teacher: the base model's own attention on a grid of fine keys (docs/semantics.md section 11).

A fine key is the mean of two neighbouring keys, one each token. Its softmax per query head, summed over the group and
brought to the grid of compressed keys by a maximum, says which blocks the frozen base attends to in training and what
the Forecast has to predict. Everything runs over chunks of queries and tiles of keys: no array has both a query and a
key axis of full length.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.pallas_kernels.block_selection import pool_to_blocks
from sparda_jax.train._rows import (
    KEY_TILE,
    QUERY_CHUNK,
    BlockSets,
    Keys,
    Queries,
    SelectionGrid,
    accumulated,
    block_sets,
    check_packing,
    count_blocks,
    dot,
    join_chunks,
    make_keys,
    split_queries,
)

__all__ = [
    "TeacherScores",
    "check_packing",
    "route",
    "route_chunk",
    "teacher_scores",
    "top_blocks",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherScores:
    """What the teacher says of each query of a chunk.

    Attributes:
        aligned: on the grid of compressed keys, at least 0; 0 where a window does not exist or is not seen.
        mass: of each block, the sum over the fine keys that end in it; over all blocks it adds up to ``group``.
    """

    aligned: Float[Array, "batch kv_heads chunk windows"]
    mass: Float[Array, "batch kv_heads chunk blocks"]


@functools.partial(jax.jit, static_argnames=("sparse", "chunk", "key_tile"))
def route(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    k: Float[Array, "batch q_len kv_heads head_dim"],
    positions: Int[Array, "batch q_len"],
    valid: Bool[Array, "batch q_len"],
    sparse: SelectionGrid,
    *,
    chunk: int = QUERY_CHUNK,
    key_tile: int = KEY_TILE,
) -> Int[Array, "batch kv_heads q_len selected"]:
    """The blocks that the frozen base attends to in training (docs/semantics.md section 11.3). No gradient.

    `forecast_loss` returns the same ids, so that a step that computes the loss needs no second teacher.

    Args:
        q, k: after RoPE at ``positions``; float32 or bfloat16.
        positions: of each token in its own document; see `check_packing`.
        valid: False for padding, whose q and k may hold anything.
        chunk: queries at a time. key_tile: fine keys at a time.

    Returns:
        Block ids counted from the start of the row (token ``t`` lies in block ``t // block_size``), ascending, -1 at
        the end; ``selected = min(num_selected_blocks, blocks of a row)``. A document's own blocks only. Padding: -1.

    Raises:
        ValueError: q_len is shorter than a window, or key_tile is no multiple of the block.
    """
    q, k = jax.lax.stop_gradient((q, k))
    keys = make_keys(k, positions, valid, sparse, key_tile)
    blocks = count_blocks(q.shape[1], sparse)

    def step(carry: None, queries: Queries) -> tuple[None, Array]:
        scores = teacher_scores(queries, keys, sparse, key_tile)
        return carry, route_chunk(scores, queries, block_sets(queries, blocks, sparse), sparse)

    _, ids = jax.lax.scan(step, None, split_queries(q, positions, valid, chunk))
    return join_chunks(ids, 2)[:, :, : q.shape[1]]


def teacher_scores(queries: Queries, keys: Keys, grid: SelectionGrid, key_tile: int) -> TeacherScores:
    """Softmax over fine keys per query head, summed over the group; then the maximum over each window's fine keys.

    The first sweep over the tiles finds the softmax's denominator, the second its values. Only tiles that some query of
    the chunk sees are visited.
    """
    batch, chunk, kv_heads, group, head_dim = queries.q.shape
    length, stride = keys.fine.shape[2], grid.kernel_stride
    tile = min(key_tile, length)
    # The group's heads are rows of one matrix.
    rows = jnp.transpose(queries.q, (0, 2, 3, 1, 4)).reshape(batch, kv_heads, group * chunk, head_dim)
    first_tile = jnp.min(jnp.where(queries.real, queries.start, length - 1)) // tile
    last_tile = jnp.minimum((queries.index[-1] + 1) // tile, length // tile - 1)

    def logits(number: Array) -> Array:
        fine = jax.lax.dynamic_slice_in_dim(keys.fine, number * tile, tile, axis=2)
        exists = jax.lax.dynamic_slice_in_dim(keys.fine_exists, number * tile, tile, axis=1)
        # Entry f begins with token f - 1. It is seen from there on, although token f may still be ahead by one.
        begins = number * tile + jnp.arange(tile) - 1
        seen = (begins <= queries.index[:, None]) & (begins >= queries.start[..., None]) & exists[:, None]
        z = dot("bhrd,bhfd->bhrf", rows, fine) / np.sqrt(head_dim)
        return jnp.where(seen[:, None, None], z.reshape(batch, kv_heads, group, chunk, tile), -jnp.inf)

    def add_to_sum(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        peak, total = carry
        z = logits(number)
        higher = jnp.maximum(peak, jnp.max(z, axis=-1))
        level = jnp.where(jnp.isneginf(higher), 0, higher)
        return higher, total * jnp.exp(peak - level) + jnp.sum(jnp.exp(z - level[..., None]), axis=-1)

    # Zeros that are distributed over devices as the rows are, which loops demand of what they start from.
    none = jnp.where(False, accumulated(rows[..., 0]), 0).reshape(batch, kv_heads, group, chunk)
    peak, total = jax.lax.fori_loop(first_tile, last_tile + 1, add_to_sum, (none - jnp.inf, none))
    log_sum = jnp.where(total > 0, peak + jnp.log(jnp.where(total > 0, total, 1)), 0)[..., None]

    def put(whole: Array, part: Array, number: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(whole, part, number * part.shape[-1], axis=3)

    def add_values(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, first, mass = carry
        probability = jnp.sum(jnp.exp(logits(number) - log_sum), axis=2)
        strides = probability.reshape(batch, kv_heads, chunk, -1, stride)
        blocks = probability.reshape(batch, kv_heads, chunk, -1, grid.block_size)
        return (
            put(largest, jnp.max(strides, axis=-1), number),
            put(first, strides[..., 0], number),
            put(mass, jnp.sum(blocks, axis=-1), number),
        )

    def empty(size: int) -> Array:
        return jnp.broadcast_to(none[:, :, 0, :, None], (batch, kv_heads, chunk, size))

    steps, blocks = length // stride, length // grid.block_size
    start = (empty(steps), empty(steps), empty(blocks))
    largest, first, mass = jax.lax.fori_loop(first_tile, last_tile + 1, add_values, start)
    # Window j takes the maximum over fine keys 16j .. 16j + 16, those that begin at tokens 16j - 1 .. 16j + 15.
    after = jnp.pad(first[..., 1:], ((0, 0), (0, 0), (0, 0), (0, 1)))
    aligned = jnp.where(keys.window_exists[:, None, None], jnp.maximum(largest, after), 0)
    return TeacherScores(aligned=aligned, mass=mass)


def top_blocks(
    scores: Float[Array, "batch kv_heads chunk blocks"], allowed: Bool[Array, "batch 1 chunk blocks"], count: int
) -> Int[Array, "batch kv_heads chunk selected"]:
    """The ``count`` largest scores, the lowest block among equals; those that are not ``allowed`` become -1."""
    blocks = scores.shape[-1]
    _, ids = jax.lax.top_k(scores, min(count, blocks))
    taken = jnp.take_along_axis(jnp.broadcast_to(allowed, scores.shape), ids, axis=-1)
    ids = jnp.sort(jnp.where(taken, ids, blocks), axis=-1)
    return jnp.where(ids == blocks, -1, ids)


def route_chunk(
    scores: TeacherScores, queries: Queries, sets: BlockSets, grid: SelectionGrid
) -> Int[Array, "batch kv_heads chunk selected"]:
    """The teacher's blocks. The block after the query's own may win a place, which then stays empty (as published)."""
    blocks = sets.document.shape[-1]
    pooled = pool_to_blocks(scores.aligned, grid.block_size // grid.kernel_stride)[..., :blocks]
    ranked = jnp.where(sets.document, jnp.where(sets.forced, jnp.inf, pooled), -jnp.inf)
    return top_blocks(ranked, sets.past, grid.num_selected_blocks)
