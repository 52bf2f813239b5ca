"""Small random models for tests: HF config dicts, and weights by the recipe of the golden whole-model files."""

import zlib
from typing import Any

import ml_dtypes
import numpy as np


def toy_config(**changes: Any) -> dict[str, Any]:
    """A 2-layer MiniCPM-style config.json: 8 heads of 16 over 2 KV heads, block 64, 6 blocks selected, never dense.

    Keyword arguments replace top-level fields; `sparse_config` is merged into the default one.
    """
    sparse = {
        "kernel_size": 32,
        "kernel_stride": 16,
        "init_blocks": 1,
        "block_size": 64,
        "window_size": 128,
        "topk": 4,
        "dense_len": -1,
        "infinigen_num_channels": 4,
    } | changes.pop("sparse_config", {})
    config = {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "vocab_size": 96,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "scale_emb": 12,
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    return config | changes | {"sparse_config": sparse}


def weight_shapes(config: dict[str, Any], forecast: bool = True) -> dict[str, tuple[int, ...]]:
    """HF name -> shape [out, in] of every tensor (docs/semantics.md 8.1, 8.3)."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_dim, kv_dim = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        shapes[attn + "q_proj.weight"] = (q_dim, hidden)
        shapes[attn + "k_proj.weight"] = shapes[attn + "v_proj.weight"] = (kv_dim, hidden)
        shapes[attn + "o_proj.weight"] = (hidden, q_dim)
        if forecast:
            shapes[attn + "q_future_proj.weight"] = (kv_dim, hidden)
            if i == 0:
                shapes[attn + "q_curr_proj.weight"] = (kv_dim, hidden)
        shapes[mlp + "gate_proj.weight"] = shapes[mlp + "up_proj.weight"] = (ffn, hidden)
        shapes[mlp + "down_proj.weight"] = (hidden, ffn)
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (hidden,)
        shapes[f"model.layers.{i}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def toy_weights(config: dict[str, Any], seed: int = 0, forecast: bool = True) -> dict[str, np.ndarray]:
    """Every tensor in bfloat16, each from its own seeded stream, scaled so that selection and logits vary widely.

    The golden files of the whole model state this recipe and a checksum of each tensor it makes.
    """
    divisor = config["hidden_size"] / config["dim_model_base"]
    weights = {}
    for name, shape in weight_shapes(config, forecast).items():
        w = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
        if name.endswith("norm.weight"):
            w = 1 + 0.1 * w
        elif name.startswith("model.embed_tokens"):
            w = 0.1 * w
        elif name.startswith("lm_head"):
            w = 2 * divisor / np.sqrt(shape[1]) * w
        else:
            gain = 2 if name.endswith(("q_proj.weight", "o_proj.weight")) else 1
            w = gain / np.sqrt(shape[1]) * w
        weights[name] = w.astype(np.float32).astype(ml_dtypes.bfloat16)
    return weights
