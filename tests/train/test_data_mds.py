"""MDS shards built byte by byte, read back: every encoding, compression and damage; and as documents of a corpus."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparda_jax.train import mds
from sparda_jax.train.corpus import Corpus, load_corpus
from sparda_jax.train.documents import read_documents
from sparda_jax.train.errors import TrainingError
from tests.serve.tiny_tokenizer import write_tokenizer
from tests.train.mds_oracle import write_mds

PROLONG = {"input_ids": "ndarray:uint32", "indices": "ndarray:uint32", "length": "uint64", "domain": "str"}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def packed_samples(rng: np.random.Generator, count: int, top: int = 300) -> list[dict[str, Any]]:
    """Samples of several documents; the last one of each is followed by tokens that belong to none."""
    samples = []
    for _ in range(count):
        lengths = rng.integers(1, 700, rng.integers(1, 5))
        ends = np.cumsum(lengths)
        ids = rng.integers(0, top, ends[-1] + 3)
        samples.append(
            {
                "input_ids": ids,
                "indices": np.stack([ends - lengths, ends], axis=1),
                "length": int(ends[-1]) + 3,
                "domain": "arxiv",
            }
        )
    return samples


def documents_of(samples: list[dict[str, Any]]) -> list[list[int]]:
    return [sample["input_ids"][a:b].tolist() for sample in samples for a, b in sample["indices"]]


def documents(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens[a:b].tolist() for a, b in zip(corpus.starts[:-1], corpus.starts[1:], strict=True)]


class TestShards:
    def test_every_encoding(self, tmp_path: Path, rng: np.random.Generator) -> None:
        columns = {
            "free": "ndarray",
            "typed": "ndarray:int32",
            "fixed": "ndarray:uint16:3,2",
            "flat": "ndarray:uint32:5",
            "text": "str",
            "raw": "bytes",
            "whole": "int",
            "small": "uint8",
            "real": "float32",
        }
        samples = [
            {
                "free": rng.integers(0, 99, (rng.integers(1, 4), 300)).astype(dtype),
                "typed": rng.integers(-9, 9, rng.choice([1, 255, 256, 70000])).astype(np.int32),
                "fixed": rng.integers(0, 9, (3, 2)).astype(np.uint16),
                "flat": rng.integers(0, 9, 5).astype(np.uint32),
                "text": "grün" * int(rng.integers(0, 3)),
                "raw": rng.bytes(int(rng.integers(0, 9))),
                "whole": int(rng.integers(-(2**62), 2**62)),
                "small": 200,
                "real": 0.5,
            }
            for dtype in ("uint8", "int64", "float32", "uint16")
        ]
        write_mds(tmp_path, columns, [samples[:1], samples[1:]])
        shards = [mds.open_shard(info) for info in mds.read_index(tmp_path)]
        assert [len(shard) for shard in shards] == [1, 3]
        for shard, number, sample in ((shards[0], 0, 0), (shards[1], 2, 3), (shards[1], 0, 1), (shards[1], 1, 2)):
            for name in columns:
                found, expected = shard.value(number, name), samples[sample][name]
                if isinstance(expected, np.ndarray):
                    assert found.dtype == expected.dtype
                    np.testing.assert_array_equal(found, expected)
                else:
                    assert found == expected

    @pytest.mark.parametrize("compression", [None, "zstd", "gz", "bz2"])
    def test_compression_and_hashes(self, tmp_path: Path, compression: str | None, rng: np.random.Generator) -> None:
        if compression == "zstd":
            pytest.importorskip("zstandard")
        samples = [{"input_ids": rng.integers(0, 9, 50000)}]
        write_mds(
            tmp_path, {"input_ids": "ndarray:uint32"}, [samples], compression=compression, hashes=["sha1", "xxh64"]
        )
        (info,) = mds.read_index(tmp_path)
        found = mds.open_shard(info, check_hashes=True).value(0, "input_ids")
        np.testing.assert_array_equal(found, samples[0]["input_ids"])
        file = info.stored.path
        changed = bytearray(file.read_bytes())
        changed[-40] ^= 1
        file.write_bytes(changed)
        with pytest.raises(TrainingError, match=f"{file.name}: sha1 is .*fetch it again"):
            mds.open_shard(info, check_hashes=True)

    def test_a_raw_file_is_read_before_a_compressed_one(self, tmp_path: Path) -> None:
        write_mds(tmp_path, {"text": "str"}, [[{"text": "a"}]], compression="gz")
        (info,) = mds.read_index(tmp_path)
        info.raw.path.write_bytes(b"short")
        with pytest.raises(TrainingError, match=r"shard\.00000\.mds has 5 bytes"):
            mds.open_shard(info)

    @pytest.mark.parametrize("compression", ["zstd", "gz", "bz2"])
    @pytest.mark.parametrize("damage", ["cut", "garbage", "grown"])
    def test_damaged_compression(self, tmp_path: Path, compression: str, damage: str, rng: np.random.Generator) -> None:
        if compression == "zstd":
            pytest.importorskip("zstandard")
        samples = [{"input_ids": rng.integers(0, 9, 3000)}]
        write_mds(tmp_path, {"input_ids": "ndarray:uint32"}, [samples], compression=compression)
        (info,) = mds.read_index(tmp_path)
        file = info.stored.path
        content = file.read_bytes()
        file.write_bytes({"cut": content[: len(content) // 3], "garbage": b"garbage" * 9, "grown": content * 2}[damage])
        with pytest.raises(TrainingError, match=r"shard\.00000\.mds.*fetch it again"):
            mds.open_shard(info)

    def test_without_zstandard(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_mds(tmp_path, {"text": "str"}, [[{"text": "a"}]], compression="zstd")
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(TrainingError, match=r"shard\.00000\.mds\.zstd needs zstandard, which is not installed"):
            mds.open_shard(mds.read_index(tmp_path)[0])

    def test_an_unknown_compression(self, tmp_path: Path) -> None:
        write_mds(tmp_path, {"text": "str"}, [[{"text": "a"}]], compression="gz")
        index = tmp_path / "index.json"
        index.write_text(index.read_text().replace('"gz:3"', '"br:11"'))
        with pytest.raises(TrainingError, match="compressed with br, which is not read here"):
            mds.open_shard(mds.read_index(tmp_path)[0])

    @pytest.mark.parametrize("place", ["count", "offset", "sizes", "shape", "tail"])
    def test_damaged_shards_are_named(self, tmp_path: Path, place: str, rng: np.random.Generator) -> None:
        samples = [{"input_ids": rng.integers(0, 9, 30)} for _ in range(3)]
        write_mds(tmp_path, {"input_ids": "ndarray:uint32"}, [samples])
        (info,) = mds.read_index(tmp_path)
        content = bytearray(info.raw.path.read_bytes())
        second = int.from_bytes(content[8:12], "little")
        change = {"count": 0, "offset": 6, "sizes": second, "shape": second + 5}.get(place, 0)
        content[change] ^= 2
        info.raw.path.write_bytes(content[:-1] if place == "tail" else content)
        with pytest.raises(TrainingError, match=r"shard\.00000\.mds"):
            mds.open_shard(info).value(1, "input_ids")

    def test_missing_shards_columns_and_encodings(self, tmp_path: Path) -> None:
        write_mds(tmp_path, {"text": "str"}, [[{"text": "a"}]])
        (info,) = mds.read_index(tmp_path)
        shard = mds.open_shard(info)
        with pytest.raises(TrainingError, match="sample 0 has no column 'input_ids'"):
            shard.value(0, "input_ids")
        with pytest.raises(TrainingError, match="sample 0 has no array 'text'"):
            shard.array(0, "text")
        info.raw.path.unlink()
        with pytest.raises(TrainingError, match=r"shard\.00000\.mds is missing, which the index names"):
            mds.open_shard(info)
        index = tmp_path / "index.json"
        index.write_text(index.read_text().replace('"str"', '"pkl"'))
        with pytest.raises(TrainingError, match=r"needs a column text .*it has text \(pkl\)"):
            list(read_documents(tmp_path))

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"version": 1}, "version 1"),
            ({"shards": [{"format": "jsonl"}]}, "format 'jsonl'"),
            ({"shards": [{}]}, "no index of MDS shards"),
            ({"shards": 3}, "no index of MDS shards"),
        ],
    )
    def test_index_of_another_kind(self, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
        (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": []} | changed))
        with pytest.raises(TrainingError, match=message):
            mds.read_index(tmp_path)

    @pytest.mark.parametrize(
        "changed",
        [
            {"samples": float("inf")},
            {"samples": -1},
            {"column_sizes": [-1]},
            {"column_encodings": [0]},
            {"raw_data": {"basename": "shard.00000.mds", "bytes": 1, "hashes": "sha1"}},
        ],
    )
    def test_an_entry_that_describes_no_shard(self, tmp_path: Path, changed: dict[str, Any]) -> None:
        write_mds(tmp_path, {"text": "str"}, [[{"text": "a"}]])
        index = json.loads((tmp_path / "index.json").read_text())
        index["shards"][0] |= changed
        (tmp_path / "index.json").write_text(json.dumps(index))
        with pytest.raises(TrainingError, match="no index of MDS shards"):
            mds.read_index(tmp_path)

    def test_an_empty_shard(self, tmp_path: Path) -> None:
        write_mds(tmp_path, {"text": "str"}, [[], [{"text": "a"}]])
        assert [d.content for d in read_documents(tmp_path)] == ["a"]

    def test_no_file_outside_the_folder_is_read(self, tmp_path: Path) -> None:
        write_mds(tmp_path, {"text": "str"}, [[{"text": "a"}]])
        index = tmp_path / "index.json"
        index.write_text(index.read_text().replace('"shard.', '"../shard.'))
        with pytest.raises(TrainingError, match="not in its folder"):
            mds.read_index(tmp_path)


class TestCorpus:
    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Path:
        folder = tmp_path / "tokenizer"
        folder.mkdir()
        return write_tokenizer(folder)

    @pytest.mark.parametrize("compression", [None, "gz"])
    def test_documents_of_packed_samples(
        self, tmp_path: Path, tokenizer: Path, compression: str | None, rng: np.random.Generator
    ) -> None:
        samples = packed_samples(rng, 12)
        folder = write_mds(tmp_path / "data", PROLONG, [samples[:5], samples[5:]], compression=compression)
        corpus = load_corpus([folder], tokenizer, tmp_path / "cache")
        assert documents(corpus) == documents_of(samples)
        assert [d.content.tolist() for d in read_documents(folder) if not isinstance(d.content, str)] == documents(
            corpus
        )
        assert corpus.tokens.size == sum(map(len, documents_of(samples)))
        for _ in range(20):  # any part of a document
            document = int(rng.integers(len(corpus.lengths)))
            a, b = sorted(rng.integers(0, corpus.lengths[document] + 1, 2) + corpus.starts[document])
            assert (
                corpus.tokens[a:b].tolist()
                == documents_of(samples)[document][a - corpus.starts[document] : b - corpus.starts[document]]
            )

    def test_samples_without_bounds_are_documents(self, tmp_path: Path, tokenizer: Path) -> None:
        ids = [np.arange(n, dtype=t) for n, t in ((3, "uint8"), (300, "int64"), (2, "uint16"))]
        folder = write_mds(tmp_path / "data", {"input_ids": "ndarray"}, [[{"input_ids": i}] for i in ids])
        assert documents(load_corpus([folder], tokenizer, tmp_path / "cache")) == [i.tolist() for i in ids]

    def test_read_through_once(
        self, tmp_path: Path, tokenizer: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = write_mds(tmp_path / "data", PROLONG, [packed_samples(rng, 3)], compression="gz")
        calls: list[tuple[int, int]] = []
        first = load_corpus([folder], tokenizer, tmp_path / "cache", progress=lambda *n: calls.append(n))
        assert calls[-1][0] == calls[-1][1] - (folder / "index.json").stat().st_size
        monkeypatch.setattr(mds, "open_shard", None)
        assert documents(load_corpus([folder], tokenizer, tmp_path / "cache")) == documents(first)
        (unpacked,) = (tmp_path / "cache").rglob("*.mds")
        unpacked.write_bytes(unpacked.read_bytes()[:-1])
        with pytest.raises(TrainingError, match="is not what it was"):
            load_corpus([folder], tokenizer, tmp_path / "cache")

    @pytest.mark.parametrize(
        ("ids", "indices", "message"),
        [
            ([1, 320], [[0, 2]], "has the id 320, but the tokenizer ends at 319"),
            ([1, -1], [[0, 2]], "sample 0 has the id -1"),
            ([1, 2], [[0, 3]], "sample 0 has 2 tokens, which its indices do not divide"),
            ([1, 2, 3], [[0, 2], [1, 3]], "sample 0 has 3 tokens, which its indices do not divide"),
            ([1, 2], [[2, 0]], "do not divide"),
            ([1, 2], [0, 1, 2], "do not divide"),
            ([1.0, 2.0], [[0, 2]], "only whole numbers are ids"),
            ([1, 2], [[1, 1]], "holds no token"),
        ],
    )
    def test_samples_that_are_refused(
        self, tmp_path: Path, tokenizer: Path, ids: list[float], indices: list[Any], message: str
    ) -> None:
        values = np.array(ids, np.float32 if isinstance(ids[0], float) else np.int64)
        columns = {"input_ids": "ndarray", "indices": "ndarray:int32"}
        folder = write_mds(tmp_path / "data", columns, [[{"input_ids": values, "indices": np.array(indices)}]])
        with pytest.raises(TrainingError, match=message):
            load_corpus([folder], tokenizer, tmp_path / "cache")

    @pytest.mark.parametrize(
        ("encoding", "message"), [("str", "do not divide"), ("ndarray:uint32:2,x", "whose shape is no list of numbers")]
    )
    def test_bounds_in_another_encoding(self, tmp_path: Path, tokenizer: Path, encoding: str, message: str) -> None:
        columns = {"input_ids": "ndarray", "indices": "str"}
        folder = write_mds(tmp_path / "data", columns, [[{"input_ids": np.array([1, 2]), "indices": "0,2"}]])
        index = folder / "index.json"
        index.write_text(index.read_text().replace('"str"', json.dumps(encoding)))
        with pytest.raises(TrainingError, match=message):
            load_corpus([folder], tokenizer, tmp_path / "cache")

    def test_texts_in_shards(self, tmp_path: Path, tokenizer: Path) -> None:
        texts = ["the sky is blue.", " ", "hello é"]
        columns = {"text": "str", "input_ids": "ndarray:int32"}
        samples = [{"text": text, "input_ids": np.array([7])} for text in texts]
        folder = write_mds(tmp_path / "data", columns, [samples[:1], samples[1:]], compression="bz2")
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "a.txt").write_text(texts[0])
        (tmp_path / "texts" / "b.txt").write_text(texts[2])
        found = [load_corpus([p], tokenizer, tmp_path / "cache") for p in (folder, tmp_path / "texts")]
        assert documents(found[0]) == documents(found[1])

    def test_domains_are_folders(self, tmp_path: Path, tokenizer: Path, rng: np.random.Generator) -> None:
        top, samples = tmp_path / "top", [packed_samples(rng, 2) for _ in range(3)]
        write_mds(top / "book" / "0-1", PROLONG, [samples[0]])
        write_mds(top / "book" / "1-2", PROLONG, [samples[1]])
        write_mds(top / "arxiv", PROLONG, [samples[2]])
        (top / "arxiv" / "ignored.txt").write_text("beside an index, only its shards count")
        (top / "web").mkdir()
        (top / "web" / "a.txt").write_text("the grass")
        (top / "b.txt").write_text("the sky")
        corpus = load_corpus([top], tokenizer, tmp_path / "cache")
        assert corpus.domains.keys() == {"arxiv", "top", "book", "web"}
        found = documents(corpus)
        assert [found[i] for i in corpus.domains["arxiv"]] == documents_of(samples[2])
        assert [found[i] for i in corpus.domains["book"]] == documents_of(samples[0] + samples[1])
        assert len(corpus.domains["web"]) == len(corpus.domains["top"]) == 1
        assert sorted(np.concatenate(list(corpus.domains.values()))) == list(range(len(found)))
        alone = load_corpus([top / "arxiv"], tokenizer, tmp_path / "cache")
        assert list(alone.domains) == ["arxiv"]
        assert documents(alone) == documents_of(samples[2])
