"""Training data: reading, tokenising once, packing with document boundaries kept, and batches by number alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda_jax.config import ModelConfig, SparseConfig
from sparda_jax.tokenizer import Tokenizer, TokenizerError
from sparda_jax.train import tokenise
from sparda_jax.train.corpus import Corpus, check_tokenizer, load_corpus
from sparda_jax.train.data import Batch, TrainingRows, hold_out, validation_batches
from sparda_jax.train.documents import read_documents
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.packing import cut, pack, shortest_document
from sparda_jax.train.sources import find_sources
from tests.core.support import toy
from tests.serve.tiny_tokenizer import BOS, write_tokenizer

SPARSE = SparseConfig(init_blocks=1, window_size=64, topk=2, dense_len=256)
SHORTEST = 193
SEQ_LEN = 1024


def numbered_corpus(lengths: list[int]) -> Corpus:
    """Every token of the corpus is another number, so that a token says where it comes from."""
    starts = np.cumsum([0, *lengths]).astype(np.int64)
    return Corpus(tokens=np.arange(1, starts[-1] + 1, dtype=np.uint32), starts=starts, fingerprint="numbered")


def write_lines(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer and a folder of texts."""
    write_tokenizer(tmp_path)
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    (texts / "b.txt").write_text("the sky is blue.\n")
    write_lines(texts / "a.jsonl", ["the grass is green.", " \n", "the magic number <|im_end|> é"])
    (texts / "deep" / "c.txt").write_text("hello world")
    (texts / "notes.md").write_text("not read")
    return tmp_path


class TestReading:
    def test_files_in_order_and_once(self, folder: Path) -> None:
        texts = folder / "texts"
        found = [source.path for source in find_sources([texts / "b.txt", texts])]
        assert found == [texts / "b.txt", texts / "a.jsonl", texts / "deep" / "c.txt"]

    def test_documents(self, folder: Path) -> None:
        found = list(read_documents(folder / "texts" / "a.jsonl"))
        assert [d.content for d in found] == ["the grass is green.", "the magic number <|im_end|> é"]
        assert [d.place.rsplit(":")[-1] for d in found] == ["1", "3"]
        assert sum(d.num_bytes for d in found) == (folder / "texts" / "a.jsonl").stat().st_size

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b'{"text": "a"}\n{"text": 3}\n', "2 is no object with a string 'text'"),
            (b'{"body": "a"}\n', "1 is no object with a string 'text'"),
            (b"[1]\n", "1 is no object"),
            (b'{"text": "a"\n', "1 is not valid JSON"),
            (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "1 is not valid JSON"),
            (b'{"text": "a"}\n' + b"[" * 100_000, "2 is not valid JSON"),
            (b'{"text": "\xff"}\n', "1 is not valid UTF-8"),
            (b'{"text": "\\ud800"}\n', "1 is not valid UTF-8"),
        ],
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        file = tmp_path / "x.jsonl"
        file.write_bytes(content)
        with pytest.raises(TrainingError, match=f"x.jsonl:{message}"):
            list(read_documents(file))

    def test_paths_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "x.csv").write_bytes(b"")
        with pytest.raises(TrainingError, match="ends in neither"):
            find_sources([tmp_path / "x.csv"])
        with pytest.raises(TrainingError, match="does not exist"):
            find_sources([tmp_path / "missing.txt"])
        with pytest.raises(TrainingError, match="holds nothing to read"):
            find_sources([tmp_path])


class TestCorpus:
    def test_documents_begin_as_prompts_do(self, folder: Path) -> None:
        corpus = load_corpus([folder / "texts"], folder, folder / "cache")
        tokenizer = Tokenizer.from_pretrained(folder)
        expected = ["the grass is green.", "the magic number <|im_end|> é", "the sky is blue.\n", "hello world"]
        found = [corpus.tokens[a:b].tolist() for a, b in zip(corpus.starts[:-1], corpus.starts[1:], strict=True)]
        assert found == [tokenizer.encode(text) for text in expected]
        assert all(ids[0] == BOS for ids in found)
        assert corpus.tokens[0:1].dtype == np.uint16

    def test_tokenised_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[int, int]] = []
        first = load_corpus([folder / "texts"], folder, folder / "cache", progress=lambda *n: calls.append(n))
        assert calls[0][0] == 0
        assert calls[-1][0] == calls[-1][1] > 0
        monkeypatch.setattr(tokenise, "_write", None)
        again = load_corpus([folder / "texts"], folder, folder / "cache")
        np.testing.assert_array_equal(again.tokens, first.tokens)
        np.testing.assert_array_equal(again.starts, first.starts)

    def test_other_text_or_tokenizer_is_another_corpus(self, folder: Path) -> None:
        before = load_corpus([folder / "texts"], folder, folder / "cache").fingerprint
        (folder / "texts" / "b.txt").write_text("the sky is grey.")
        changed = load_corpus([folder / "texts"], folder, folder / "cache")
        assert changed.fingerprint != before
        write_tokenizer(folder, add_bos_token=False)
        without_bos = load_corpus([folder / "texts"], folder, folder / "cache")
        assert without_bos.tokens.size == changed.tokens.size - 4

    def test_nothing_is_left_of_a_failure(self, folder: Path) -> None:
        (folder / "texts" / "z.jsonl").write_text("{")
        with pytest.raises(TrainingError, match=r"z\.jsonl:1"):
            load_corpus([folder / "texts"], folder, folder / "cache")
        assert list((folder / "cache").iterdir()) == []

    def test_a_cache_that_cannot_be_written(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(TrainingError, match=r"can't be kept there .*--cache"):
            load_corpus([folder / "texts"], folder, tmp_path / "file" / "cache")

    def test_empty_text(self, folder: Path) -> None:
        (folder / "empty.txt").write_text(" \n ")
        with pytest.raises(TrainingError, match=r"no text in .*empty\.txt"):
            load_corpus([folder / "empty.txt"], folder, folder / "cache")

    def test_a_damaged_cache_is_refused(self, folder: Path) -> None:
        corpus = load_corpus([folder / "texts"], folder, folder / "cache")
        file = folder / "cache" / corpus.fingerprint[:16] / "tokens.bin"
        file.write_bytes(file.read_bytes()[:-2])
        with pytest.raises(TrainingError, match="remove it"):
            load_corpus([folder / "texts"], folder, folder / "cache")

    def test_tokenizer_of_another_model(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_pretrained(folder)
        config: ModelConfig = toy().decoder.config
        assert tokenizer.vocab_size > config.vocab_size
        with pytest.raises(TrainingError, match="ids, the model"):
            check_tokenizer(tokenizer, config)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            load_corpus([folder / "texts"], folder / "texts", folder / "cache")


class TestPacking:
    @given(st.lists(st.integers(0, 3 * SEQ_LEN), min_size=1, max_size=40))
    def test_every_token_once_or_dropped(self, lengths: list[int]) -> None:
        corpus = numbered_corpus(lengths)
        try:
            pieces = cut(corpus.starts[:-1], corpus.lengths, SEQ_LEN, SHORTEST)
        except TrainingError:
            assert all(n % SEQ_LEN < SHORTEST for n in lengths if n < SEQ_LEN)
            assert max(lengths) < SHORTEST
            return
        packing = pack(pieces, SEQ_LEN, 64)
        assert pieces.lengths.sum() + pieces.dropped_tokens == sum(lengths)
        assert sorted(zip(packing.pieces.starts, packing.pieces.lengths, strict=True)) == sorted(
            zip(pieces.starts, pieces.lengths, strict=True)
        )
        blocks = -(-packing.pieces.lengths // 64)
        used = np.add.reduceat(blocks, packing.offsets[:-1])
        assert packing.offsets[-1] == len(blocks)
        assert used.max() <= SEQ_LEN // 64
        # No two rows could be one, so at most one row is less than half full.
        assert np.sum(used <= SEQ_LEN // 128) <= 1

    def test_a_piece_goes_where_least_is_left(self) -> None:
        pieces = cut(np.arange(5) * SEQ_LEN, np.array([640, 512, 384, 448, 256]), SEQ_LEN, 65)
        packing = pack(pieces, SEQ_LEN, 64)
        rows = [
            packing.pieces.lengths[a:b].tolist() for a, b in zip(packing.offsets, packing.offsets[1:], strict=False)
        ]
        assert sorted(rows) == [[256], [512, 448], [640, 384]]

    def test_shortest_document_is_where_selection_begins(self) -> None:
        assert shortest_document(SPARSE) == SHORTEST
        assert shortest_document(SparseConfig()) == 34 * 64 + 1

    def test_only_short_documents(self) -> None:
        corpus = numbered_corpus([100, 192])
        with pytest.raises(TrainingError, match="longest of 2 documents has 192 tokens, but below 193"):
            cut(corpus.starts[:-1], corpus.lengths, SEQ_LEN, SHORTEST)


def training_rows(corpus: Corpus, **changes: int) -> TrainingRows:
    settings: dict[str, Any] = {"seq_len": SEQ_LEN, "seed": 3, "batch_rows": 4} | changes
    return TrainingRows(corpus, np.arange(len(corpus.lengths)), sparse=SPARSE, **settings)


def check_segments(corpus: Corpus, batch: Batch) -> None:
    """Consecutive tokens of one document, positions from 0, no block with two documents, zeros elsewhere."""
    for tokens, positions, segments in zip(batch.tokens, batch.positions, batch.segments, strict=True):
        assert not tokens[segments == 0].any()
        assert not positions[segments == 0].any()
        numbers = np.unique(segments[segments > 0])
        assert numbers.tolist() == list(range(1, len(numbers) + 1))
        for number in numbers:
            places = np.flatnonzero(segments == number)
            assert places[0] % 64 == 0
            assert np.array_equal(places, np.arange(places[0], places[0] + len(places)))
            assert np.array_equal(positions[places], np.arange(len(places)))
            offsets = tokens[places] - 1
            assert np.array_equal(offsets, np.arange(offsets[0], offsets[0] + len(places)))
            document = np.searchsorted(corpus.starts, offsets[0], side="right") - 1
            assert offsets[-1] < corpus.starts[document + 1]


class TestBatches:
    lengths = np.random.default_rng(0).integers(1, 2500, 60).tolist()

    def test_rows_hold_whole_pieces_of_documents(self) -> None:
        corpus = numbered_corpus(self.lengths)
        rows = training_rows(corpus)
        for number in range(5):
            check_segments(corpus, rows.batch(number))
        assert 0.7 < rows.filled <= 1

    def test_an_epoch_reads_everything_once_and_the_next_in_another_order(self) -> None:
        rows = training_rows(numbered_corpus(self.lengths), batch_rows=1)
        epochs = [
            [int(rows.row_numbers(e * rows.packing.num_rows + i)[0]) for i in range(rows.packing.num_rows)]
            for e in (0, 1)
        ]
        assert all(sorted(epoch) == list(range(rows.packing.num_rows)) for epoch in epochs)
        assert epochs[0] != epochs[1]
        seen = np.concatenate([rows.batch(i).tokens.ravel() for i in range(rows.packing.num_rows)])
        seen = seen[seen > 0]
        assert len(np.unique(seen)) == len(seen) == rows.packing.pieces.lengths.sum()

    def test_any_batch_first(self) -> None:
        """Batch 7 is what it is, whatever was asked for before, and whether the order of epochs is known already."""
        corpus = numbered_corpus(self.lengths)
        in_order = [training_rows(corpus).batch(i) for i in range(20)]
        rows = training_rows(corpus)
        for number in (19, 7, 0):
            np.testing.assert_array_equal(rows.batch(number).tokens, in_order[number].tokens)

    def test_seed_changes_the_order(self) -> None:
        corpus = numbered_corpus(self.lengths)
        assert not np.array_equal(training_rows(corpus).row_numbers(0), training_rows(corpus, seed=4).row_numbers(0))

    @pytest.mark.parametrize("processes", [2, 4])
    def test_processes_share_a_batch_out(self, processes: int) -> None:
        corpus = numbered_corpus(self.lengths)
        parts = [training_rows(corpus, process=p, num_processes=processes).batch(3).tokens for p in range(processes)]
        np.testing.assert_array_equal(np.concatenate(parts), training_rows(corpus).batch(3).tokens)

    def test_uneven_shares_are_refused(self) -> None:
        with pytest.raises(TrainingError, match="evenly to 3 processes"):
            training_rows(numbered_corpus(self.lengths), num_processes=3)


class TestValidation:
    lengths = np.random.default_rng(1).integers(150, 2500, 80).tolist()

    def test_held_out_documents_are_not_trained_on(self) -> None:
        corpus = numbered_corpus(self.lengths)
        split = hold_out(corpus, SHORTEST, 5)
        assert len(split.validation) == 5
        assert (corpus.lengths[split.validation] >= SHORTEST).all()
        assert sorted([*split.train, *split.validation]) == list(range(80))
        assert len(hold_out(corpus, SHORTEST, 50).validation) <= 8
        assert len(hold_out(corpus, SHORTEST, 0).validation) == 0

    def test_a_row_is_the_beginning_of_one_document(self) -> None:
        corpus = numbered_corpus(self.lengths)
        documents = hold_out(corpus, SHORTEST, 7).validation
        batches = validation_batches(corpus, documents, seq_len=SEQ_LEN, sparse=SPARSE, batch_rows=3, max_rows=16)
        rows = np.concatenate([b.tokens for b in batches])
        assert rows.shape == (9, SEQ_LEN)
        for row, document in zip(rows, documents, strict=False):
            expected = corpus.tokens[corpus.starts[document] : corpus.starts[document + 1]][:SEQ_LEN]
            assert np.array_equal(row[: len(expected)], expected)
            assert not row[len(expected) :].any()
        assert not rows[7:].any()
        for batch in batches:
            check_segments(corpus, batch)

    def test_max_rows(self) -> None:
        corpus = numbered_corpus(self.lengths)
        batches = validation_batches(corpus, np.arange(80), seq_len=SEQ_LEN, sparse=SPARSE, batch_rows=2, max_rows=4)
        assert len(batches) == 2
        assert all(batch.segments[:, 0].all() for batch in batches)
