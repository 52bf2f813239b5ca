"""A corpus: all documents to train on as token ids, tokenised once or read where they lie."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sparda_jax.config import ModelConfig
from sparda_jax.tokenizer import Tokenizer
from sparda_jax.train import mds
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.mapped import map_tokens, mds_fingerprint
from sparda_jax.train.sources import Source, find_sources
from sparda_jax.train.token_arrays import JoinedTokens, TokenArray
from sparda_jax.train.tokenise import texts_fingerprint, tokenise
from sparda_jax.train.vocabulary import check_made_for

Progress = Callable[[int, int], None]
"""Called with the bytes of text that are done and all bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents as token ids, one after the other.

    Attributes:
        tokens: of some integer dtype; usually a memory map, or several.
        starts: document i is ``tokens[starts[i] : starts[i + 1]]``.
        fingerprint: hash of the contents and the tokenizer.
        domains: the numbers of each domain's documents.
    """

    tokens: TokenArray
    starts: Int64[np.ndarray, " documents_plus_one"]
    fingerprint: str
    domains: Mapping[str, Int64[np.ndarray, " documents"]] = dataclasses.field(default_factory=dict)

    @property
    def lengths(self) -> Int64[np.ndarray, " documents"]:
        """Tokens of each document."""
        return np.diff(self.starts)


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Refuses a tokenizer that can't be the model's.

    Raises:
        TrainingError: it has more ids than the model, or another beginning-of-sequence id.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise TrainingError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}: it belongs to another model"
        )
    given, expected = tokenizer.bos_token_id, config.bos_token_id
    if given is not None and expected is not None and given != expected:
        raise TrainingError(
            f"the tokenizer's bos_token has id {given}, config.json says {expected}: it belongs to another model"
        )


def load_corpus(
    paths: Sequence[Path], tokenizer_folder: Path, cache: Path, *, progress: Progress = lambda done, total: None
) -> Corpus:
    """Tokenises the texts, or takes what an earlier call with the same texts and tokenizer left in ``cache``.

    Every text begins as a prompt does: with the one BOS of a model that wants it. Token ids are taken as they are; MDS
    shards of them are read where they lie.

    Args:
        paths: see :func:`~sparda_jax.train.sources.find_sources`.
        tokenizer_folder: holds ``tokenizer.json``.
        cache: for the texts, and for each data set of ids, a folder named after the fingerprint is made in
            it, whole or not at all.
        progress: of the tokenising; not called when the cache has it.

    Raises:
        TrainingError: there is no text, something can't be read, or ``cache`` can't be written.
        TokenizerError: the tokenizer can't be read.
    """
    sources = find_sources(paths)
    tokenizer = Tokenizer.from_pretrained(tokenizer_folder)
    texts = [source for source in sources if not _holds_ids(source)]
    total, done = sum(source.num_bytes for source in sources), 0
    parts: list[Corpus] = []
    for group in ([texts] if texts else []) + [[source] for source in sources if source not in texts]:
        report = functools.partial(lambda base, more: progress(base + more, total), done)
        if group is texts:
            fingerprint = texts_fingerprint(texts, tokenizer_folder)
            tokens, starts, counts = tokenise(texts, tokenizer, cache, fingerprint, report)
        else:
            folder = group[0].path
            check_made_for(folder, tokenizer)
            fingerprint = mds_fingerprint(folder)
            tokens, starts = map_tokens(folder, cache, fingerprint, tokenizer.vocab_size, report)
            counts = np.array([len(starts) - 1])
        domains = _documents_of(group, counts)
        parts.append(Corpus(tokens=tokens, starts=starts, fingerprint=fingerprint, domains=domains))
        done += sum(source.num_bytes for source in group)
    return _join(parts)


def _holds_ids(source: Source) -> bool:
    return source.path.is_dir() and mds.kind(source.path, mds.read_index(source.path)) == mds.IDS


def _documents_of(group: Sequence[Source], counts: Int64[np.ndarray, " sources"]) -> dict[str, np.ndarray]:
    """Numbers of each domain's documents, of which each source has ``counts``."""
    names = list(dict.fromkeys(source.domain for source in group))
    domain_of = np.repeat([names.index(source.domain) for source in group], counts)
    return {name: np.flatnonzero(domain_of == number) for number, name in enumerate(names)}


def _join(parts: Sequence[Corpus]) -> Corpus:
    if len(parts) == 1:
        return parts[0]
    starts, domains = [np.zeros(1, np.int64)], {}
    for part in parts:
        before = sum(map(len, starts)) - 1
        for domain, documents in part.domains.items():
            domains[domain] = np.concatenate([domains.get(domain, documents[:0]), documents + before])
        starts.append(part.starts[1:] + starts[-1][-1])
    fingerprints = "\n".join(part.fingerprint for part in parts)
    return Corpus(
        tokens=JoinedTokens([part.tokens for part in parts]),
        starts=np.concatenate(starts),
        fingerprint=hashlib.sha256(fingerprints.encode()).hexdigest(),
        domains=domains,
    )
