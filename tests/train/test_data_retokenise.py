"""The retokeniser: documents stay apart, what is written is valid MDS, and an interrupted call goes on."""

import functools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from sparda_jax.tokenizer import Tokenizer
from sparda_jax.train import mds
from sparda_jax.train.__main__ import app
from sparda_jax.train.corpus import load_corpus
from sparda_jax.train.documents import read_documents
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.mds.writer import ShardWriter
from sparda_jax.train.retokenise import retokenise
from sparda_jax.train.retokenised_domain import Counts
from sparda_jax.train.retokeniser import Retokeniser
from tests.serve.tiny_tokenizer import write_tokenizer
from tests.train.mds_oracle import encode, write_mds
from tests.train.test_data import write_lines
from tests.train.test_data_mds import documents

WORDS = "the magic number grass sky green blue hello é 漢字 fox".split()


def write_other_tokenizer(folder: Path) -> Path:
    """Bytes only, with ids in another order and other control tokens."""
    folder.mkdir()
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>", "<|begin|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["hello foxes of the sky", "blue foxes"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tokenizer of the model, and another one that made the data."""
    top = tmp_path_factory.mktemp("tokenizers")
    (top / "own").mkdir()
    return {"own": write_tokenizer(top / "own"), "other": write_other_tokenizer(top / "other")}


@pytest.fixture
def retokeniser(folders: dict[str, Path]) -> Retokeniser:
    return Retokeniser(Tokenizer.from_pretrained(folders["own"]), Tokenizer.from_pretrained(folders["other"]))


def random_texts(count: int) -> list[str]:
    rng = np.random.default_rng()
    return [" ".join(rng.choice(WORDS, rng.integers(1, 60))) for _ in range(count)]


def sample_of(texts: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Documents as published ones are: BOS, text, EOS, one behind the other."""
    ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    ends = np.cumsum([len(i) for i in ids])
    begins = ends - [len(i) for i in ids]
    return {"input_ids": np.concatenate(ids), "indices": np.stack([begins, ends], axis=1)}


def expected_of(texts: list[str], folders: dict[str, Path]) -> list[list[int]]:
    own = Tokenizer.from_pretrained(folders["own"])
    return [own.encode(text) for text in texts]


@pytest.mark.parametrize("divided", [True, False])
def test_documents_of_packed_samples_stay_apart(
    tmp_path: Path, folders: dict[str, Path], retokeniser: Retokeniser, divided: bool
) -> None:
    other, texts = Tokenizer.from_pretrained(folders["other"]), random_texts(30)
    samples = [sample_of(texts[i : i + 3], other) for i in range(0, 30, 3)]
    columns = {"input_ids": "ndarray:uint32"} | ({"indices": "ndarray:uint32"} if divided else {})
    write_mds(tmp_path / "src" / "books", columns, [samples[:4], samples[4:]], compression="gz")
    counts = retokenise([tmp_path / "src"], tmp_path / "dst", retokeniser)
    expected = expected_of(texts, folders)
    assert counts == {"books": Counts(samples=10, documents=30, tokens=sum(map(len, expected)))}
    corpus = load_corpus([tmp_path / "dst"], folders["own"], tmp_path / "cache")
    assert documents(corpus) == expected
    assert list(corpus.domains) == ["books"]
    bounds = [s.value(i, "indices") for s in open_shards(tmp_path / "dst" / "books") for i in range(len(s))]
    assert [len(b) for b in bounds] == [3] * 10


def open_shards(folder: Path) -> list[mds.Shard]:
    return [mds.open_shard(info, check_hashes=True) for info in mds.read_index(folder)]


def test_texts_become_what_training_makes_of_them(
    tmp_path: Path, folders: dict[str, Path], retokeniser: Retokeniser
) -> None:
    texts = [*random_texts(100), "a text that spells <s> and <|im_end|>"]
    file = write_lines(tmp_path / "web.jsonl", [*texts[:50], " ", *texts[50:]])
    retokenise([file], tmp_path / "dst", retokeniser)
    made, direct = (load_corpus([p], folders["own"], tmp_path / "cache") for p in (tmp_path / "dst", file))
    assert documents(made) == documents(direct) == expected_of(texts, folders)
    assert [list(made.domains), list(direct.domains)] == [["web"], ["web"]]


def test_shards_byte_by_byte(tmp_path: Path) -> None:
    array = functools.partial(encode, "ndarray:uint32")
    parts = [np.arange(300, dtype=np.uint32), np.array([7, 70000], np.uint32)]
    writer = ShardWriter(tmp_path, "x", "web", shard_bytes=1000)
    writer.add(parts)
    writer.add(parts[1:])
    mds.write_index(tmp_path, writer.close())
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["version"] == 2
    names = ["domain", "indices", "input_ids", "length"]
    bodies = [
        [b"web", array([[0, 300], [300, 302]]), array(np.concatenate(parts)), 302],
        [b"web", array([[0, 2]]), array(parts[1]), 2],
    ]
    for entry, body, number in zip(index["shards"], bodies, (0, 1), strict=True):
        assert entry["column_names"] == names
        assert entry["column_sizes"] == [None, None, None, 8]
        content = (tmp_path / f"x-{number:05}.mds").read_bytes()
        assert entry["raw_data"]["bytes"] == len(content)
        count, begin, end = struct.unpack("<III", content[:12])
        assert (count, end) == (1, len(content))
        assert json.loads(content[12:begin]).items() <= entry.items()
        *variable, length = body
        sizes = b"".join(struct.pack("<I", len(value)) for value in variable)
        assert content[begin:] == sizes + b"".join(variable) + struct.pack("<Q", length)


def test_an_interrupted_call_goes_on(
    tmp_path: Path, folders: dict[str, Path], retokeniser: Retokeniser, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, src, dst = random_texts(40), tmp_path / "src", tmp_path / "dst"
    src.mkdir()
    for number in range(4):
        write_lines(src / f"{number}.jsonl", texts[number * 10 : number * 10 + 10])
    encoded: list[str] = []
    original = Retokeniser.documents

    def counted(self: Retokeniser, sample: Any) -> Any:
        if len(encoded) == 25:
            raise RuntimeError("stopped")
        encoded.append(sample.place)
        return original(self, sample)

    monkeypatch.setattr(Retokeniser, "documents", counted)
    monkeypatch.setattr(mds, "SHARD_BYTES", 1)  # every file for itself
    with pytest.raises(RuntimeError, match="stopped"):
        retokenise([src], dst, retokeniser)
    assert not list(dst.rglob("index.json"))
    part = next(dst.rglob("00001.json"))
    kept = part.read_text()
    for damaged in ("{", "[]", '{"counts": {}}'):
        part.write_text(damaged)
        with pytest.raises(TrainingError, match=r"00001\.json is damaged"):
            retokenise([src], dst, retokeniser)
    part.write_text(kept)
    (dst / "src" / "00002-00000.mds.tmp-1").write_text("left by a process that was killed")
    encoded.clear()
    counts = retokenise([src], dst, retokeniser)
    assert len(encoded) == 20  # the two files that were done are not read again
    assert counts["src"].documents == 40
    assert sorted(f.name for f in (dst / "src").iterdir()) == [
        *(f"0000{number}-00000.mds" for number in range(4)),
        "index.json",
        "retokenised.json",
    ]
    assert documents(load_corpus([dst], folders["own"], tmp_path / "cache")) == expected_of(texts, folders)
    encoded.clear()
    assert retokenise([src], dst, retokeniser) == counts
    assert not encoded

    write_lines(src / "0.jsonl", ["another text"])
    with pytest.raises(TrainingError, match="made, or begun, of other sources"):
        retokenise([src], dst, retokeniser)


def test_the_model_of_another_tokenizer_refuses_it(
    tmp_path: Path, folders: dict[str, Path], retokeniser: Retokeniser
) -> None:
    retokenise([write_lines(tmp_path / "a.jsonl", ["hello"])], tmp_path / "dst", retokeniser)
    with pytest.raises(TrainingError, match="retokenised for another tokenizer"):
        load_corpus([tmp_path / "dst"], folders["other"], tmp_path / "cache")


def test_what_is_refused(tmp_path: Path, folders: dict[str, Path], retokeniser: Retokeniser) -> None:
    columns, dst = {"input_ids": "ndarray:int32"}, tmp_path / "dst"
    src = write_mds(tmp_path / "a", columns, [[{"input_ids": np.array([5, 400])}]])
    with pytest.raises(TrainingError, match="sample 0 has the id 400"):
        retokenise([src], dst, retokeniser)
    with pytest.raises(TrainingError, match="sample 0 holds ids; name the tokenizer"):
        retokenise([src], tmp_path / "other", Retokeniser(Tokenizer.from_pretrained(folders["own"])))
    reals = write_mds(tmp_path / "reals", {"input_ids": "ndarray"}, [[{"input_ids": np.array([5], np.float32)}]])
    with pytest.raises(TrainingError, match="sample 0: the ids are float32; only whole numbers are ids"):
        retokenise([reals], tmp_path / "third", retokeniser)
    (tmp_path / "b.txt").write_text("  ")
    with pytest.raises(TrainingError, match="domain b has no text"):
        retokenise([tmp_path / "b.txt"], dst, retokeniser)
    (tmp_path / "c.txt").write_text("hello")
    write_mds(dst / "c", columns, [])
    with pytest.raises(TrainingError, match="not written by this command"):
        retokenise([tmp_path / "c.txt"], dst, retokeniser)


def test_small_files_share_a_shard(tmp_path: Path, folders: dict[str, Path], retokeniser: Retokeniser) -> None:
    texts = random_texts(12)
    (tmp_path / "src").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "src" / f"{number:02}.txt").write_text(text)
    retokenise([tmp_path / "src"], tmp_path / "dst", retokeniser)
    assert len(list((tmp_path / "dst" / "src").glob("*.mds"))) == 1
    assert documents(load_corpus([tmp_path / "dst"], folders["own"], tmp_path / "cache")) == expected_of(texts, folders)


def test_a_text_larger_than_a_shard(tmp_path: Path, folders: dict[str, Path]) -> None:
    own = Tokenizer.from_pretrained(folders["own"])
    writer = ShardWriter(tmp_path, "x", "d", shard_bytes=100)
    for text in random_texts(5):
        writer.add([np.array(own.encode(text), np.uint32)])
    mds.write_index(tmp_path, writer.close())
    assert len(list(read_documents(tmp_path))) == 5


class TestCommand:
    def call(self, *arguments: object) -> Any:
        return CliRunner().invoke(app, ["retokenise", *map(str, arguments)])

    def test_counts_are_printed(self, tmp_path: Path, folders: dict[str, Path]) -> None:
        file = write_lines(tmp_path / "web.jsonl", ["hello", "the sky"])
        result = self.call(file, tmp_path / "dst", "--tokenizer", folders["own"])
        assert result.exit_code == 0, result.output
        tokens = sum(map(len, expected_of(["hello", "the sky"], folders)))
        assert f"web: 2 samples, 2 documents, {tokens} tokens" in result.output

    def test_errors_in_one_line(self, tmp_path: Path, folders: dict[str, Path]) -> None:
        result = self.call(tmp_path / "none", tmp_path / "dst", "--tokenizer", folders["own"])
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert "does not exist" in result.stderr
