"""The Forecast's teacher: the base model's own attention on a grid of fine keys (docs/semantics.md section 11).

A fine key is the mean of two neighbouring keys, one each token. Its softmax per query head, summed over the group and
brought to the grid of compressed keys by a maximum, says which blocks the frozen base attends to in training and what
the Forecast has to predict. Everything runs over chunks of queries: no array has both a query and a key axis of full
length.
"""

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparda_jax.pallas_kernels.block_selection import bits_to_ids, choose_blocks, pool_to_blocks
from sparda_jax.pallas_kernels.fine_softmax import fine_softmax
from sparda_jax.train._rows import (
    KEY_TILE,
    Keys,
    Queries,
    SelectionGrid,
    check_packing,
    chunk_of,
    count_blocks,
    document_blocks,
    dot,
    ended_windows,
    join_chunks,
    log_sum_exp,
    make_keys,
    split_queries,
)

__all__ = [
    "Teacher",
    "TeacherScores",
    "check_packing",
    "coarse_scores",
    "route",
    "route_bits",
    "route_chunk",
    "selector_scores",
    "teacher_scores",
    "top_blocks",
]


class Teacher(enum.StrEnum):
    """Whose attention the Forecast is compared with in the loss."""

    FINE = "fine"  # softmax over keys of two tokens, one each token
    COARSE = "coarse"  # softmax over the compressed keys that serving scores; see `coarse_scores`


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
    chunk: int | None = None,
    key_tile: int = KEY_TILE,
) -> Int[Array, "batch kv_heads q_len selected"]:
    """The blocks that the frozen base attends to in training (docs/semantics.md section 11.3). No gradient.

    `forecast_loss` returns the same blocks, so that a step that computes the loss needs no second teacher.

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
    bits = route_bits(q, k, positions, valid, sparse, chunk=chunk, key_tile=key_tile)
    return bits_to_ids(bits, min(sparse.num_selected_blocks, count_blocks(q.shape[1], sparse)))


def route_bits(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    k: Float[Array, "batch q_len kv_heads head_dim"],
    positions: Int[Array, "batch q_len"],
    valid: Bool[Array, "batch q_len"],
    sparse: SelectionGrid,
    *,
    chunk: int | None = None,
    key_tile: int = KEY_TILE,
) -> UInt32[Array, "batch kv_heads q_len words"]:
    """The blocks of `route` as bits, see `choose_blocks`."""
    q, k = jax.lax.stop_gradient((q, k))
    keys = make_keys(k, positions, valid, sparse, key_tile)
    blocks = count_blocks(q.shape[1], sparse)

    def step(carry: None, queries: Queries) -> tuple[None, Array]:
        return carry, route_chunk(teacher_scores(queries, keys, sparse, key_tile), queries, sparse, blocks)

    queries = split_queries(q, positions, valid, chunk_of(chunk, q, sparse), jnp.int32(0))
    _, bits = jax.lax.scan(step, None, queries)
    return join_chunks(bits, 2)[:, :, : q.shape[1]]


def teacher_scores(queries: Queries, keys: Keys, grid: SelectionGrid, key_tile: int) -> TeacherScores:
    """Softmax over fine keys per query head, summed over the group; then the maximum over each window's fine keys."""
    # Entry f begins with token f - 1. It is seen from there on, although token f may still be ahead by one.
    ahead = jnp.take(keys.fine_exists, queries.index + 1, axis=1, mode="fill", fill_value=False)
    found = fine_softmax(
        queries.q,
        keys.fine,
        (queries.start + 1).astype(jnp.int32),
        jnp.where(queries.real, queries.index + ahead, -1).astype(jnp.int32),
        stride=grid.kernel_stride,
        block_size=grid.block_size,
        tile=min(key_tile, keys.fine.shape[2]),
    )
    # Window j takes the maximum over fine keys 16j .. 16j + 16, those that begin at tokens 16j - 1 .. 16j + 15.
    after = jnp.pad(found.first[..., 1:], ((0, 0), (0, 0), (0, 0), (0, 1)))
    aligned = jnp.where(keys.window_exists[:, None, None], jnp.maximum(found.largest, after), 0)
    return TeacherScores(aligned=aligned, mass=found.mass)


def coarse_scores(queries: Queries, keys: Keys, grid: SelectionGrid, fine: TeacherScores) -> TeacherScores:
    """The teacher on the deployed grid: what InfLLM-V2 ranks windows by (docs/semantics.md section 11.9).

    A window is seen once it has ended, and there is no alignment; ``mass`` stays that of the fine keys.
    """
    ended = ended_windows(queries, keys, grid)
    return dataclasses.replace(fine, aligned=jnp.where(ended, selector_scores(queries, keys, ended), 0))


def selector_scores(
    queries: Queries, keys: Keys, ended: Bool[Array, "batch 1 chunk windows"]
) -> Float[Array, "batch kv_heads chunk windows"]:
    """The softmax of each of the layer's own queries over the windows that have ended, summed over the group (4.1)."""

    def products(head: Array) -> Array:
        rows = jax.lax.dynamic_index_in_dim(queries.q, head, axis=3, keepdims=False)
        return dot("bqhd,bhwd->bhqw", rows, keys.compressed)

    def add_head(head: Array, total: Array) -> Array:
        logits = jnp.where(ended, products(head) / np.sqrt(queries.q.shape[-1]), -jnp.inf)
        return total + jnp.exp(logits - log_sum_exp(logits))

    # Zeros of the type that a sum has, on a mesh, too; nothing is computed for them.
    start = jnp.where(False, products(jnp.int32(0)), 0)
    return jax.lax.fori_loop(0, queries.q.shape[3], add_head, start)


def route_chunk(
    scores: TeacherScores, queries: Queries, grid: SelectionGrid, blocks: int
) -> UInt32[Array, "batch kv_heads chunk words"]:
    """The teacher's blocks as bits. The block after the query's own may win a place, which then stays empty (as
    published).
    """
    return top_blocks(pool_to_blocks(scores.aligned, grid.block_size // grid.kernel_stride), queries, grid, blocks)


def top_blocks(
    scores: Float[Array, "batch kv_heads chunk more_blocks"], queries: Queries, grid: SelectionGrid, blocks: int
) -> UInt32[Array, "batch kv_heads chunk words"]:
    """The best of the row's ``blocks`` blocks for each query, see `choose_blocks`."""
    first, own = document_blocks(queries, grid)
    return choose_blocks(
        scores[..., :blocks],
        first,
        own,
        init_blocks=grid.init_blocks,
        local_blocks=grid.local_blocks,
        num_selected=grid.num_selected_blocks,
    )
