"""A checkpoint folder with random weights: small enough to compile and run in a moment, sparse from 256 tokens on."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from sparda_jax.checkpoint import save_hf
from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder
from tests.serve.tiny_tokenizer import BOS, EOS, IM_END, train_backend, write_tokenizer


def write_checkpoint(folder: Path, *, has_forecast: bool = False, **config: Any) -> Path:
    """Writes tokenizer, config and weights under ``folder / "tiny"``; ``config`` replaces entries of config.json."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer)
    data = {
        "model_type": "minicpm",
        "architectures": ["MiniCPMForCausalLM"],
        "vocab_size": train_backend().get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "scale_emb": 1.0,
        "scale_depth": 1.4,
        "dim_model_base": 64,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, IM_END],
        "sparse_config": {"init_blocks": 1, "window_size": 64, "topk": 2, "dense_len": 256},
    } | config
    model = Decoder(ModelConfig.from_hf(data), has_forecast=has_forecast, dtype=jnp.float32, rngs=nnx.Rngs(0))
    out = folder / "tiny"
    save_hf(model, tokenizer, out, data, generation_config={"do_sample": False, "eos_token_id": [EOS, IM_END]})
    return out
