"""Documents into rows of one length: cut where they are too long, joined where they are short, never mixed up."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from sparda_jax.config import SparseConfig
from sparda_jax.train.errors import TrainingError


def shortest_document(sparse: SparseConfig) -> int:
    """Tokens from which on some query has a block to choose: below it every visible block is always selected."""
    return (sparse.init_blocks + sparse.local_blocks + 1) * sparse.block_size + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """Parts of documents, by their place in the corpus.

    Attributes:
        starts: token offsets in the corpus.
        lengths: tokens, at most a row's.
        dropped_tokens: of documents, and ends of documents, in which no query has a block to choose.
    """

    starts: Int64[np.ndarray, " pieces"]
    lengths: Int64[np.ndarray, " pieces"]
    dropped_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """Rows of pieces: row r holds the pieces ``offsets[r] .. offsets[r + 1] - 1``, one behind the other.

    Attributes:
        pieces: in the order of the rows.
        offsets: of the rows in ``pieces``.
    """

    pieces: Pieces
    offsets: Int64[np.ndarray, " rows_plus_one"]

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1


def cut(
    starts: Int64[np.ndarray, " documents"], lengths: Int64[np.ndarray, " documents"], seq_len: int, shortest: int
) -> Pieces:
    """Cuts documents into pieces of ``seq_len`` tokens and a rest; pieces below ``shortest`` tokens are dropped.

    Raises:
        TrainingError: nothing is left.
    """
    whole, rest = np.divmod(lengths, seq_len)
    counts = whole + (rest > 0)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes = np.minimum(lengths[document] - number * seq_len, seq_len)
    keep = sizes >= shortest
    if not keep.any():
        longest = int(lengths.max(initial=0))
        raise TrainingError(
            f"the longest of {len(lengths)} documents has {longest} tokens, but below {shortest} every block is always "
            "selected and there is nothing to learn: give longer documents, or a model with a smaller window_size"
        )
    return Pieces(
        starts=(starts[document] + number * seq_len)[keep],
        lengths=sizes[keep],
        dropped_tokens=int(sizes[~keep].sum()),
    )


def pack(pieces: Pieces, seq_len: int, block_size: int) -> Packing:
    """Best fit, longest first: each piece goes to the fullest row that still has room.

    A piece starts at a multiple of ``block_size``, so that no block holds tokens of two documents.
    """
    sizes = -(-pieces.lengths // block_size)
    order = np.argsort(-sizes, kind="stable")
    rooms: list[list[int]] = [[] for _ in range(seq_len // block_size + 1)]
    # Bit r is set when some row has room for exactly r blocks: a piece takes the lowest bit from its size on.
    open_rooms = 0
    row_of = np.empty(len(order), np.int64)
    num_rows = 0
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rooms[room].pop()
            if not rooms[room]:
                open_rooms ^= 1 << room
        else:
            room, row = len(rooms) - 1, num_rows
            num_rows += 1
        left = room - size
        if left:
            rooms[left].append(row)
            open_rooms |= 1 << left
        row_of[piece] = row
    by_row = order[np.argsort(row_of[order], kind="stable")]
    packed = dataclasses.replace(pieces, starts=pieces.starts[by_row], lengths=pieces.lengths[by_row])
    return Packing(pieces=packed, offsets=np.searchsorted(row_of[by_row], np.arange(num_rows + 1)).astype(np.int64))


def join(packings: Sequence[Packing]) -> Packing:
    """The rows of all, in this order."""
    before = np.cumsum([0, *(packing.offsets[-1] for packing in packings)])
    return Packing(
        pieces=Pieces(
            starts=np.concatenate([packing.pieces.starts for packing in packings]),
            lengths=np.concatenate([packing.pieces.lengths for packing in packings]),
            dropped_tokens=sum(packing.pieces.dropped_tokens for packing in packings),
        ),
        offsets=np.concatenate([[0], *(p.offsets[1:] + n for p, n in zip(packings, before, strict=False))]),
    )
