"""A loss that teaches block selection where to look.

Selection passes no gradient: a head whose block is not among the selected gets no signal to have it selected next time.
So the positions that predict an answer's values are also scored against what they would attend to without selection:

    L = sum_l sum_m w * KL(A || P),   A[b] = sum_{t in b} mean_g softmax_t(q_g . k_t / sqrt(head_dim))   (no gradient)
                                      P[b] ~ max_{j in windows(b)} sum_g softmax_j(q_g . K1_j / sqrt(head_dim))

over the blocks that are not forced (both renormalised there); w is the mass that A puts on them, so that heads which
look nearby cost nothing. It is the idea of the indexer losses of DeepSeek's and this paper's sparse attention, applied
to the model's own keys.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.config import ModelConfig
from sparda_jax.model import Projections
from sparda_jax.pretrain.attention import score_blocks
from sparda_jax.selection import group_heads

# Query positions per sequence that the loss looks at.
SAMPLED_QUERIES = 64
_TINY = 1e-9


def sample_queries(
    weights: Float[Array, "batch q_len"], threshold: float, key: jax.Array
) -> tuple[Int[Array, "batch sampled"], Bool[Array, "batch sampled"]]:
    """Random positions whose target weighs at least ``threshold``, and which of them are real."""
    chance = jnp.where(weights >= threshold, jax.random.uniform(key, weights.shape), -1.0)
    best, positions = jax.lax.top_k(chance, min(SAMPLED_QUERIES, weights.shape[1]))
    return positions, best >= 0


def routing_loss(
    config: ModelConfig,
    projections: Projections,
    positions: Int[Array, "batch sampled"],
    valid: Bool[Array, "batch sampled"],
) -> Float[Array, ""]:
    """The loss of one layer, averaged over valid positions and KV heads."""
    sparse = config.sparse
    length = projections.q.shape[1]
    q = jnp.take_along_axis(group_heads(projections.q, config), positions[:, :, None, None, None], axis=1)
    k = jnp.swapaxes(projections.k, 1, 2)
    logits = jnp.einsum("bqhgd,bhwd->bhgqw", q, k, preferred_element_type=jnp.float32) / config.head_dim**0.5
    past = jnp.arange(length) <= positions[:, None, None, :, None]
    attention = jax.lax.stop_gradient(jax.nn.softmax(jnp.where(past, logits, -jnp.inf), axis=-1)).mean(axis=2)
    teacher = attention.reshape(*attention.shape[:-1], -1, sparse.block_size).sum(axis=-1)

    student = score_blocks(config, q, projections.k, positions)
    blocks = jnp.arange(length // sparse.block_size)
    query_block = (positions // sparse.block_size)[:, None, :, None]
    free = (blocks >= sparse.init_blocks) & (blocks < query_block - sparse.local_blocks)
    teacher = jnp.where(free, teacher, 0)
    mass = teacher.sum(axis=-1, keepdims=True)
    teacher = teacher / (mass + _TINY)
    student = jnp.where(free, jnp.maximum(student, _TINY), 0)
    student = student / (student.sum(axis=-1, keepdims=True) + _TINY)
    divergence = jnp.where(free, teacher * (jnp.log(teacher + _TINY) - jnp.log(student + _TINY)), 0).sum(axis=-1)
    weight = jnp.where(valid[:, None], mass[..., 0], 0)
    return jnp.sum(weight * divergence) / (jnp.maximum(jnp.sum(valid), 1) * config.num_kv_heads)
