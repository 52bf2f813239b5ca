"""Parquet files of texts and of token ids."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparda_jax.train.corpus import load_corpus
from sparda_jax.train.documents import read_documents
from sparda_jax.train.errors import TrainingError
from tests.serve.tiny_tokenizer import write_tokenizer
from tests.train.test_data import write_lines

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


def write(file: Path, columns: dict[str, Any], **settings: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), file, **settings)
    return file


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_texts_as_those_of_json_lines(tmp_path: Path, compression: str) -> None:
    write_tokenizer(tmp_path)
    texts = [f"the magic number is {i} é" for i in range(200)]
    kept: list[str | None] = [*texts[:100], None, " \n", "", *texts[100:]]
    file = write(tmp_path / "a.parquet", {"text": kept, "url": kept}, compression=compression, row_group_size=70)
    found, expected = (
        load_corpus([path], tmp_path, tmp_path / "cache") for path in (file, write_lines(tmp_path / "a.jsonl", texts))
    )
    assert found.lengths.tolist() == expected.lengths.tolist()
    assert found.tokens[0 : found.tokens.size].tolist() == expected.tokens[0 : expected.tokens.size].tolist()
    assert found.fingerprint != expected.fingerprint
    assert sum(d.num_bytes for d in read_documents(file)) >= file.stat().st_size


@pytest.mark.parametrize("kind", ["int32", "uint16", "int64"])
@pytest.mark.parametrize("container", ["list_", "large_list"])
def test_token_ids(tmp_path: Path, kind: str, container: str) -> None:
    write_tokenizer(tmp_path)
    rng = np.random.default_rng()
    rows = [rng.integers(0, 320, n).tolist() for n in (5, 0, 700, 1)] + [None]
    list_of = getattr(pyarrow, container)(getattr(pyarrow, kind)())
    file = write(tmp_path / "a.parquet", {"input_ids": pyarrow.array(rows, list_of)})
    corpus = load_corpus([file], tmp_path, tmp_path / "cache")
    assert corpus.lengths.tolist() == [5, 700, 1]
    assert corpus.tokens[0:706].tolist() == [i for row in rows if row for i in row]


def test_bounds_of_documents(tmp_path: Path) -> None:
    ids = pyarrow.array([[1, 2, 3, 4], [5, 6]])
    file = write(tmp_path / "a.parquet", {"input_ids": ids, "indices": [[[0, 1], [1, 3]], None]})
    contents = [d.content for d in read_documents(file)]
    assert [c.tolist() for c in contents if not isinstance(c, str)] == [[1], [2, 3], [5, 6]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, r"needs a column text \(string\) or input_ids .*it has body \(string\)"),
        ({"text": [3]}, r"it has text \(int64\)"),
        ({"input_ids": [[0.5]]}, "list of integers"),
        ({"input_ids": [[1, None]]}, "row 0: input_ids holds nulls"),
        ({"input_ids": [[1, 320]]}, "row 0 has the id 320"),
        ({"input_ids": [[-1]]}, "row 0 has the id -1"),
        ({"input_ids": [[1]], "indices": [[[0, 2]]]}, "row 0 has 1 tokens, which its indices do not divide"),
        ({"input_ids": [[1]], "indices": [["x"]]}, "row 0: indices is no list of pairs of numbers"),
        (
            {"input_ids": [[1]], "indices": pyarrow.array([[0, 2**64 - 1]], pyarrow.list_(pyarrow.uint64()))},
            "row 0: indices is no list of pairs of numbers",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    write_tokenizer(tmp_path)
    file = write(tmp_path / "a.parquet", columns)
    with pytest.raises(TrainingError, match=f"a.parquet.*{message}"):
        load_corpus([file], tmp_path, tmp_path / "cache")


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(TrainingError, match=r"a\.parquet has several columns of one name"):
        list(read_documents(tmp_path / "a.parquet"))


def test_a_damaged_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", {"text": ["a" * 1000] * 10})
    content = file.read_bytes()
    for damaged in (content[:-20], content[:20] + b"x" * 200 + content[220:], b""):
        file.write_bytes(damaged)
        with pytest.raises(TrainingError, match=r"a\.parquet can't be read"):
            list(read_documents(file))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TrainingError, match="needs pyarrow, which is not installed: pip install pyarrow"):
        list(read_documents(file))
