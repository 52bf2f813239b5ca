"""Windows of text and recall documents with their loss weights."""

import lzma
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from sparda_jax.pretrain.batches import BatchPool, LossWeights, StreamConfig, TrainingStream
from sparda_jax.pretrain.haystack import TokenCorpus
from sparda_jax.pretrain.tasks import ANSWER_KIND, PAD_KIND
from sparda_jax.pretrain.tokenizer_training import BOS_ID, save_hf_files


@pytest.fixture(scope="module")
def stream(tokenizer: Tokenizer, tokens: np.ndarray) -> TrainingStream:
    return TrainingStream(tokenizer, tokens)


def test_shapes_and_dtypes(stream: TrainingStream, tokenizer: Tokenizer) -> None:
    batch = stream.batch(StreamConfig(seq_len=512, batch_size=6, seed=0), 0)
    assert batch["tokens"].shape == (6, 513)
    assert batch["tokens"].dtype == np.int32
    assert batch["loss_weights"].shape == (6, 512)
    assert batch["loss_weights"].dtype == np.float32
    assert batch["tokens"].max() < tokenizer.get_vocab_size()


def test_weights_belong_to_the_targets(stream: TrainingStream) -> None:
    weights = LossWeights(text=1.0, noise=0.25, prompt=0.5, answer=3.0, value=7.0)
    config = StreamConfig(seq_len=700, batch_size=8, seed=1, text_fraction=0.25, weights=weights)
    tokens, kinds = stream.rows(config, 3)
    batch = stream.batch(config, 3)
    np.testing.assert_array_equal(batch["tokens"], tokens)
    np.testing.assert_array_equal(batch["loss_weights"] >= 3.0, kinds[:, 1:] >= ANSWER_KIND)
    assert set(np.unique(batch["loss_weights"])) <= {0.25, 0.5, 1.0, 3.0, 7.0}
    assert not (kinds == PAD_KIND).any()


def test_text_fraction(stream: TrainingStream) -> None:
    only_text = stream.batch(StreamConfig(seq_len=300, batch_size=8, seed=0, text_fraction=1.0), 0)
    assert (only_text["loss_weights"] == 1.0).all()
    only_recall = stream.batch(StreamConfig(seq_len=300, batch_size=8, seed=0, text_fraction=0.0), 0)
    assert (only_recall["tokens"][:, 0] == BOS_ID).all()
    assert ((only_recall["loss_weights"] >= 2.0).sum(axis=1) > 0).all()


def test_long_documents_fill_the_window_and_short_ones_share_it(stream: TrainingStream) -> None:
    def documents_in_a_row(long_fraction: float) -> float:
        config = StreamConfig(seq_len=2000, batch_size=12, seed=5, text_fraction=0.0, long_fraction=long_fraction)
        return float((stream.batch(config, 0)["tokens"] == BOS_ID).sum(axis=1).mean())

    assert documents_in_a_row(0.0) > documents_in_a_row(1.0) + 2


def test_batches_depend_on_seed_stage_and_step_alone(stream: TrainingStream) -> None:
    config = StreamConfig(seq_len=256, batch_size=4, seed=7)
    first = stream.batch(config, 5)["tokens"]
    stream.batch(config, 0)
    np.testing.assert_array_equal(stream.batch(config, 5)["tokens"], first)
    others = [
        stream.batch(config, 6),
        stream.batch(StreamConfig(seq_len=256, batch_size=4, seed=8), 5),
        stream.batch(StreamConfig(seq_len=256, batch_size=4, seed=7, stage=1), 5),
    ]
    assert all((other["tokens"] != first).any() for other in others)


def test_workers_give_the_same_batches_in_order(
    stream: TrainingStream, tokenizer: Tokenizer, tokens: np.ndarray, tmp_path: Path
) -> None:
    save_hf_files(tokenizer, tmp_path / "tokenizer")
    np.save(tmp_path / "train.npy", tokens)
    config = StreamConfig(seq_len=256, batch_size=3, seed=11)
    with BatchPool(tmp_path, num_workers=2, ahead=1) as pool:
        batches = list(pool.batches(config, 2, 8))
    assert len(batches) == 6
    for step, batch in enumerate(batches, start=2):
        expected = stream.batch(config, step)
        np.testing.assert_array_equal(batch["tokens"], expected["tokens"])
        np.testing.assert_array_equal(batch["loss_weights"], expected["loss_weights"])


def test_failure_in_a_worker_is_raised(tokens: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", tokens)  # and no tokenizer
    with BatchPool(tmp_path, num_workers=1) as pool, pytest.raises(Exception, match="No such file"):
        next(pool.batches(StreamConfig(seq_len=256, batch_size=1, seed=0), 0, 1))


def test_packed_corpus_is_unpacked(tokenizer: Tokenizer, tokens: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "all.npy", tokens)
    (tmp_path / "train.npy.xz").write_bytes(lzma.compress((tmp_path / "all.npy").read_bytes()))
    np.testing.assert_array_equal(TokenCorpus.map_tokens(tmp_path / "train.npy"), tokens)
    with pytest.raises(FileNotFoundError, match=r"eval\.npy"):
        TokenCorpus.map_tokens(tmp_path / "eval.npy")


def test_bad_configurations_name_the_field() -> None:
    for field, value in (("seq_len", 64), ("batch_size", 0), ("text_fraction", 1.5), ("long_fraction", -1.0)):
        with pytest.raises(ValueError, match=field):
            StreamConfig(**{"seq_len": 512, "batch_size": 1, "seed": 0, field: value})
