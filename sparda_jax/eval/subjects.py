"""What is asked: a checkpoint in one mode."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sparda_jax.assets import CALIBRATION_TEXT
from sparda_jax.config import ConfigError
from sparda_jax.eval.prompting import Prompt
from sparda_jax.generate import Runner
from sparda_jax.in_flight import Lanes
from sparda_jax.model import Decoder
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from sparda_jax.tokenizer import Tokenizer

# Of a prefill chunk on a GPU, so that there is one program for all lengths.
_GPU_CHUNK = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer.

    Attributes:
        text: behind the prompt's beginning of it.
        width: blocks that a token of it read, per layer and KV head, on average; None: not known.
        prefill_read: of the blocks that the prompt's tokens saw, the share that they read; None: not known.
    """

    text: str
    width: float | None = None
    prefill_read: float | None = None


class Subject(Protocol):
    """Something that answers prompts."""

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Greedy answers, in order."""
        ...


class _OneCapacity(Runner):
    """All prompts in caches of one size: a GPU's kernels take no longer for it, and there is one program a step."""

    def capacity_for(self, length: int) -> int:
        block_size = self.config.sparse.block_size
        return -(-self.max_model_len // block_size) * block_size


class Checkpoint:
    """A model in one mode, ``batch`` prompts at a time.

    Args:
        model: the weights.
        tokenizer: theirs.
        mode: what selects blocks.
        max_model_len: longest prompt and answer together, in tokens.
        batch: prompts that go through the model together.

    Raises:
        ConfigError: the mode needs a Forecast that is not there.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, mode: Mode, max_model_len: int, batch: int):
        on_gpu = next(iter(model.embed_tokens.devices())).platform != "cpu"
        calibration = tokenizer.encode(CALIBRATION_TEXT.read_text()) if mode is Mode.INFINIGEN else None
        kind = _OneCapacity if on_gpu else Runner
        self.runner = kind(model, mode=mode, max_model_len=max_model_len, calibration=calibration)
        if on_gpu:
            self.runner.prefill_chunks = (_GPU_CHUNK,)
        self._tokenizer, self._batch = tokenizer, batch

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        found: list[Answer] = []
        for start in range(0, len(prompts), self._batch):
            found += self._together(prompts[start : start + self._batch])
        return found

    def _together(self, prompts: Sequence[Prompt]) -> list[Answer]:
        # A short batch is filled up with prompts of one token: another size would be another program.
        padding = self._batch - len(prompts)
        ids = [*(prompt.ids for prompt in prompts), *[[0]] * padding]
        eos = self.runner.config.eos_token_ids
        params = [SamplingParams(max_tokens=p.new_tokens, temperature=0.0, stop_token_ids=eos) for p in prompts]
        params += [SamplingParams(max_tokens=1, temperature=0.0)] * padding
        lanes = self.runner.start_batch(ids, params)
        tokens = _run(lanes, params, eos)
        return [self._answer(lanes, lane, tokens[lane]) for lane in range(len(prompts))]

    def _answer(self, lanes: Lanes, lane: int, tokens: list[int]) -> Answer:
        stats, config = lanes.stats[lane], self.runner.config
        rows = stats.decode.tokens * config.num_layers * config.num_kv_heads
        return Answer(
            text=self._tokenizer.decode(tokens),
            width=sum(stats.decode.blocks_read) / rows if rows else None,
            prefill_read=stats.prefill.read_fraction,
        )


def _run(lanes: Lanes, params: Sequence[SamplingParams], eos: tuple[int, ...]) -> list[list[int]]:
    """Advances until every lane has met an end-of-sequence id or its limit."""
    tokens: list[list[int]] = [[] for _ in params]
    live = set(range(len(params)))
    while live:
        new = lanes.advance()
        if new is None:
            continue
        for lane in sorted(live):
            token = int(np.asarray(new)[lane])
            if token not in eos:
                tokens[lane].append(token)
            if token in eos or len(tokens[lane]) == params[lane].max_tokens:
                lanes.finish(lane)
                live.discard(lane)
    return tokens


def check_width(widths: Sequence[float], expected: int, shortest: int, mode: Mode) -> None:
    """Refuses a comparison of modes that read unequal numbers of blocks.

    Args:
        widths: of answers, see `Answer`.
        expected: blocks that every mode but dense selects.
        shortest: blocks of the shortest prompt.

    Raises:
        ConfigError: a mode that selects read another number.
    """
    if mode is Mode.DENSE or shortest < expected or not widths:
        return
    if min(widths) != expected or max(widths) != expected:
        raise ConfigError(
            f"mode={mode.value} read {min(widths):g} to {max(widths):g} blocks a token, and {expected} are selected: "
            "modes of unequal widths can't be compared"
        )
