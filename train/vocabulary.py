"""Which tokenizer a data set's ids belong to."""

import hashlib
import json
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from sparda_jax.tokenizer import Tokenizer
from sparda_jax.train.errors import TrainingError

RECORD_FILE = "retokenised.json"
"""Beside the index of a data set that the retokeniser wrote: what it was made of and for."""


def vocabulary_hash(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers whose ids mean the same."""
    spelled = "\n".join(tokenizer.spelled(range(tokenizer.vocab_size)))
    return hashlib.sha256(spelled.encode(errors="surrogatepass")).hexdigest()


def check_made_for(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuses a data set that was retokenised for another tokenizer; of others nothing is known.

    Raises:
        TrainingError: see above, or the record is damaged.
    """
    file = folder / RECORD_FILE
    if not file.is_file():
        return
    try:
        recorded = json.loads(file.read_text())["vocabulary"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{file} is damaged ({error!r}); retokenise into a new folder") from error
    if recorded != vocabulary_hash(tokenizer):
        raise TrainingError(f"{folder} was retokenised for another tokenizer than the model's; retokenise it anew")


def check_ids(ids: Integer[np.ndarray, " tokens"], tokenizer: Tokenizer, place: str) -> None:
    """Refuses ids that the tokenizer does not have.

    Raises:
        TrainingError: see above, or the ids are no whole numbers; the message names ``place``.
    """
    if not np.issubdtype(ids.dtype, np.integer):
        raise TrainingError(f"{place}: the ids are {ids.dtype.name}; only whole numbers are ids")
    lowest, largest = int(ids.min(initial=0)), int(ids.max(initial=0))
    if lowest < 0 or largest >= tokenizer.vocab_size:
        raise TrainingError(
            f"{place} has the id {lowest if lowest < 0 else largest}, but the tokenizer's go from 0 to "
            f"{tokenizer.vocab_size - 1}: it was made for another one"
        )
