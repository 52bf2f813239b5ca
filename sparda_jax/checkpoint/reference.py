"""Dense logits straight from a source's tensors, for checking a conversion: nothing here goes through the mapping."""

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from sparda_jax.checkpoint.tensor_files import TensorEntry
from sparda_jax.config import ModelConfig
from sparda_jax.model import rope_frequencies

Entries = Mapping[str, TensorEntry]
_CHUNK_ROWS = 4096
# What each rotation takes from RopeConfig; transformers derives other numbers when it is given more.
_ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
}


def choose_reference(config: ModelConfig, entries: Entries) -> str:
    """``transformers`` where it is installed and the model fits in memory as float32, else ``numpy``, which streams."""
    if not all(importlib.util.find_spec(name) for name in ("transformers", "torch")):
        return "numpy"
    needed = 4 * sum(math.prod(entry.shape) for entry in entries.values())
    needed += 4 * config.vocab_size * config.hidden_size  # the widest value in flight, or the copy of a tied head
    return "transformers" if 1.2 * needed < _available_memory() else "numpy"


def _available_memory() -> int:
    """Bytes; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def numpy_logits(
    config: ModelConfig, entries: Entries, tokens: Int[np.ndarray, " length"]
) -> Float[np.ndarray, "length vocab"]:
    """float64 logits of one prompt with dense causal attention (docs/semantics.md 1.2), one tensor at a time."""
    x = entries["model.embed_tokens.weight"].read()[tokens].astype(np.float64) * config.embedding_scale
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        normed = _rms_norm(config, x, entries[f"{prefix}.input_layernorm.weight"])
        x = x + _attention(config, entries, f"{prefix}.self_attn", normed) * config.residual_scale
        normed = _rms_norm(config, x, entries[f"{prefix}.post_attention_layernorm.weight"])
        gate, up = (_linear(normed, entries[f"{prefix}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        # silu through tanh, which cannot overflow
        activated = gate * (0.5 * (1 + np.tanh(gate / 2))) * up
        x = x + _linear(activated, entries[f"{prefix}.mlp.down_proj.weight"]) * config.residual_scale
    head = entries["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return _linear(_rms_norm(config, x, entries["model.norm.weight"]) / config.logit_divisor, head)


def _rms_norm(config: ModelConfig, x: np.ndarray, weight: TensorEntry) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps) * weight.read().astype(np.float64)


def _linear(x: np.ndarray, weight: TensorEntry) -> np.ndarray:
    rows = weight.read()
    starts = range(0, rows.shape[0], _CHUNK_ROWS)
    return np.concatenate([x @ rows[i : i + _CHUNK_ROWS].astype(np.float64).T for i in starts], axis=-1)


def _attention(config: ModelConfig, entries: Entries, prefix: str, x: np.ndarray) -> np.ndarray:
    length = x.shape[0]
    q, k, v = (_linear(x, entries[f"{prefix}.{n}_proj.weight"]).reshape(length, -1, config.head_dim) for n in "qkv")
    position_scale, inv_freq, scale = rope_frequencies(config, length)
    phase = np.arange(length)[:, None] * position_scale.astype(np.float64) * inv_freq.astype(np.float64)
    cos, sin = np.cos(phase)[:, None] * scale, np.sin(phase)[:, None] * scale
    q, k = (np.concatenate([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (np.split(y, 2, -1) for y in (q, k)))
    future = np.triu(np.ones((length, length), bool), 1)
    heads = []
    for head in range(config.num_heads):
        shared = head // config.group_size
        scores = np.where(future, -np.inf, q[:, head] @ k[:, shared].T / math.sqrt(config.head_dim))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared])
    return _linear(np.concatenate(heads, -1), entries[f"{prefix}.o_proj.weight"])


def transformers_logits(
    config: ModelConfig, entries: Entries, tokens: Int[np.ndarray, " length"]
) -> Float[np.ndarray, "length vocab"]:
    """float32 logits of transformers' ``LlamaForCausalLM``, with the three scales folded into its weights."""
    # Not among the dependencies: used where the user has them.
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    rope = config.rope
    scaling: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    values = {name: getattr(rope, name) for name in _ROPE_FIELDS[rope.rope_type]}
    scaling |= {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v is not None}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=rope.theta,
            rope_scaling=scaling,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            value = _folded(config, entries, name)
            parameter.copy_(torch.from_numpy(value))
        return llama.eval()(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].float().numpy()


def _folded(config: ModelConfig, entries: Entries, name: str) -> np.ndarray:
    tied = name == "lm_head.weight" and config.tie_word_embeddings
    value = entries["model.embed_tokens.weight" if tied else name].read().astype(np.float32)
    if name == "model.embed_tokens.weight":
        return value * np.float32(config.embedding_scale)
    if name == "lm_head.weight":
        return value / np.float32(config.logit_divisor)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return value * np.float32(config.residual_scale)
    return value
