"""Calibration of the InfiniGen baseline (docs/semantics.md section 7.3)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.forward import Skew
from sparda_jax.model import Decoder, rope_tables
from sparda_jax.pallas_kernels.sparse_attention import masked_attention
from sparda_jax.selection import group_heads

MAX_CALIBRATION_TOKENS = 2048


def calibrate(model: Decoder, tokens: Sequence[int], max_len: int | None = None) -> Skew:
    """The basis that skews queries and keys, a matrix ``[kv_heads, head_dim, head_dim]`` per layer, float32.

    A KV head's basis are the right singular vectors of its group's mean query over the calibration text. The
    published method orders them by the product of the singular values of queries and keys; only the *set* of channels
    chosen later matters, so the order is left as it comes.

    Args:
        tokens: calibration text; the first 2048 are used, densely attended.
    """
    config = model.config
    ids = jnp.asarray([list(tokens)[:MAX_CALIBRATION_TOKENS]], jnp.int32)
    length = ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
    stored = jnp.ones((1, config.num_kv_heads, length), bool)
    cos, sin = rope_tables(config, jnp.arange(length)[None], max_len)
    bases = []

    def attend(projections):
        q = group_heads(projections.q, config)
        mean = np.asarray(jnp.mean(q[0].astype(jnp.float32), axis=2), np.float64)
        _, vectors = np.linalg.eigh(np.einsum("thc,thd->hcd", mean, mean))
        bases.append(jnp.asarray(vectors, jnp.float32))
        k, v = (jnp.swapaxes(x, 1, 2) for x in (projections.k, projections.v))
        allowed = jnp.broadcast_to(causal, (1, config.num_kv_heads, length, length))
        return jax.jit(masked_attention)(q, k, v, allowed, stored).reshape(projections.q.shape)

    x = model.embed(ids)
    for layer in model.layers:
        x = layer(x, cos, sin, attend)
    return tuple(bases)
