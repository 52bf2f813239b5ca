"""The memory of a layer's programs at 64K tokens with the heads of MiniCPM4.1-8B, compiled for an H200."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder
from sparda_jax.train.forward import ForwardPass, Projected, Rows
from tests.h200.harness import compile_for_h200, needs_compiler
from tests.train.support import make_mesh

pytestmark = needs_compiler
TOKENS, HIDDEN, MEBIBYTE = 65536, 128, 2**20


@pytest.fixture(scope="module")
def forward() -> ForwardPass:
    """A narrow model: what is wide here depends on heads and tokens only."""
    data: dict[str, Any] = {
        "model_type": "minicpm", "vocab_size": 8, "hidden_size": HIDDEN, "intermediate_size": 256,
        "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
        "max_position_embeddings": TOKENS, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "scale_emb": 1.0, "scale_depth": 1.4, "dim_model_base": 128,
    }  # fmt: skip
    config = ModelConfig.from_hf(data)
    return ForwardPass(Decoder(config, has_forecast=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), make_mesh())


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct((1, TOKENS, *shape), dtype)


ROWS = Rows(tokens=struct(dtype=jnp.int32), positions=struct(dtype=jnp.int32), valid=struct(dtype=jnp.bool_))
PROJECTED = Projected(normed=struct(HIDDEN), q=struct(32, 128), k=struct(2, 128), v=struct(2, 128))


def test_loss_and_gradient(forward: ForwardPass) -> None:
    weight = jax.ShapeDtypeStruct((HIDDEN, 256), jnp.float32)
    learn = jax.value_and_grad(forward._loss, has_aux=True)
    stats = compile_for_h200(learn, weight, ROWS, struct(HIDDEN), PROJECTED).memory_stats
    assert stats.temp_size_in_bytes < 600 * MEBIBYTE


def test_the_rest_of_the_layer(forward: ForwardPass) -> None:
    """Queries in and heads out are 512 MiB each, and each is laid out anew once."""
    ((graphdef, weights),) = forward._layers
    blocks = jax.ShapeDtypeStruct((1, 2, TOKENS, TOKENS // 64 // 32), jnp.uint32)
    advance = functools.partial(forward._advance_rows, graphdef)
    stats = compile_for_h200(advance, weights, struct(HIDDEN), PROJECTED, blocks).memory_stats
    assert stats.temp_size_in_bytes < 1536 * MEBIBYTE
