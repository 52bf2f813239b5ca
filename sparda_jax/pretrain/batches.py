"""Training batches made on the fly: text and recall documents packed into windows, with a loss weight for every target.

Batch `step` of a configuration is a function of (seed, stage, seq_len, step) alone, so it is the same for any number of
workers and training can go on from any step. `python -m sparda_jax.pretrain.batches --data .data/pretrain` measures
the speed.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import AsyncResult
from pathlib import Path
from types import TracebackType
from typing import TypedDict

import numpy as np
from jaxtyping import Float32, Int32, UInt8, UInt16
from tokenizers import Tokenizer

from sparda_jax.pretrain.contents import TaskMix
from sparda_jax.pretrain.facts import Spelling
from sparda_jax.pretrain.haystack import TokenCorpus
from sparda_jax.pretrain.tasks import PAD_KIND, SHORTEST_DOCUMENT, TEXT_KIND, RecallTasks
from sparda_jax.pretrain.tokenizer_training import BOS_ID


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Loss weight of a target token by what it is.

    Attributes:
        text: prose, in text windows and as filler.
        noise: filler that can't be learnt (shuffled words) or is learnt at once (repeated sentences).
        prompt: template, questions and needles.
        answer: words of an answer around its values, and the token that ends it.
        value: the values themselves.
    """

    text: float = 1.0
    noise: float = 0.15
    prompt: float = 0.1
    answer: float = 2.0
    value: float = 8.0

    def table(self) -> Float32[np.ndarray, " kinds"]:
        """Weights indexed by token kind; padding weighs nothing."""
        return np.array([0.0, self.text, self.noise, self.prompt, self.answer, self.value], np.float32)


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """What the batches of one stage of training are.

    Attributes:
        seq_len: tokens that the model reads per row; a row holds one more.
        batch_size: rows.
        seed: random seed.
        stage: number of the stage; stages of the same seed and seq_len get different batches.
        text_fraction: share of rows that are plain text.
        long_fraction: share of the recall rows that one long document fills; the others hold several short ones.
        weights: loss weights.
        spelling: how hard keys and values are to copy.
        mix: which recall documents are drawn how often.
    """

    seq_len: int
    batch_size: int
    seed: int
    stage: int = 0
    text_fraction: float = 0.5
    long_fraction: float = 0.5
    weights: LossWeights = field(default_factory=LossWeights)
    spelling: Spelling = field(default_factory=Spelling)
    mix: TaskMix = field(default_factory=TaskMix)

    def __post_init__(self) -> None:
        if self.seq_len < 2 * SHORTEST_DOCUMENT:
            raise ValueError(f"seq_len: {self.seq_len} given, must be at least {2 * SHORTEST_DOCUMENT}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size: {self.batch_size} given, must be at least 1")
        for name in ("text_fraction", "long_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: {getattr(self, name)} given, must lie between 0 and 1")


class Batch(TypedDict):
    """Tokens and the weight of predicting them: `loss_weights[:, t]` belongs to the target `tokens[:, t + 1]`."""

    tokens: Int32[np.ndarray, "batch seq_len_plus_one"]
    loss_weights: Float32[np.ndarray, "batch seq_len"]


_Rows = tuple[UInt16[np.ndarray, "batch seq_len_plus_one"], UInt8[np.ndarray, "batch seq_len_plus_one"]]


class TrainingStream:
    """Makes batches in this process.

    Args:
        tokenizer: the tokenizer.
        tokens: the tokenized training corpus, uint16, usually a memory map.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: UInt16[np.ndarray, " tokens"]) -> None:
        self.corpus = TokenCorpus(tokens, tokenizer)
        self._tokenizer = tokenizer
        self._tasks: dict[tuple[Spelling, TaskMix], RecallTasks] = {}
        self._document_starts = np.flatnonzero(tokens == BOS_ID)

    @classmethod
    def load(cls, folder: Path) -> "TrainingStream":
        """Reads the files that `prepare` wrote to `folder`."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        return cls(tokenizer, TokenCorpus.map_tokens(folder / "train.npy"))

    def tasks(self, spelling: Spelling, mix: TaskMix) -> RecallTasks:
        """The recall documents of a spelling and a mix, made once."""
        if (spelling, mix) not in self._tasks:
            self._tasks[spelling, mix] = RecallTasks(self._tokenizer, self.corpus, spelling=spelling, mix=mix)
        return self._tasks[spelling, mix]

    def batch(self, config: StreamConfig, step: int) -> Batch:
        """Batch number `step`."""
        return _with_weights(self.rows(config, step), config)

    def rows(self, config: StreamConfig, step: int) -> _Rows:
        """Token ids and token kinds of batch number `step`, both [batch_size, seq_len + 1]."""
        rng = np.random.default_rng([config.seed, config.stage, config.seq_len, step])
        width = config.seq_len + 1
        tokens = np.zeros((config.batch_size, width), np.uint16)
        kinds = np.full((config.batch_size, width), PAD_KIND, np.uint8)
        for row in range(config.batch_size):
            if rng.random() < config.text_fraction:
                start = int(rng.integers(self.corpus.tokens.size))
                self._put_text(tokens[row], kinds[row], start)
            else:
                one_long = rng.random() < config.long_fraction
                self._put_recall(
                    rng, self.tasks(config.spelling, config.mix), tokens[row], kinds[row], one_long=one_long
                )
        return tokens, kinds

    def _put_text(self, tokens: UInt16[np.ndarray, " n"], kinds: UInt8[np.ndarray, " n"], start: int) -> None:
        """Corpus text from `start`; the end of the corpus is followed by its beginning."""
        filled = 0
        while filled < tokens.size:
            part = self.corpus.tokens[start : start + tokens.size - filled]
            tokens[filled : filled + part.size] = part
            filled, start = filled + part.size, 0
        kinds[:] = TEXT_KIND

    def _put_recall(
        self,
        rng: np.random.Generator,
        tasks: RecallTasks,
        tokens: UInt16[np.ndarray, " n"],
        kinds: UInt8[np.ndarray, " n"],
        *,
        one_long: bool,
    ) -> None:
        """Recall documents until none fits any more, then the beginning of a text; no key twice in the window."""
        taken: set[str] = set()
        filled = 0
        while tokens.size - filled >= SHORTEST_DOCUMENT:
            room = tokens.size - filled
            length = room
            if filled > 0 or not one_long:
                length = int(np.exp(rng.uniform(np.log(SHORTEST_DOCUMENT), np.log(tokens.size / 2))))
                length = min(room, max(SHORTEST_DOCUMENT, length))
            document = tasks.document(rng, length, taken)
            stop = filled + document.ids.size
            tokens[filled:stop], kinds[filled:stop] = document.ids, document.kinds
            filled = stop
        if filled < tokens.size:
            start = int(self._document_starts[rng.integers(self._document_starts.size)])
            self._put_text(tokens[filled:], kinds[filled:], start)


def _with_weights(rows: _Rows, config: StreamConfig) -> Batch:
    tokens, kinds = rows
    return Batch(tokens=tokens.astype(np.int32), loss_weights=config.weights.table()[kinds[:, 1:]])


@functools.cache
def _worker_stream(folder: str) -> TrainingStream:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    return TrainingStream.load(Path(folder))


def _work(folder: str, config: StreamConfig, step: int) -> _Rows:
    # Loaded here, not when the process starts: a pool would replace a process that fails to start again and again.
    return _worker_stream(folder).rows(config, step)


class BatchPool:
    """Makes batches in worker processes, a few ahead; use it as a context manager.

    The workers are spawned, so the main module must be importable without side effects, as `multiprocessing` asks for.
    They load their data once and serve any number of configurations.

    Args:
        folder: what `prepare` wrote.
        num_workers: processes.
        ahead: batches in the making for each worker.
    """

    def __init__(self, folder: Path, *, num_workers: int, ahead: int = 3) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers: {num_workers} given, must be at least 1")
        TokenCorpus.map_tokens(folder / "train.npy")  # unpacked here once, not by every worker
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(num_workers)
        self._folder = str(folder)
        self._depth = ahead * num_workers

    def __enter__(self) -> "BatchPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.terminate()
        self._pool.join()

    def batches(self, config: StreamConfig, start: int, stop: int) -> Iterator[Batch]:
        """Batches `start` to `stop - 1` in order; an error in a worker is raised here."""
        steps = iter(range(start, stop))

        def begin(step: int) -> AsyncResult[_Rows]:
            return self._pool.apply_async(_work, (self._folder, config, step))

        pending = deque(begin(step) for step in itertools.islice(steps, self._depth))
        while pending:
            rows = pending.popleft().get()
            pending.extend(begin(step) for step in itertools.islice(steps, 1))
            yield _with_weights(rows, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".data/pretrain"), help="folder that `prepare` wrote")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8, help="batches of 64K tokens to make for each length")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with BatchPool(arguments.data, num_workers=arguments.workers) as pool:
        for seq_len in (512, 2048, 4096, 8192):
            config = StreamConfig(seq_len=seq_len, batch_size=65536 // seq_len, seed=arguments.seed)
            next(pool.batches(config, 0, 1))
            begin = time.perf_counter()
            total, answers = 0, 0.0
            for batch in pool.batches(config, 0, arguments.steps):
                total += batch["loss_weights"].size
                answers += float((batch["loss_weights"] >= config.weights.answer).sum())
            speed = total / (time.perf_counter() - begin)
            print(
                f"seq_len {seq_len:5}: {speed / 1e3:8.0f} K tokens/s, {100 * answers / total:.1f} % answer tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()
