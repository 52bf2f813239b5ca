"""What the server says when it starts: what will run, with which limits, and why."""

import dataclasses
import json
import shlex
from collections.abc import Iterator

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparda_jax.budget import MemoryPlan
from sparda_jax.config import ModelConfig
from sparda_jax.fit import gib
from sparda_jax.generate import Runner
from sparda_jax.machine import Limits
from sparda_jax.model.rope import rope_frequencies
from sparda_jax.selection import Mode
from sparda_jax.serve.access import GUARDED
from sparda_jax.serve.memory import describe
from sparda_jax.serve.settings import SamplingDefaults, Settings
from sparda_jax.tokenizer import Tokenizer

_MEANING = {
    Mode.DENSE: "every block is read",
    Mode.SPARSE: "InfLLM-V2: a layer's own queries choose its blocks",
    Mode.SPARDA: "the Forecast of the layer before chooses the blocks",
    Mode.SPARDA_DECODE_ONLY: "the Forecast chooses in decode, the layer's own queries in prefill",
    Mode.INFINIGEN: "the layer before's input chooses in decode, 32 skewed channels",
    Mode.RANDOM: "blocks by chance: a control, not for use",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Everything the start-up table shows."""

    settings: Settings
    runner: Runner
    tokenizer: Tokenizer
    sampling: SamplingDefaults
    plan: MemoryPlan
    limits: Limits
    num_parameters: int
    eos_token_ids: tuple[int, ...]
    device: jax.Device  # pyright: ignore[reportInvalidTypeForm]

    def print(self, console: Console) -> None:
        """One line for each thing that a user may be surprised by."""
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in self.lines():
            table.add_row(name, Text(text, style="yellow" if name == "warning" else ""))
        console.print(table)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Names and texts."""
        settings, runner, config = self.settings, self.runner, self.runner.config
        dtype = runner.dtype
        yield "model", f"{settings.served_name} ({settings.model})"
        weights = self.num_parameters * dtype.itemsize
        yield "parameters", f"{self.num_parameters / 1e6:,.1f} M in {dtype.name}, {gib(weights)}"
        yield "device", f"{self.device.device_kind} ({self.device}), JAX {jax.__version__}"
        yield "mode", f"{runner.mode.value}: {_MEANING[runner.mode]}{self._why_this_mode()}"
        yield "context limit", context_limit(config, runner.max_model_len, settings)
        if warning := beyond_training(config, runner.max_model_len, settings.long_context):
            yield "warning", warning
        yield "dense_len", dense_len(config, runner.mode)
        if runner.mode is not Mode.DENSE:
            yield "selection", selection(config)
        yield "rope", rope(config, runner.max_model_len)
        yield "memory", describe(self.plan)
        yield "end of answer", ", ".join(f"{i} {self._text(i)}" for i in self.eos_token_ids) or "no id: only by length"
        yield (
            "sampling",
            (
                f"temperature {self.sampling.temperature:g}, top_p {self.sampling.top_p:g}, top_k "
                f"{self.sampling.top_k or 'all'} where a request does not say ({self.sampling.source})"
            ),
        )
        yield "access", access(settings)
        if self.tokenizer.chat_template is None:
            yield "chat", "no chat template: /v1/chat/completions refuses requests, use /v1/completions"

    def _why_this_mode(self) -> str:
        if self.settings.mode is not None:
            return ""
        found = "has a" if self.runner.mode.needs_forecast else "has no"
        return f" (the default: the checkpoint {found} Forecast)"

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def context_limit(config: ModelConfig, limit: int, settings: Settings) -> str:
    """The limit and which number sets it."""
    trained = config.max_position_embeddings
    if settings.max_model_len is None:
        return f"{limit} tokens, prompt and answer: the model's max_position_embeddings (--max-model-len lowers it)"
    return f"{limit} tokens, prompt and answer: --max-model-len (the model's max_position_embeddings is {trained})"


def beyond_training(config: ModelConfig, limit: int, long_context: bool) -> str:
    """A sentence for positions that neither training nor a scaled rope covers; empty when there are none."""
    trained = config.max_position_embeddings
    if limit <= trained or long_context or config.rope.rope_type in ("linear", "dynamic", "yarn"):
        return ""
    return f"positions beyond {trained} are untrained: expect wrong answers there"


def dense_len(config: ModelConfig, mode: Mode) -> str:
    """Where selection begins."""
    if mode is Mode.DENSE:
        return "not used in this mode"
    length = config.sparse.dense_len
    return f"{length}: a request with fewer tokens reads every block" if length > 0 else f"{length}: always sparse"


def selection(config: ModelConfig) -> str:
    """The width and what is always in it."""
    sparse = config.sparse
    forced = sparse.init_blocks + sparse.local_blocks + 1
    return (
        f"{sparse.num_selected_blocks} blocks of {sparse.block_size} tokens per token and KV head: "
        f"{sparse.init_blocks} initial, {sparse.local_blocks} local and its own, "
        f"{sparse.num_selected_blocks - forced} by score"
    )


def rope(config: ModelConfig, limit: int) -> str:
    """The one factor set of this server."""
    kind = config.rope.rope_type
    position_scale, _, scale = rope_frequencies(config, limit)
    text = f"{kind}, theta {config.rope.theta:g}"
    if kind == "longrope":
        original = config.rope.original_max_position_embeddings or config.max_position_embeddings
        which, sign = ("long", ">") if limit > original else ("short", "<=")
        low, high = 1 / position_scale.max(), 1 / position_scale.min()
        text += f", {which} factors {low:.3g} to {high:.3g} (limit {limit} {sign} original length {original})"
    elif kind != "default":
        text += f", factor {config.rope.factor:g}"
    return text + (f", attention factor {scale:.4g}" if scale != 1 else "")


def access(settings: Settings) -> str:
    """Who may ask."""
    paths = ", ".join(path for path in GUARDED if settings.profile or not path.endswith("_profile"))
    text = f"no key (--api-key asks for one on {paths})" if settings.api_key is None else f"API key on {paths}"
    return text + "".join(f"; web pages of {origin} (--cors-origin)" for origin in settings.cors_origins)


def curl(url: str, report: Report) -> str:
    """A command to paste; the key is taken from the environment, never shown."""
    if report.tokenizer.chat_template is None:
        path, body = "completions", {"prompt": "The sky is", "max_tokens": 32}
    else:
        content = (
            "One of the special magic numbers for green-kettle is: 4071385.\n"
            "What is the special magic number for green-kettle mentioned in the provided text?"
        )
        path, body = "chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 32}
    body["temperature"] = 0
    key = "" if report.settings.api_key is None else '-H "Authorization: Bearer $SPARDA_API_KEY" '
    return f"curl {url}/v1/{path} {key}-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
