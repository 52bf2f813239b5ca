"""Several Forecast heads for each KV head: what they say together, and how a slope is shared out to them.

docs/semantics.md section 11.9. With one head everything here is that of 11.4 and 5.4.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sparda_jax.train._rows import dot, log_sum_exp


def score_heads(
    student: Float[Array, "batch chunk forecast_heads head_dim"],
    compressed: Float[Array, "batch kv_heads windows head_dim"],
) -> Float[Array, "batch kv_heads heads chunk windows"]:
    """Raw products with the compressed keys; head ``a`` of KV head ``m`` is ``m * heads + a`` of the student."""
    if student.shape[2] == compressed.shape[1]:
        return dot("bqhd,bhwd->bhqw", student, compressed)[:, :, None]
    rows = student.reshape(*student.shape[:2], compressed.shape[1], -1, student.shape[-1])
    return dot("bqhad,bhwd->bhaqw", rows, compressed)


def slope_of_student(
    slopes: Float[Array, "batch kv_heads heads chunk windows"],
    compressed: Float[Array, "batch kv_heads windows head_dim"],
) -> Float[Array, "batch chunk forecast_heads head_dim"]:
    """The way back from `score_heads`."""
    if slopes.shape[2] == 1:
        return dot("bhqw,bhwd->bqhd", slopes[:, :, 0], compressed)
    rows = dot("bhaqw,bhwd->bqhad", slopes, compressed)
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


def joint_logits(
    scores: Float[Array, "batch kv_heads heads chunk windows"], seen: Bool[Array, "batch 1 chunk windows"], scale: float
) -> Float[Array, "batch kv_heads chunk windows"]:
    """Logits of what the heads say together, -inf where a window is not seen: ``log sum_a softmax_j(scale * scores)``.

    Of one head the scaled scores themselves, which are the same but for a number that each row adds.
    """
    if scores.shape[2] == 1:
        return jnp.where(seen, scores[:, :, 0] / scale, -jnp.inf)
    return _sum_of(_log_shares(scores, seen, scale))


def share_out(
    slope: Float[Array, "batch kv_heads chunk windows"],
    scores: Float[Array, "batch kv_heads heads chunk windows"],
    seen: Bool[Array, "batch 1 chunk windows"],
    scale: float,
) -> Float[Array, "batch kv_heads heads chunk windows"]:
    """The derivative with respect to each head's scaled scores, from that with respect to `joint_logits`.

    Where head a gives window j the share ``s_a[j]``, its part of a slope is ``r_a = slope s_a / sum_b s_b``, and what
    the softmax gives back ``s_a sum_j r_a[j]``.
    """
    if scores.shape[2] == 1:
        return slope[:, :, None]
    shares = _log_shares(scores, seen, scale)
    whole = _sum_of(shares)
    known = jnp.where(jnp.isneginf(whole), 0, whole)[:, :, None]
    parts = slope[:, :, None] * jnp.exp(shares - known)
    return parts - jnp.exp(shares) * jnp.sum(parts, axis=-1, keepdims=True)


def ranking(
    scores: Float[Array, "batch kv_heads heads chunk windows"],
    ended: Bool[Array, "batch 1 chunk windows"],
    scale: float,
) -> Float[Array, "batch kv_heads chunk windows"]:
    """What serving ranks the windows that have ended by: the raw products of one head, else the sum of softmaxes."""
    if scores.shape[2] == 1:
        return scores[:, :, 0]
    return jnp.sum(jnp.exp(_log_shares(scores, ended, scale)), axis=2)


def _log_shares(scores: Array, allowed: Array, scale: float) -> Array:
    logits = jnp.where(allowed[:, :, None], scores / scale, -jnp.inf)
    return logits - log_sum_exp(logits)


def _sum_of(shares: Array) -> Array:
    """The logarithm of the sum over heads; -inf where every head has nothing."""
    peak = jnp.max(shares, axis=2)
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    total = jnp.sum(jnp.exp(shares - peak[:, :, None]), axis=2)
    return jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + peak, -jnp.inf)
