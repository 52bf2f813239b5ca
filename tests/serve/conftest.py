"""One tiny checkpoint for all tests that need real files."""

from pathlib import Path

import pytest

from tests.serve.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights, a real tokenizer and a chat template; not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def scored_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, whose answers depend on all that they read, wherever it lies.

    Sharp attention makes each token's keys and values matter, and a sparse token has one of its four blocks by score.
    """
    sparse = {"init_blocks": 1, "window_size": 64, "topk": 3, "dense_len": 256}
    folder = tmp_path_factory.mktemp("scored")
    return write_checkpoint(folder, sparse_config=sparse, initializer_range=0.4, tie_word_embeddings=False)
