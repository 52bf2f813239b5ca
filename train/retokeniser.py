"""Documents of one tokenizer, or texts, as ids of another."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Integer, UInt32

from sparda_jax.tokenizer import Tokenizer
from sparda_jax.train.documents import Sample
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.vocabulary import check_ids, vocabulary_hash


class Retokeniser:
    """Makes ids of one tokenizer from texts, or from another's ids.

    Args:
        tokenizer: whose ids are made.
        source: whose ids there are; None if there are only texts.
    """

    def __init__(self, tokenizer: Tokenizer, source: Tokenizer | None = None) -> None:
        self._tokenizer, self._source = tokenizer, source
        adds = (None if t is None else [t.adds_bos, t.bos_token_id] for t in (tokenizer, source))
        self.identity = {
            "vocabulary": vocabulary_hash(tokenizer),
            "source_vocabulary": None if source is None else vocabulary_hash(source),
            "bos": list(adds),
        }

    def documents(self, sample: Sample) -> list[UInt32[np.ndarray, " tokens"]]:
        """The documents of a sample, each encoded alone; those without text are left out.

        Ids that nobody has divided are divided before each BOS.

        Raises:
            TrainingError: there are ids, but no tokenizer that could have made them.
        """
        texts = (text for content in sample.contents for text in self._texts(content, sample))
        return [np.array(self._tokenizer.encode(text), np.uint32) for text in texts if text.strip()]

    def _texts(self, content: str | Integer[np.ndarray, " tokens"], sample: Sample) -> Iterator[str]:
        if isinstance(content, str):
            yield content
            return
        if self._source is None:
            raise TrainingError(f"{sample.place} holds ids; name the tokenizer that made them with --source-tokenizer")
        check_ids(content, self._source, sample.place)
        begins = [] if sample.divided else np.flatnonzero(content == self._source.bos_token_id)
        for part in np.split(content, begins):
            yield self._source.decode(part.tolist())
