"""The library's front door: ``SparDA.from_pretrained(path).generate(prompts)``."""

import dataclasses
import operator
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import cast

import jax
import numpy as np
from numpy.typing import DTypeLike

from sparda_jax.adaptive import Budget
from sparda_jax.assets import BUNDLED_MODEL, CALIBRATION_TEXT
from sparda_jax.checkpoint import load_model
from sparda_jax.config import ModelConfig
from sparda_jax.foresight import Foresight
from sparda_jax.generate import Runner
from sparda_jax.generation_stats import GenerationStats
from sparda_jax.in_flight import Lanes
from sparda_jax.logprobs import Logprobs
from sparda_jax.model import Decoder
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from sparda_jax.tokenizer import Tokenizer

Prompt = str | Seq[int] | Seq[Mapping[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """One continued prompt.

    Attributes:
        text, tokens: the new part, without the end-of-sequence token.
        finish_reason: "stop" at an end-of-sequence token, "length" at the limit.
        prompt_tokens: length of the prompt.
        stats: blocks read and visible per layer, with ``return_stats=True``.
        logprobs: of the tokens, a row each, with ``logprobs=``.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    stats: GenerationStats | None
    logprobs: Logprobs | None


class SparDA:
    """A model, its tokenizer and its compiled programs.

    Example:
        >>> model = SparDA.from_pretrained(mode="sparse")
        >>> model.generate(["The grass is green. The sky is"], max_new_tokens=8)[0].text
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        mode: Mode = Mode.SPARSE,
        max_model_len: int | None = None,
        foresight: Foresight | None = None,
        budget: Budget | None = None,
    ):
        calibration = tokenizer.encode(CALIBRATION_TEXT.read_text()) if mode is Mode.INFINIGEN else None
        self.tokenizer = tokenizer
        self.runner = Runner(
            model,
            mode=mode,
            max_model_len=max_model_len,
            calibration=calibration,
            foresight=foresight,
            budget=budget,
        )

    @property
    def config(self) -> ModelConfig:
        return self.runner.config

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path = BUNDLED_MODEL,
        *,
        mode: Mode | str = Mode.SPARSE,
        max_model_len: int | None = None,
        dtype: DTypeLike | None = None,
        forecast: str | Path | None = None,
        long_context: bool = False,
        device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
    ) -> "SparDA":
        """Loads a Hugging Face folder, or one that ``python -m sparda_jax.convert`` wrote.

        Args:
            path: the folder; the bundled model when left out.
            mode: dense, sparse, sparda, sparda-decode-only, infinigen, random, streaming-llm or quest.
            max_model_len: longest sequence in tokens, prompt and answer together; None: the model's own limit.
            dtype: of weights and activations; None: bfloat16 on a GPU, float32 on a CPU.
            forecast: a Forecast file for the sparda modes, in place of the checkpoint's own.
            long_context: use the published 128K LongRoPE factors (MiniCPM4.1 only).
            device: None: the first one.

        Raises:
            CheckpointError, ConfigError: the checkpoint, or what is asked of it, is not usable; the message says why.
        """
        mode = Mode(mode)
        model = load_model(path, dtype=dtype, forecast=forecast, require_forecast=mode.needs_forecast, device=device)
        if long_context:
            model.config = dataclasses.replace(model.config, rope=model.config.rope.with_minicpm41_128k())
        return cls(model, Tokenizer.from_pretrained(path), mode=mode, max_model_len=max_model_len)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of chat messages (``[{"role": ..., "content": ...}]``), or ids as they are."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode_chat(cast(Seq[Mapping[str, str]], prompt))
        return [operator.index(token) for token in cast(Seq[int], prompt)]

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        min_tokens: int = 0,
        logprobs: int | None = None,
        return_stats: bool = False,
    ) -> list[Generation]:
        """Continues a ragged batch of prompts; each result is what the prompt alone would give.

        Args:
            prompts: texts, lists of token ids, or lists of chat messages; a single one of these is a batch of one.
            max_new_tokens: new tokens at most, per prompt.
            temperature, top_p, top_k: see :class:`~sparda_jax.sampling.SamplingParams`.
            seed: prompt i is sampled with ``seed + i``, modulo 2**64.
            min_p, presence_penalty, frequency_penalty, repetition_penalty: see there.
            logit_bias: what is added to the logits of these token ids.
            min_tokens: new tokens before an end-of-sequence token.
            logprobs: fill :attr:`Generation.logprobs`, with so many of the likeliest tokens at each place.
            return_stats: fill :attr:`Generation.stats`.

        Raises:
            ValueError: a prompt is empty or too long, or a parameter is out of range.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], str | Seq | np.ndarray))
        batch = cast(list[Prompt], [prompts] if single else list(prompts))
        first = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            min_p=min_p,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=tuple((logit_bias or {}).items()),
            min_tokens=min_tokens,
            stop_token_ids=self.config.eos_token_ids,
            logprobs=logprobs,
        )
        params = [
            first if seed is None else dataclasses.replace(first, seed=(seed + i) % 2**64) for i in range(len(batch))
        ]
        lanes = self.runner.start_batch([self.encode(p) for p in batch], params)
        tokens, reasons, rows = _run(lanes, len(batch), max_new_tokens, self.config.eos_token_ids)
        return [
            Generation(
                text=self.tokenizer.decode(tokens[lane]),
                tokens=tokens[lane],
                finish_reason=reasons[lane],
                prompt_tokens=int(lanes.prompt_tokens[lane]),
                stats=lanes.stats[lane] if return_stats else None,
                logprobs=None if logprobs is None else Logprobs.concatenate(rows[lane], logprobs),
            )
            for lane in range(len(batch))
        ]


def _run(
    lanes: Lanes, batch: int, max_new_tokens: int, eos: tuple[int, ...]
) -> tuple[list[list[int]], list[str], list[list[Logprobs]]]:
    """Advances until every lane has met an end-of-sequence id or the limit."""
    tokens: list[list[int]] = [[] for _ in range(batch)]
    logprobs: list[list[Logprobs]] = [[] for _ in range(batch)]
    reasons = ["length"] * batch
    live = set(range(batch))
    while live:
        new = lanes.advance()
        if new is None:
            continue
        for lane in sorted(live):
            token = int(np.asarray(new)[lane])
            if token in eos:
                reasons[lane] = "stop"
            else:
                tokens[lane].append(token)
                if (row := lanes.logprobs[lane]) is not None:
                    logprobs[lane].append(row)
            if token in eos or len(tokens[lane]) == max_new_tokens:
                lanes.finish(lane)
                live.discard(lane)
    return tokens, reasons, logprobs
