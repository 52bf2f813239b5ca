"""How far the Forecast is from the teacher, pair by pair, and the slope of it (docs/semantics.md 11.4, 11.5 and 11.8).

Everything about the student stays a logarithm, so that no probability is lost to underflow.
"""

import dataclasses
import enum

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sparda_jax.train._rows import BlockSets, Queries, SelectionGrid, log_sum_exp, safe_log
from sparda_jax.train.teacher import TeacherScores


class Objective(enum.StrEnum):
    """What the loss compares."""

    PUBLISHED = "published"  # the chosen windows and the rest, every query alike
    CHOSEN = "chosen"  # the chosen windows among each other: PUBLISHED without the rest (for ablations)
    BLOCKS = "blocks"  # the blocks that can be chosen, queries with one outstanding block above all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """Of each (query, KV head) pair of a chunk.

    Attributes:
        loss: what the pair adds to the loss: its divergence times its weight.
        weight: what it adds to the divisor.
        active: whether it has something to learn.
        slope: derivative of ``loss`` with respect to the student's scaled logits.
    """

    loss: Float[Array, "batch kv_heads chunk"]
    weight: Float[Array, "batch kv_heads chunk"]
    active: Bool[Array, "batch kv_heads chunk"]
    slope: Float[Array, "batch kv_heads chunk windows"]


def divergence(
    objective: Objective,
    logits: Float[Array, "batch kv_heads chunk windows"],
    teacher: TeacherScores,
    chosen: Bool[Array, "batch kv_heads chunk blocks"],
    queries: Queries,
    sets: BlockSets,
    grid: SelectionGrid,
) -> Divergence:
    """The divergence of an objective.

    Args:
        logits: of the student, over the windows that begin at or before a query; -inf for others.
        chosen: the teacher's blocks.
    """
    if objective is Objective.BLOCKS:
        return _blocks(logits, teacher, sets, queries, grid)
    compare = _published if objective is Objective.PUBLISHED else _chosen
    return compare(logits, teacher, chosen & ~sets.forced, queries, grid)


def _published(
    logits: Float[Array, "batch kv_heads chunk windows"],
    teacher: TeacherScores,
    supervised: Bool[Array, "batch kv_heads chunk blocks"],
    queries: Queries,
    grid: SelectionGrid,
) -> Divergence:
    """Between the supervised windows and one rest entry; every real pair weighs 1."""
    inside = jnp.repeat(supervised, grid.block_size // grid.kernel_stride, axis=-1)
    inside = _fill_up(inside, logits.shape[-1])
    # A supervised block lies before the local ones, so its pair has windows of both kinds; others are masked below.
    active = jnp.any(supervised, axis=-1)
    norm = log_sum_exp(logits)
    rest_norm = log_sum_exp(jnp.where(inside, -jnp.inf, logits))

    total = jnp.sum(teacher.aligned, axis=-1, keepdims=True)
    target = teacher.aligned / jnp.where(total > 0, total, 1)
    rest = jnp.sum(jnp.where(inside, 0, target), axis=-1, keepdims=True)
    terms = jnp.where(inside & (target > 0), target * (safe_log(target) - (logits - norm)), 0)
    loss = jnp.sum(terms, axis=-1) + (rest * (safe_log(rest) - (rest_norm - norm)))[..., 0]
    slope = jnp.exp(logits - norm) - jnp.where(inside, target, rest * jnp.exp(logits - rest_norm))
    return Divergence(
        loss=jnp.where(active, loss, 0),
        weight=jnp.broadcast_to(queries.real[:, None], active.shape).astype(loss.dtype),
        active=active,
        slope=jnp.where(active[..., None], slope, 0),
    )


def _chosen(
    logits: Float[Array, "batch kv_heads chunk windows"],
    teacher: TeacherScores,
    supervised: Bool[Array, "batch kv_heads chunk blocks"],
    queries: Queries,
    grid: SelectionGrid,
) -> Divergence:
    """Between the shares of the supervised windows among each other; every real pair weighs 1."""
    inside = _fill_up(jnp.repeat(supervised, grid.block_size // grid.kernel_stride, axis=-1), logits.shape[-1])
    target = jnp.where(inside, teacher.aligned, 0)
    total = jnp.sum(target, axis=-1, keepdims=True)
    active = total[..., 0] > 0
    target = target / jnp.where(total > 0, total, 1)
    logits = jnp.where(inside, logits, -jnp.inf)
    norm = log_sum_exp(logits)
    terms = jnp.where(target > 0, target * (safe_log(target) - (logits - norm)), 0)
    return Divergence(
        loss=jnp.sum(terms, axis=-1),
        weight=jnp.broadcast_to(queries.real[:, None], active.shape).astype(logits.dtype),
        active=active,
        slope=jnp.where(active[..., None], jnp.exp(logits - norm) - target, 0),
    )


def _blocks(
    logits: Float[Array, "batch kv_heads chunk windows"],
    teacher: TeacherScores,
    sets: BlockSets,
    queries: Queries,
    grid: SelectionGrid,
) -> Divergence:
    """Between the shares of the free blocks; a pair weighs as much as its largest free block's mass."""
    blocks, per_block = sets.past.shape[-1], grid.block_size // grid.kernel_stride
    choice = jnp.sum(sets.past, axis=-1, keepdims=True) > grid.num_selected_blocks
    free = sets.past & ~sets.forced & choice
    windows = logits[..., : blocks * per_block].reshape(*logits.shape[:-1], blocks, per_block)
    windows = jnp.where(free[..., None], windows, -jnp.inf)
    within = log_sum_exp(windows)
    # The first window of a free block lies inside it, so each has one; blocks that are not free are masked.
    norm = log_sum_exp(jnp.where(free, within[..., 0], -jnp.inf))
    log_share = within[..., 0] - norm

    mass = jnp.where(free, teacher.mass[..., :blocks], 0)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    target = mass / jnp.where(total > 0, total, 1)
    weight = jnp.max(mass, axis=-1) / queries.q.shape[3]
    terms = jnp.where(target > 0, target * (safe_log(target) - log_share), 0)
    slope = jnp.where(free, jnp.exp(log_share) - target, 0)[..., None] * jnp.exp(windows - within)
    slope = slope.reshape(*logits.shape[:-1], blocks * per_block)
    return Divergence(
        loss=weight * jnp.sum(terms, axis=-1),
        weight=weight,
        active=weight > 0,
        slope=weight[..., None] * _fill_up(slope, logits.shape[-1]),
    )


def _fill_up(x: Array, windows: int) -> Array:
    """With zeros for the windows of the padding behind the last block."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, windows - x.shape[-1])])
