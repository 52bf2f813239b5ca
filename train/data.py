"""Batches: a function of (seed, number) alone, whichever process asks and whatever was asked before."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int32, Int64

from sparda_jax.config import SparseConfig
from sparda_jax.train.corpus import Corpus
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.mixture import MixedRows, ShuffledRows
from sparda_jax.train.packing import Packing, Pieces, cut, join, pack, shortest_document
from sparda_jax.train.token_arrays import TokenArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of documents.

    Attributes:
        tokens: ids, 0 in the padding.
        positions: of each token in its own document, from 0.
        segments: 1, 2, ... for the documents of a row, 0 for padding. A document starts at a multiple of the block
            size, so a block belongs to one segment.
    """

    tokens: Int32[np.ndarray, "rows seq_len"]
    positions: Int32[np.ndarray, "rows seq_len"]
    segments: Int32[np.ndarray, "rows seq_len"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Document numbers to train on and to validate with."""

    train: Int64[np.ndarray, " documents"]
    validation: Int64[np.ndarray, " documents"]


def hold_out(corpus: Corpus, shortest: int, count: int) -> Split:
    """Sets ``count`` documents of at least ``shortest`` tokens aside, evenly over the corpus, at most a tenth of them.

    Whole documents: a row of the training set never shows a part of one.
    """
    usable = np.flatnonzero(corpus.lengths >= shortest)
    count = min(count, len(usable) // 10)
    held = usable[np.linspace(0, len(usable) - 1, count).astype(np.int64)]
    rest = np.ones(len(corpus.lengths), bool)
    rest[held] = False
    return Split(train=np.flatnonzero(rest), validation=held)


class TrainingRows:
    """Packed rows in a new random order every epoch; no row comes twice before all have come.

    Args:
        corpus, documents: which documents of a corpus to read.
        seq_len: tokens of a row, a multiple of the block size.
        sparse: of the model.
        seed: of the order.
        batch_rows: rows of a batch, over all processes.
        mixture: from `read_mixture`; a row has documents of one domain then, and every domain its own epochs. Empty:
            domains don't count.
        process, num_processes: this process gets the rows ``process * n .. process * n + n - 1`` of every batch,
            ``n = batch_rows / num_processes``.

    Attributes:
        packing: of all rows, a domain's one behind the other.
        domain_rows: how many there are of each domain of the mixture.

    Raises:
        TrainingError: no document, or none of a domain, is long enough, or the rows of a batch can't be shared out
            evenly.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: Int64[np.ndarray, " documents"],
        *,
        seq_len: int,
        sparse: SparseConfig,
        seed: int,
        batch_rows: int,
        mixture: Mapping[str, int] = {},
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        if batch_rows % num_processes:
            raise TrainingError(f"{batch_rows} rows a step can't be shared out evenly to {num_processes} processes")

        def packed(chosen: Int64[np.ndarray, " documents"]) -> Packing:
            pieces = cut(corpus.starts[chosen], corpus.lengths[chosen], seq_len, shortest_document(sparse))
            return pack(pieces, seq_len, sparse.block_size)

        self.domain_rows: dict[str, int] = {}
        if mixture:
            packings = []
            for name in mixture:
                try:
                    packings.append(packed(np.intersect1d(documents, corpus.domains[name], assume_unique=True)))
                except TrainingError as error:
                    raise TrainingError(f"domain {name}: {error}") from error
                self.domain_rows[name] = packings[-1].num_rows
            self.packing, self._order = join(packings), MixedRows(mixture, self.domain_rows, seed)
        else:
            self.packing = packed(documents)
            self._order = ShuffledRows(self.packing.num_rows, seed)
        self._tokens, self._seq_len, self._block_size = corpus.tokens, seq_len, sparse.block_size
        self._batch_rows = batch_rows
        self._local = batch_rows // num_processes
        self._first = process * self._local

    @property
    def filled(self) -> float:
        """Share of the rows' tokens that is no padding."""
        return float(self.packing.pieces.lengths.sum()) / (self.packing.num_rows * self._seq_len)

    def batch(self, number: int) -> Batch:
        """This process's rows of batch ``number``."""
        return _gather(self._tokens, self.packing, self.row_numbers(number), self._seq_len, self._block_size)

    def row_numbers(self, number: int) -> Int64[np.ndarray, " rows"]:
        """Which rows of the packing batch ``number`` has."""
        first = number * self._batch_rows + self._first
        return np.array([self._order.row(place) for place in range(first, first + self._local)])


def validation_batches(
    corpus: Corpus,
    documents: Int64[np.ndarray, " documents"],
    *,
    seq_len: int,
    sparse: SparseConfig,
    batch_rows: int,
    max_rows: int,
) -> list[Batch]:
    """Rows with the beginning of one document each; the last batch is filled up with empty rows.

    Raises:
        TrainingError: no document is long enough.
    """
    lengths = np.minimum(corpus.lengths[documents], seq_len)
    pieces = cut(corpus.starts[documents], lengths, seq_len, shortest_document(sparse))
    kept = np.linspace(0, len(pieces.starts) - 1, min(max_rows, len(pieces.starts))).astype(np.int64)
    pieces = Pieces(starts=pieces.starts[kept], lengths=pieces.lengths[kept], dropped_tokens=pieces.dropped_tokens)
    rows = -(-len(kept) // batch_rows) * batch_rows
    offsets = np.minimum(np.arange(rows + 1), len(kept)).astype(np.int64)
    packing = Packing(pieces=pieces, offsets=offsets)
    numbers = np.arange(rows).reshape(-1, batch_rows)
    return [_gather(corpus.tokens, packing, n, seq_len, sparse.block_size) for n in numbers]


def _gather(
    tokens: TokenArray, packing: Packing, numbers: Int64[np.ndarray, " rows"], seq_len: int, block_size: int
) -> Batch:
    shape = (len(numbers), seq_len)
    batch = Batch(
        tokens=np.zeros(shape, np.int32), positions=np.zeros(shape, np.int32), segments=np.zeros(shape, np.int32)
    )
    for row, number in enumerate(numbers):
        place = 0
        first, last = packing.offsets[number], packing.offsets[number + 1]
        for segment, piece in enumerate(range(first, last), 1):
            start, length = packing.pieces.starts[piece], packing.pieces.lengths[piece]
            batch.tokens[row, place : place + length] = tokens[start : start + length]
            batch.positions[row, place : place + length] = np.arange(length)
            batch.segments[row, place : place + length] = segment
            place += -(-length // block_size) * block_size
    return batch
