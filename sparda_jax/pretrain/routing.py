"""A loss that teaches block selection where to look.

Selection passes no gradient: a head whose block is not among the selected gets no signal to have it selected next time.
So the positions that predict an answer's values are also scored against what they would attend to without selection:

    L = sum_l sum_m w * KL(A || P),   A[b] = sum_{t in b} mean_g softmax_t(q_g . k_t / sqrt(head_dim))   (no gradient)
                                      P[b] ~ max_{j in windows(b)} sum_g softmax_j(q_g . K1_j / sqrt(head_dim))
    or, for a Forecast F,             P[b] ~ exp(max_{j in windows(b)} F . K1_j / sqrt(head_dim))

over the blocks that are not forced (both renormalised there); w is the mass that A puts on them, so that heads which
look nearby cost nothing. It is the idea of the indexer losses of DeepSeek's and this paper's sparse attention, applied
to the model's own keys. The gradient goes into whatever scores the blocks: the layer's own queries and keys, or the
Forecast, the keys and through the Forecast's input the layers before.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sparda_jax.config import ModelConfig
from sparda_jax.model import Projections
from sparda_jax.pretrain.attention import foresee_blocks, score_blocks
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingTeacher:
    """Where one layer's sampled queries would look; no gradient.

    Attributes:
        positions: of the queries. valid: which of them are real.
        free: the blocks that are not forced. share: A, renormalised over them. mass: what A had there.
    """

    positions: Int[Array, "batch sampled"]
    valid: Bool[Array, "batch sampled"]
    free: Bool[Array, "batch 1 sampled blocks"]
    share: Float[Array, "batch kv_heads sampled blocks"]
    mass: Float[Array, "batch kv_heads sampled"]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        projections: Projections,
        positions: Int[Array, "batch sampled"],
        valid: Bool[Array, "batch sampled"],
    ) -> "RoutingTeacher":
        """From a layer's projections of whole sequences, whose length is a multiple of ``block_size``."""
        sparse = config.sparse
        length = projections.q.shape[1]
        q, k = jax.lax.stop_gradient((_at(group_heads(projections.q, config), positions), projections.k))
        logits = jnp.einsum("bqhgd,bwhd->bhgqw", q, k, preferred_element_type=jnp.float32) / config.head_dim**0.5
        past = jnp.arange(length) <= positions[:, None, None, :, None]
        attention = jax.nn.softmax(jnp.where(past, logits, -jnp.inf), axis=-1).mean(axis=2)
        blocks = jnp.arange(length // sparse.block_size)
        query_block = (positions // sparse.block_size)[:, None, :, None]
        free = (blocks >= sparse.init_blocks) & (blocks < query_block - sparse.local_blocks)
        share = jnp.where(free, attention.reshape(*attention.shape[:-1], -1, sparse.block_size).sum(axis=-1), 0)
        mass = share.sum(axis=-1)
        return cls(positions=positions, valid=valid, free=free, share=share / (mass[..., None] + _TINY), mass=mass)

    def divergence(self, log_share: Float[Array, "batch kv_heads sampled blocks"]) -> Float[Array, ""]:
        """``w KL(A || P)`` for a student's ``log P``, averaged over valid positions and KV heads."""
        terms = jnp.where(self.free & (self.share > 0), self.share * (jnp.log(self.share + _TINY) - log_share), 0)
        weight = jnp.where(self.valid[:, None], self.mass, 0)
        return jnp.sum(weight * terms.sum(axis=-1)) / (jnp.maximum(jnp.sum(self.valid), 1) * self.mass.shape[1])


def routing_loss(config: ModelConfig, projections: Projections, teacher: RoutingTeacher) -> Float[Array, ""]:
    """The loss of one layer's own selector."""
    q = _at(group_heads(projections.q, config), teacher.positions)
    scores = jnp.maximum(score_blocks(config, q, projections.k, teacher.positions), _TINY)
    total = jnp.sum(jnp.where(teacher.free, scores, 0), axis=-1, keepdims=True)
    return teacher.divergence(jnp.log(scores) - jnp.log(total + _TINY))


def foresight_loss(
    config: ModelConfig,
    forecast: Float[Array, "batch q_len kv_heads head_dim"],
    projections: Projections,
    teacher: RoutingTeacher,
) -> Float[Array, ""]:
    """The loss of the Forecast that selects for this layer: layer 0's ``q_curr``, else the previous ``q_future``."""
    scores = foresee_blocks(config, _at(forecast, teacher.positions), projections.k, teacher.positions)
    # A query that sees no free block has a mass of 0; its logits must not be NaN.
    logits = jnp.where(teacher.free, scores / config.head_dim**0.5, jnp.finfo(jnp.float32).min)
    return teacher.divergence(jax.nn.log_softmax(logits, axis=-1))


def _at(
    x: Float[Array, "batch q_len ..."], positions: Int[Array, "batch sampled"]
) -> Float[Array, "batch sampled ..."]:
    return jnp.take_along_axis(x, positions.reshape(*positions.shape, *(1,) * (x.ndim - 2)), axis=1)
