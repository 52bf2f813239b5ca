"""A small tokenizer and corpus, made anew in every run from verses of the King James Bible (public domain)."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from sparda_jax.pretrain.haystack import TokenCorpus
from sparda_jax.pretrain.prepare import tokenize_documents
from sparda_jax.pretrain.tasks import RecallTasks
from sparda_jax.pretrain.tokenizer_training import train_tokenizer

TEXT = Path(__file__).parent.parent / "data" / "pretrain_text.txt"


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Documents of a few verses."""
    return TEXT.read_text().strip().split("\n\n")


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Tokenizer:
    return train_tokenizer(texts, vocab_size=700)


@pytest.fixture(scope="session")
def tokens(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """The documents but the last three, as a training corpus."""
    return tokenize_documents(tokenizer, texts[:-3])


@pytest.fixture(scope="session")
def tasks(tokenizer: Tokenizer, tokens: np.ndarray) -> RecallTasks:
    return RecallTasks(tokenizer, TokenCorpus(tokens, tokenizer))


@pytest.fixture(scope="session")
def eval_tasks(tokenizer: Tokenizer, texts: list[str]) -> RecallTasks:
    held_out = TokenCorpus(tokenize_documents(tokenizer, texts[-3:]), tokenizer)
    return RecallTasks(tokenizer, held_out, split="eval")
