"""Domains in fixed proportions: exact counts, every row of a domain before any comes again, and place alone decides."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from sparda_jax.train.corpus import Corpus
from sparda_jax.train.data import TrainingRows
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.mixture import PERIOD, MixedRows, ShuffledRows, read_mixture
from tests.train.test_data import SEQ_LEN, SPARSE, numbered_corpus


class TestWeights:
    def test_any_scale(self) -> None:
        assert read_mixture(["a=3", "b=1"], ["b", "a"]) == {"a": 750, "b": 250}
        assert read_mixture(["a=.1", "b=.1", "c=.1"], ["a", "b", "c"]) == {"a": 334, "b": 333, "c": 333}
        assert read_mixture(["x=y=2"], ["x=y"]) == {"x=y": PERIOD}
        assert read_mixture([], ["a"]) == {}

    def test_the_order_of_the_options_does_not_count(self) -> None:
        assert list(read_mixture(["b=1", "a=1"], ["a", "b"])) == list(read_mixture(["a=1", "b=1"], ["a", "b"]))

    def test_published(self) -> None:
        shares = read_mixture(["prolong"], ["arxiv", "book-65536", "textbooks", "fineweb-edu"])
        assert shares == {"arxiv": 65, "book-65536": 652, "fineweb-edu": 218, "textbooks": 65}
        assert sum(shares.values()) == PERIOD

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (["a=1"], "domain of --data, which are a, b"),
            (["a=1", "b=1", "c=1"], "it has a, b, c"),
            (["prolong"], "it has none of them"),
            (["a=1", "b"], "use NAME=WEIGHT"),
            (["a=1", "b=0"], "use NAME=WEIGHT"),
            (["a=1", "b=nan"], "use NAME=WEIGHT"),
            (["a=1", "b=0.0001"], "less than one row in 1000"),
            (["a=1e308", "b=1e308"], "add up to inf"),
            (["a=1", "b=1", "a=2"], "names a more than once"),
        ],
    )
    def test_refused(self, given: list[str], message: str) -> None:
        with pytest.raises(TrainingError, match=message):
            read_mixture(given, ["a", "b"])


class TestOrder:
    counts: Mapping[str, int] = {"a": 300, "b": 699, "c": 1}

    def test_proportions_are_exact_and_rows_come_once_an_epoch(self) -> None:
        num_rows = {"a": 70, "b": 5000, "c": 2}
        rows = MixedRows(self.counts, num_rows, seed=5)
        found = [rows.row(place) for place in range(3 * PERIOD)]
        domains = np.searchsorted([70, 5070], found, side="right")
        for period in range(3):
            counted = Counter(domains[period * PERIOD : (period + 1) * PERIOD].tolist())
            assert counted == {0: 300, 1: 699, 2: 1}
        first = [row for row, domain in zip(found, domains, strict=True) if domain == 0]
        for epoch in range(900 // 70):
            assert sorted(first[epoch * 70 : (epoch + 1) * 70]) == list(range(70))
        assert first[:70] != first[70:140]
        second = [row for row, domain in zip(found, domains, strict=True) if domain == 1]
        assert len(set(second)) == len(second) == 3 * 699
        # Domains are mixed, not one behind the other.
        assert 200 < np.count_nonzero(np.diff(domains[:PERIOD])) < 600

    def test_place_alone_decides(self) -> None:
        num_rows = {"a": 7, "b": 11, "c": 3}
        straight = MixedRows(self.counts, num_rows, seed=1)
        expected = [straight.row(place) for place in range(5000)]
        again = MixedRows(self.counts, num_rows, seed=1)
        assert [again.row(place) for place in (4999, 0, 2500)] == [expected[place] for place in (4999, 0, 2500)]
        other = MixedRows(self.counts, num_rows, seed=2)
        assert [other.row(place) for place in range(100)] != expected[:100]

    def test_one_domain_of_all_rows(self) -> None:
        shuffled = ShuffledRows(40, seed=3)
        assert sorted(shuffled.row(place) for place in range(40)) == list(range(40))


class TestRows:
    def corpus(self) -> Corpus:
        rng = np.random.default_rng(2)
        corpus = numbered_corpus(rng.integers(300, 1500, 90).tolist())
        documents = rng.permutation(90)
        domains = {"a": np.sort(documents[:20]), "b": np.sort(documents[20:])}
        return Corpus(tokens=corpus.tokens, starts=corpus.starts, fingerprint="", domains=domains)

    def rows(self, **changes: int) -> TrainingRows:
        corpus = self.corpus()
        settings: dict[str, Any] = {"batch_rows": 8, "seed": 3} | changes
        mixture = {"a": 750, "b": 250}
        documents = np.arange(2, 90)  # as if two were set aside
        return TrainingRows(corpus, documents, seq_len=SEQ_LEN, sparse=SPARSE, mixture=mixture, **settings)

    def test_a_row_is_of_one_domain(self) -> None:
        corpus, rows = self.corpus(), self.rows()
        domain_of = np.zeros(90, int)
        domain_of[corpus.domains["b"]] = 1
        seen = []
        for number in range(125):
            batch = rows.batch(number)
            for tokens, segments in zip(batch.tokens, batch.segments, strict=True):
                documents = np.searchsorted(corpus.starts, tokens[segments > 0] - 1, side="right") - 1
                assert documents.min() >= 2
                (domain,) = set(domain_of[documents].tolist())
                seen.append(domain)
        assert Counter(seen) == {0: 750, 1: 250}
        assert sum(rows.domain_rows.values()) == rows.packing.num_rows

    @pytest.mark.parametrize("processes", [2, 4])
    def test_processes_share_a_batch_out(self, processes: int) -> None:
        parts = [self.rows(process=p, num_processes=processes).batch(3).tokens for p in range(processes)]
        np.testing.assert_array_equal(np.concatenate(parts), self.rows().batch(3).tokens)

    def test_a_domain_of_short_documents(self) -> None:
        corpus = numbered_corpus([500, 100])
        corpus = Corpus(
            tokens=corpus.tokens, starts=corpus.starts, fingerprint="", domains={"a": np.array([0]), "b": np.array([1])}
        )
        mixture = {"a": 500, "b": 500}
        with pytest.raises(TrainingError, match="domain b: the longest of 1 documents has 100 tokens"):
            TrainingRows(corpus, np.arange(2), seq_len=SEQ_LEN, sparse=SPARSE, mixture=mixture, batch_rows=1, seed=0)
