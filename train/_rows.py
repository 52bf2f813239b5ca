"""Rows of tokens as the teacher and the loss see them: keys in full, queries in chunks, who sees what.

Rows may hold several documents one after the other. Each starts at a multiple of ``block_size`` (what is left of a
block is padding that is not ``valid``), its positions start at 0, and no query sees another document: a document gets
what it gets alone.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.pallas_kernels.compressed_keys import compress_windows
from sparda_jax.pallas_kernels.fine_softmax import has_kernels

# Queries of a chunk and fine keys of a tile. The largest array has batch * heads * QUERY_CHUNK * KEY_TILE float32.
QUERY_CHUNK = 256
KEY_TILE = 2048
# With kernels the largest has batch * kv_heads * KERNEL_CHUNK * windows, and small chunks would cost launches.
KERNEL_CHUNK = 2048


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
        past: blocks of the document up to the query's own.
        forced: the past blocks that are always selected.
    """

    past: Bool[Array, "batch 1 chunk blocks"]
    forced: Bool[Array, "batch 1 chunk blocks"]


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


def chunk_of(chunk: int | None, q: Float[Array, "batch q_len kv_heads group head_dim"], grid: SelectionGrid) -> int:
    """Queries of a chunk, where the caller leaves it open."""
    if chunk is not None:
        return chunk
    kernels = has_kernels(q.dtype, q.shape[-1], grid.kernel_stride, grid.block_size)
    return KERNEL_CHUNK if kernels else QUERY_CHUNK


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
    positions: Int[Array, "batch length"],
    valid: Bool[Array, "batch length"],
    chunk: int,
    begin: Int[Array, ""],
) -> Queries:
    """All queries, with the chunks in front, for a scan; the last chunk is filled with padding.

    Args:
        positions, valid: of the whole row. begin: where in the row the first query stands.
    """
    count = q.shape[1]
    index = begin + jnp.arange(count + -count % chunk, dtype=jnp.int32)
    starts = jnp.where(valid, jnp.arange(valid.shape[1], dtype=jnp.int32) - positions, 0)
    start, real = (jax.lax.dynamic_slice_in_dim(x, begin, count, axis=1) for x in (starts, valid))
    return Queries(
        q=split_chunks(q, chunk),
        index=index.reshape(-1, chunk),
        start=split_chunks(start, chunk),
        real=split_chunks(real, chunk),
    )


def split_chunks(x: Array, chunk: int) -> Array:
    """[batch, q_len, ...] -> [chunks, batch, chunk, ...], filled up with zeros to whole chunks."""
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
    """A product accumulated in float32 at least, exact for two bfloat16 factors and without TF32 for two others.

    Of a float32 and a bfloat16 factor a GPU's tensor cores take 10 bits of the former (TF32), all of the latter.
    """
    exact = a.dtype == b.dtype and a.dtype != jnp.bfloat16
    if a.dtype != b.dtype:
        a, b = accumulated(a), accumulated(b)
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def block_sets(queries: Queries, blocks: int, grid: SelectionGrid) -> BlockSets:
    """The past and the forced blocks of each query."""
    ids = jnp.arange(blocks)
    first, own = (x[:, None, :, None] for x in document_blocks(queries, grid))
    past = (ids >= first) & (ids <= own)
    forced = past & ((ids < first + grid.init_blocks) | (ids >= own - grid.local_blocks))
    return BlockSets(past=past, forced=forced)


def document_blocks(
    queries: Queries, grid: SelectionGrid
) -> tuple[Int[Array, "batch chunk"], Int[Array, "batch chunk"]]:
    """The block in which each query's document begins, and the query's own; -1 for the own block of padding."""
    own = jnp.where(queries.real, queries.index // grid.block_size, -1)
    return (queries.start // grid.block_size).astype(jnp.int32), own.astype(jnp.int32)


def begun_windows(queries: Queries, keys: Keys, grid: SelectionGrid) -> Bool[Array, "batch 1 chunk windows"]:
    """The windows of each query's document that begin at or before it: those that the loss looks at."""
    begins = jnp.arange(keys.window_exists.shape[-1]) * grid.kernel_stride
    begun = (begins <= queries.index[:, None]) & (begins >= queries.start[..., None]) & keys.window_exists[:, None]
    return begun[:, None]


def ended_windows(queries: Queries, keys: Keys, grid: SelectionGrid) -> Bool[Array, "batch 1 chunk windows"]:
    """The windows of each query's document that end at or before it: those that serving scores."""
    begins = jnp.arange(keys.window_exists.shape[-1]) * grid.kernel_stride
    ended = (begins + grid.kernel_size - 1 <= queries.index[:, None]) & keys.window_exists[:, None]
    return (ended & (begins >= queries.start[..., None]))[:, None]


def log_sum_exp(x: Float[Array, "*rows windows"]) -> Float[Array, "*rows 1"]:
    """Over the last axis, and 0 where nothing is finite."""
    peak = jnp.max(x, axis=-1, keepdims=True)
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    total = jnp.sum(jnp.exp(x - peak), axis=-1, keepdims=True)
    return jnp.where(total > 0, peak + safe_log(total), 0)


def safe_log(x: Array) -> Array:
    return jnp.log(jnp.where(x > 0, x, 1))
