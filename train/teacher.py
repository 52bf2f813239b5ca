"""The Forecast's teacher: the base model's own attention on a grid of fine keys (docs/semantics.md section 11).

A fine key is the mean of two neighbouring keys, one each token. Its softmax per query head, summed over the group and
brought to the grid of compressed keys by a maximum, says which blocks the frozen base attends to in training and what
the Forecast has to predict. Everything runs over chunks of queries and tiles of keys: no array has both a query and a
key axis of full length.

Rows may hold several documents one after the other. Each starts at a multiple of ``block_size`` (what is left of a
block is padding that is not ``valid``), its positions start at 0, and no query sees another document: a document gets
what it gets alone.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.pallas_kernels.block_selection import pool_to_blocks
from sparda_jax.pallas_kernels.compressed_keys import compress_windows

# Queries of a chunk and fine keys of a tile. The largest array has batch * heads * QUERY_CHUNK * KEY_TILE float32.
QUERY_CHUNK = 256
KEY_TILE = 2048


class SelectionGrid(Protocol):
    """What the teacher and the loss need of a `SparseConfig`; tests use smaller grids."""

    @property
    def kernel_size(self) -> int: ...
    @property
    def kernel_stride(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def init_blocks(self) -> int: ...
    @property
    def local_blocks(self) -> int: ...
    @property
    def num_selected_blocks(self) -> int: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys of whole rows, padded to ``length``, a multiple of the block and of the tile.

    Attributes:
        fine: entry f is the mean of the keys of tokens f - 1 and f.
        compressed: entry j is the mean of the keys of ``kernel_size`` tokens from ``kernel_stride * j`` on.
        fine_exists, window_exists: all tokens of the entry are real and of one document.
    """

    fine: Float[Array, "batch kv_heads length head_dim"]
    compressed: Float[Array, "batch kv_heads windows head_dim"]
    fine_exists: Bool[Array, "batch length"]
    window_exists: Bool[Array, "batch windows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Queries:
    """A chunk of query rows.

    Attributes:
        q: after RoPE, by KV head.
        index: where each query stands in its row. start: where its document starts. real: it is no padding.
    """

    q: Float[Array, "batch chunk kv_heads group head_dim"]
    index: Int[Array, "chunk"]
    start: Int[Array, "batch chunk"]
    real: Bool[Array, "batch chunk"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSets:
    """Which blocks of a row are open to each query of a chunk.

    Attributes:
        document: blocks from the document's first one on, those after the query's own included.
        past: blocks of the document up to the query's own.
        forced: the past blocks that are always selected.
    """

    document: Bool[Array, "batch 1 chunk blocks"]
    past: Bool[Array, "batch 1 chunk blocks"]
    forced: Bool[Array, "batch 1 chunk blocks"]


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


def check_packing(positions: np.ndarray, valid: np.ndarray, grid: SelectionGrid) -> None:
    """Checks, on the host, what the teacher and the loss take for granted about a batch.

    Args:
        positions: [batch, q_len] integers, from 0 in each document.
        valid: [batch, q_len], False for padding.

    Raises:
        ValueError: a row has no window's length, a document starts within a block, or its positions do not count up.
    """
    batch, length = positions.shape
    if length < grid.kernel_size:
        raise ValueError(f"q_len={length}: a row needs at least the {grid.kernel_size} tokens of a compressed key")
    starts = np.arange(length) - positions
    misplaced = valid & ((starts < 0) | (starts % grid.block_size != 0))
    if misplaced.any():
        row, token = np.argwhere(misplaced)[0]
        raise ValueError(
            f"positions[{row}, {token}]={positions[row, token]}: a document would start at token {starts[row, token]}, "
            f"which must be a multiple of block_size={grid.block_size}; pad the document before it"
        )
    follows = np.zeros((batch, length), bool)
    follows[:, 1:] = valid[:, :-1] & (starts[:, :-1] == starts[:, 1:])
    broken = valid & (positions > 0) & ~follows
    if broken.any():
        row, token = np.argwhere(broken)[0]
        raise ValueError(
            f"positions[{row}, {token}]={positions[row, token]} follows no token of the same document: "
            "positions must count up by one from 0, without padding in between"
        )


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
        ValueError: q_len is shorter than a window.
    """
    keys = make_keys(k, positions, valid, sparse, key_tile)
    blocks = count_blocks(q.shape[1], sparse)

    def step(carry: None, queries: Queries) -> tuple[None, Array]:
        scores = teacher_scores(queries, keys, sparse, key_tile)
        return carry, route_chunk(scores, queries, block_sets(queries, blocks, sparse), sparse)

    _, ids = jax.lax.scan(step, None, split_queries(q, positions, valid, chunk))
    return join_chunks(ids, 2)[:, :, : q.shape[1]]


def count_blocks(length: int, grid: SelectionGrid) -> int:
    return -(-length // grid.block_size)


def make_keys(
    k: Float[Array, "batch q_len kv_heads head_dim"],
    positions: Int[Array, "batch q_len"],
    valid: Bool[Array, "batch q_len"],
    grid: SelectionGrid,
    key_tile: int,
) -> Keys:
    """Fine and compressed keys of whole rows, each rounded once to the dtype of ``k``."""
    length = k.shape[1]
    if length < grid.kernel_size:
        raise ValueError(f"q_len={length}: a row needs at least the {grid.kernel_size} tokens of a compressed key")
    if key_tile % grid.block_size:
        raise ValueError(f"key_tile={key_tile} must be a multiple of block_size={grid.block_size}")
    tile = min(key_tile, count_blocks(length, grid) * grid.block_size)
    after = -length % tile
    document = jnp.pad(jnp.where(valid, jnp.arange(length) - positions, -1), ((0, 0), (0, after)), constant_values=-1)
    # What padding holds must not reach a product, not even times 0.
    k = jnp.pad(jnp.swapaxes(jnp.where(valid[..., None, None], k, 0), 1, 2), ((0, 0), (0, 0), (0, after), (0, 0)))
    before = jnp.pad(k, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    fine = ((accumulated(before) + accumulated(k)) / 2).astype(k.dtype)
    neighbour = jnp.pad(document, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    windows = jnp.arange((length + after) // grid.kernel_stride)
    first = windows * grid.kernel_stride
    last = jnp.minimum(first + grid.kernel_size - 1, length + after - 1)
    whole = (first + grid.kernel_size <= length) & (document[:, first] == document[:, last]) & (document[:, last] >= 0)
    numbers = jnp.broadcast_to(windows, (k.shape[0], windows.size))
    return Keys(
        fine=fine,
        compressed=compress_windows(k, numbers, grid.kernel_size, grid.kernel_stride),
        fine_exists=(document >= 0) & (document == neighbour),
        window_exists=whole,
    )


def split_queries(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    positions: Int[Array, "batch q_len"],
    valid: Bool[Array, "batch q_len"],
    chunk: int,
) -> Queries:
    """All queries, with the chunks in front, for a scan; the last chunk is filled with padding."""
    length = q.shape[1]
    index = jnp.arange(length + -length % chunk)
    return Queries(
        q=split_chunks(q, chunk),
        index=index.reshape(-1, chunk),
        start=split_chunks(jnp.where(valid, index[:length] - positions, index[:length]), chunk),
        real=split_chunks(valid, chunk),
    )


def split_chunks(x: Array, chunk: int) -> Array:
    """[batch, q_len, ...] -> [chunks, batch, chunk, ...]."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def join_chunks(x: Array, axis: int) -> Array:
    """[chunks, ...] with the queries of a chunk at ``axis`` of what follows -> [..., chunks * chunk, ...]."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def accumulated(x: Array) -> Array:
    """``x`` in the dtype that sums are taken in: float32, or float64 as it comes."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def dot(spec: str, a: Array, b: Array) -> Array:
    """A product accumulated in float32 at least, exact for bfloat16 inputs and without TF32 for others."""
    if a.dtype != b.dtype:
        a, b = accumulated(a), accumulated(b)
    precision = None if a.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def block_sets(queries: Queries, blocks: int, grid: SelectionGrid) -> BlockSets:
    """The document's, the past and the forced blocks of each query."""
    ids = jnp.arange(blocks)
    first = (queries.start // grid.block_size)[:, None, :, None]
    own = (queries.index // grid.block_size)[None, None, :, None]
    document = (ids >= first) & queries.real[:, None, :, None]
    past = document & (ids <= own)
    forced = past & ((ids < first + grid.init_blocks) | (ids >= own - grid.local_blocks))
    return BlockSets(document=document, past=past, forced=forced)


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

    zeros = functools.partial(_zeros, like=rows)
    none = zeros((batch, kv_heads, group, chunk))
    peak, total = jax.lax.fori_loop(first_tile, last_tile + 1, add_to_sum, (none - jnp.inf, none))
    log_sum = jnp.where(total > 0, peak + jnp.log(jnp.where(total > 0, total, 1)), 0)[..., None]

    def add_values(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        probability = jnp.sum(jnp.exp(logits(number) - log_sum), axis=2)
        strides = probability.reshape(batch, kv_heads, chunk, -1, stride)
        mass = jnp.sum(probability.reshape(batch, kv_heads, chunk, -1, grid.block_size), axis=-1)
        values = (jnp.max(strides, axis=-1), strides[..., 0], mass)
        put = jax.lax.dynamic_update_slice_in_dim
        return tuple(
            put(whole, part, number * part.shape[-1], axis=3) for whole, part in zip(carry, values, strict=True)
        )

    steps = (length // stride, length // stride, length // grid.block_size)
    empty = tuple(zeros((batch, kv_heads, chunk, size)) for size in steps)
    largest, first, mass = jax.lax.fori_loop(first_tile, last_tile + 1, add_values, empty)
    # Window j takes the maximum over fine keys 16j .. 16j + 16, those that begin at tokens 16j - 1 .. 16j + 15.
    after = jnp.pad(first[..., 1:], ((0, 0), (0, 0), (0, 0), (0, 1)))
    aligned = jnp.where(keys.window_exists[:, None, None], jnp.maximum(largest, after), 0)
    return TeacherScores(aligned=aligned, mass=mass)


def _zeros(shape: tuple[int, ...], like: Array) -> Any:
    return jnp.zeros(shape, jnp.promote_types(like.dtype, jnp.float32))


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
