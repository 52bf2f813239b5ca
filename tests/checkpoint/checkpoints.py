"""Small checkpoints with random weights, laid out from docs/semantics.md section 8 and not from the code under test."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LAYERS, HIDDEN, FFN, VOCAB = 3, 64, 96, 80
Q_SIZE, KV_SIZE = 64, 32
# 1e30, -0, the smallest denormal, a denormal, infinities, NaNs with payloads, the largest finite value
SPECIAL_BITS = np.array([0x7149, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC1, 0xFFAB, 0x7F81, 0x7F7F], np.uint16)


def config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` in MiniCPM4.1's manner."""
    return {
        "model_type": "minicpm",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 16,
        "eos_token_id": [2],
    } | changes


def base_shapes(*, tied: bool = False, layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (Q_SIZE, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_SIZE, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_SIZE, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, Q_SIZE),
            f"{prefix}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, FFN),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    return shapes if tied else shapes | {"lm_head.weight": (VOCAB, HIDDEN)}


def forecast_shapes(layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    names = [f"model.layers.{layer}.self_attn.q_future_proj.weight" for layer in range(layers)]
    return dict.fromkeys([*names, "model.layers.0.self_attn.q_curr_proj.weight"], (KV_SIZE, HIDDEN))


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], *, seed: int = 0, dtype: np.dtype = BFLOAT16
) -> dict[str, np.ndarray]:
    """Norm weights near one; matrices large enough that every one of them matters to the logits."""
    generator = np.random.default_rng(seed)
    values = {}
    for name, shape in shapes.items():
        noise = generator.standard_normal(shape)
        values[name] = (noise * 0.15 if len(shape) == 2 else 1 + noise * 0.2).astype(dtype)
    return values


def write_hf(folder: Path, tensors: Mapping[str, np.ndarray], config_json: Mapping[str, Any], shards: int = 1) -> Path:
    """A Hugging Face folder; with several shards also their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config_json)))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        part = {name: value for name, value in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_forecast(path: Path, tensors: Mapping[str, np.ndarray], **metadata: Any) -> Path:
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.with_suffix(".json").write_text(json.dumps(metadata))
    return path


def bits(value: np.ndarray) -> bytes:
    return np.ascontiguousarray(value).tobytes()
