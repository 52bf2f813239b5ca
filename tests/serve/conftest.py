"""One tiny checkpoint for all tests that need real files."""

from pathlib import Path

import pytest

from tests.serve.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights, a real tokenizer and a chat template; not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
