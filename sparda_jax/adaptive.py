"""A number of blocks for each row, by how sure its scores are (docs/ablations.md); for experiments, in decode.

A row that looks for one thing has one outstanding block and needs few, one that looks everywhere needs many. With the
same number on average, rows of the second kind get what those of the first don't use.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """How many of the free blocks a row gets.

    Attributes:
        share: as many of the best as together hold this share of the softmax over the free blocks' scores, from 0 to 1.
        most: but no more than these, and one at least.
    """

    share: Float[Array, ""]
    most: int = dataclasses.field(metadata={"static": True})


def select_by_share(
    scores: Float[Array, "batch kv_heads q_len blocks"],
    query_block: Int[Array, "batch q_len"],
    budget: Budget,
    config: ModelConfig,
) -> Int[Array, "batch kv_heads q_len width"]:
    """The forced blocks and the best free ones, ascending, -1 at the end; ``width`` is the most a row can get.

    ``softmax_b(score[b] / sqrt(head_dim))`` runs over the past blocks that are not forced; equal scores go to the
    lowest id.
    """
    sparse = config.sparse
    ids, own = jnp.arange(scores.shape[-1]), query_block[:, None, :, None]
    forced = (ids <= own) & ((ids < sparse.init_blocks) | (ids >= own - sparse.local_blocks))
    free = (ids <= own) & ~forced
    shares = jax.nn.softmax(jnp.where(free, scores / jnp.sqrt(jnp.float32(config.head_dim)), -jnp.inf), axis=-1)
    # A row without free blocks has NaN here, and no block that they could choose.
    order = jnp.argsort(jnp.where(free, -scores, jnp.inf), axis=-1, stable=True)
    best = jnp.take_along_axis(shares, order, axis=-1)
    before = jnp.cumsum(best, axis=-1) - best
    ranks = jnp.arange(scores.shape[-1])
    wanted = (ranks == 0) | ((before < budget.share) & (ranks < budget.most))
    taken = jnp.put_along_axis(jnp.zeros_like(free & wanted), order, wanted, axis=-1, inplace=False)
    kept = jnp.where(forced | (free & taken), ids, scores.shape[-1])
    width = min(sparse.init_blocks + sparse.local_blocks + 1 + budget.most, scores.shape[-1])
    kept = jnp.sort(kept, axis=-1)[..., :width]
    return jnp.where(kept == scores.shape[-1], -1, kept)
