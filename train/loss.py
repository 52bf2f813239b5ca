"""The Forecast loss of one layer and its gradient, in one sweep over the queries (docs/semantics.md section 11).

The student of layer 0 is its own ``q_curr``, that of layer l > 0 the ``q_future`` of layer l - 1. The teacher is
`sparda_jax.train.teacher`. The gradient is written out and computed beside the loss, so nothing is kept for the way
back but the gradient itself.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparda_jax.pallas_kernels.block_selection import bits_to_mask
from sparda_jax.train._quality import SelectionQuality, selection_quality
from sparda_jax.train._rows import (
    KEY_TILE,
    Queries,
    SelectionGrid,
    begun_windows,
    block_sets,
    chunk_of,
    count_blocks,
    join_chunks,
    make_keys,
    split_chunks,
    split_queries,
)
from sparda_jax.train.divergence import Objective, divergence
from sparda_jax.train.heads import joint_logits, score_heads, share_out, slope_of_student
from sparda_jax.train.teacher import Teacher, coarse_scores, route_chunk, teacher_scores

__all__ = ["LossParts", "Objective", "SelectionQuality", "Teacher", "forecast_loss"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossParts:
    """The loss of one layer over a batch, as sums, so that micro-batches and devices may be added.

    Attributes:
        loss: sum over all (query, KV head) pairs of divergence times weight. The loss is ``loss / weight``.
        weight: sum of the weights; by the published objective each pair of a valid query weighs 1.
        pairs: all pairs of valid queries, those with nothing to learn included.
        supervised_pairs: pairs with something to learn; the others add 0 to ``loss``.
        quality: metrics; costs nothing where a jitted caller drops it. No gradient.
        blocks: what the base attends to, the blocks of `route`, as bits: block b is bit ``b % 32`` of word ``b // 32``.
        student_blocks: what serving by the Forecast would attend to, as bits; free of cost like ``quality``.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    pairs: Int[Array, ""]
    supervised_pairs: Int[Array, ""]
    quality: SelectionQuality
    blocks: UInt32[Array, "batch kv_heads q_len words"]
    student_blocks: UInt32[Array, "batch kv_heads q_len words"]


@functools.partial(jax.jit, static_argnames=("sparse", "objective", "teacher", "chunk", "key_tile"))
def forecast_loss(
    student: Float[Array, "batch q_len forecast_heads head_dim"],
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    positions: Int[Array, "batch length"],
    valid: Bool[Array, "batch length"],
    sparse: SelectionGrid,
    *,
    begin: int | Int[Array, ""] = 0,
    objective: Objective = Objective.PUBLISHED,
    teacher: Teacher = Teacher.FINE,
    chunk: int | None = None,
    key_tile: int = KEY_TILE,
) -> LossParts:
    """``sum KL(teacher || student)``, differentiable in ``student``.

    Only ``loss`` has a gradient, and only with respect to ``student``; that of q and k is zero. It is computed with the
    loss and costs one array like ``student``, in float32.

    Args:
        student: the Forecast of the layer before (layer 0: ``q_curr``), after RoPE at ``positions``: one head for each
            KV head, or as many for each, those of a KV head side by side (docs/semantics.md section 11.9).
        q, k: of this layer, after RoPE; float32 or bfloat16. Products are accumulated in float32.
        positions: of each token in its own document, from 0. A row may hold several documents, each of which starts at
            a multiple of ``block_size``; `check_packing` checks a batch on the host.
        valid: False for padding, whose student, q and k may hold anything.
        sparse: the `SparseConfig` of the model.
        begin: where in the row the first query stands; student and q may be a part of the row.
        objective: over what the divergence is taken, and how much each pair weighs.
        teacher: whose attention is the target, and chooses what is supervised. Metrics and the returned blocks are
            those of the fine teacher in any case.
        chunk: queries at a time. key_tile: fine keys at a time where no kernel runs; a multiple of ``block_size``. Both
            change memory and time only: the largest array has ``batch * heads * chunk * key_tile`` float32.

    On several devices call it under `jax.shard_map` over the batch; sharded arguments alone work, but then XLA gathers
    the scores of each top-k.

    Raises:
        ValueError: q_len is shorter than a window, key_tile is no multiple of the block, the student's heads are no
            multiple of the KV heads, or ``blocks`` is asked of the coarse teacher.
    """
    if student.shape[2] % k.shape[2]:
        raise ValueError(f"student has {student.shape[2]} heads: give a multiple of the {k.shape[2]} KV heads")
    if teacher is Teacher.COARSE and objective is Objective.BLOCKS:
        raise ValueError("objective=blocks compares the mass of fine keys: use teacher=fine, not coarse")
    options = (sparse, objective, teacher, chunk_of(chunk, q, sparse), key_tile)
    return _loss(options, student, q, k, positions, valid, jnp.asarray(begin, jnp.int32))


_Options = tuple[SelectionGrid, Objective, Teacher, int, int]  # as `forecast_loss` takes them


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options: _Options, student, q, k, positions, valid, begin) -> LossParts:
    parts, _ = _sweep(options, student, q, k, positions, valid, begin)
    return parts


def _loss_forward(options: _Options, student, q, k, positions, valid, begin):
    parts, gradient = _sweep(options, student, q, k, positions, valid, begin)
    return parts, (gradient, jnp.zeros((), student.dtype))


def _loss_backward(options: _Options, saved, cotangent: LossParts):
    gradient, like = saved
    return (gradient * cotangent.loss).astype(like.dtype), None, None, None, None, None


_loss.defvjp(_loss_forward, _loss_backward)


def _sweep(
    options: _Options,
    student: Array,
    q: Array,
    k: Array,
    positions: Array,
    valid: Array,
    begin: Array,
) -> tuple[LossParts, Float[Array, "batch q_len forecast_heads head_dim"]]:
    """The loss and its gradient with respect to ``student``, chunk by chunk."""
    sparse, objective, taught_by, chunk, key_tile = options
    length, scale = q.shape[1], np.sqrt(q.shape[-1])
    blocks = count_blocks(k.shape[1], sparse)
    keys = make_keys(k, positions, valid, sparse, key_tile)

    def step(carry: None, inputs: tuple[Queries, Array]) -> tuple[None, tuple[LossParts, Array]]:
        queries, student_rows = inputs
        sets = block_sets(queries, blocks, sparse)
        teacher = teacher_scores(queries, keys, sparse, key_tile)
        bits = route_chunk(teacher, queries, sparse, blocks)
        chosen = bits_to_mask(bits, blocks)
        target, supervised = teacher, chosen
        if taught_by is Teacher.COARSE:
            target = coarse_scores(queries, keys, sparse, teacher)
            supervised = bits_to_mask(route_chunk(target, queries, sparse, blocks), blocks)
        seen = begun_windows(queries, keys, sparse)
        # What padding holds must not reach a product, not even times 0.
        scores = score_heads(jnp.where(queries.real[..., None, None], student_rows, 0), keys.compressed)
        logits = joint_logits(scores, seen, scale)
        found = divergence(objective, logits, target, supervised, queries, sets, sparse)
        slopes = share_out(found.slope, scores, seen, scale)
        gradient = slope_of_student(slopes, keys.compressed) / scale
        quality, student_bits = selection_quality(scores, teacher, chosen, queries, keys, sets, sparse)
        parts = LossParts(
            loss=jnp.sum(found.loss),
            weight=jnp.sum(found.weight),
            pairs=jnp.sum(queries.real) * q.shape[2],
            supervised_pairs=jnp.sum(found.active),
            quality=quality,
            blocks=bits,
            student_blocks=student_bits,
        )
        return carry, (parts, gradient)

    inputs = (split_queries(q, positions, valid, chunk, begin), split_chunks(student, chunk))
    _, (parts, gradient) = jax.lax.scan(step, None, inputs)
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), parts)
    whole = {name: join_chunks(getattr(parts, name), 2)[:, :, :length] for name in ("blocks", "student_blocks")}
    parts = dataclasses.replace(sums, **whole)
    return parts, join_chunks(gradient, 1)[:, :length]
