"""Texts for the Forecast: tokenised again they are what pretraining read, and validation is of held-out things."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from typer.testing import CliRunner

from sparda_jax.checkpoint import CheckpointError
from sparda_jax.pretrain.__main__ import app
from sparda_jax.pretrain.forecast_texts import SPLITS, DocumentConfig, ForecastDocuments, write_texts
from sparda_jax.pretrain.prepare import tokenize_documents
from sparda_jax.pretrain.tokenizer_training import IM_END_ID, save_hf_files
from sparda_jax.tokenizer import Tokenizer

CONFIG = DocumentConfig(length=1024, text_fraction=0.4, seed=int(np.random.default_rng().integers(2**31)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tokenizer: Backend, texts: list[str]) -> Path:
    """A folder as `prepare` writes it; its two corpora share no document."""
    folder = tmp_path_factory.mktemp("data")
    save_hf_files(tokenizer, folder / "tokenizer")
    half = len(texts) // 2
    for split, part in zip(SPLITS, (texts[:half], texts[half:]), strict=True):
        np.save(folder / f"{split}.npy", tokenize_documents(tokenizer, part))
    return folder


@pytest.mark.parametrize("split", SPLITS)
def test_tokenised_again_a_document_has_its_ids(data: Path, split: str) -> None:
    documents, tokenizer = ForecastDocuments.load(data, split), Tokenizer.from_pretrained(data / "tokenizer")
    kinds = set()
    for number in range(60):
        ids = documents.ids(CONFIG, number)
        assert ids.size <= CONFIG.length
        assert tokenizer.encode(documents.text(CONFIG, number)) == ids.tolist(), f"{CONFIG}, document {number}"
        kinds.add(bool(IM_END_ID in ids))
    assert kinds == {True, False}, "both recall documents through the chat template and plain text"


def test_prose_is_that_of_the_split(data: Path) -> None:
    plain = DocumentConfig(length=512, text_fraction=1.0, seed=CONFIG.seed)
    corpora = {split: np.load(data / f"{split}.npy").astype(np.uint16).tobytes() for split in SPLITS}
    for split in SPLITS:
        documents = ForecastDocuments.load(data, split)
        pieces = [documents.ids(plain, number).astype(np.uint16).tobytes() for number in range(10)]
        assert [[piece in corpora[s] for s in SPLITS] for piece in pieces] == [[s == split for s in SPLITS]] * 10


def test_the_file_is_the_same_with_any_number_of_processes(data: Path, tmp_path: Path) -> None:
    for name, workers in (("one", 1), ("two", 2)):
        write_texts(data, tmp_path / f"{name}.jsonl", "train", 20, CONFIG, num_workers=workers)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    documents = ForecastDocuments.load(data, "train")
    lines = [json.loads(line)["text"] for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert lines == [documents.text(CONFIG, number) for number in range(20)]
    # Plain texts may be the same: they are pieces of a small corpus.
    recall = [line for line in lines if "<|im_end|>" in line]
    assert len(set(recall)) == len(recall) > 0
    with pytest.raises(CheckpointError, match="exists"):
        write_texts(data, tmp_path / "one.jsonl", "train", 1, CONFIG, num_workers=1)


def test_command(data: Path, tmp_path: Path) -> None:
    options = ["--data", str(data), "--documents", "5", "--validation", "3", "--workers", "1"]
    done = CliRunner().invoke(app, ["forecast-texts", str(tmp_path), "--length", "600", *options])
    assert done.exit_code == 0, done.output
    assert [len((tmp_path / f"{n}.jsonl").read_text().splitlines()) for n in ("train", "validation")] == [5, 3]
    refused = CliRunner().invoke(app, ["forecast-texts", str(tmp_path / "b"), "--length", "100", *options])
    assert refused.exit_code == 1
    assert "length: 100 given" in refused.output
    missing = CliRunner().invoke(app, ["forecast-texts", str(tmp_path / "c"), "--data", str(tmp_path)])
    assert missing.exit_code == 1
    assert "sparda_jax.pretrain.prepare" in missing.output
