"""Attention of one new token per sequence over records in slots, and the choice of what runs it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.operands import FLOATS, INT32, check_operands
from sparda_jax.pallas_kernels.sparse_attention import mosaic_gpu, reference, triton


def sparse_attention_decode(
    q: Float[Array, "batch kv_heads group head_dim"],
    slots: Float[Array, "slots rows head_dim"],
    slot_ids: Int[Array, "batch kv_heads width"],
    lengths: Int[Array, "batch"],
    *,
    usual: int | None = None,
    result_lanes: int | None = None,
    backend: str | None = None,
) -> Float[Array, "lanes kv_heads group head_dim"]:
    """``softmax(q . k / sqrt(head_dim)) v`` over the tokens of the listed records (docs/semantics.md section 6).

    Float32 scores and sums, probabilities rounded to the dtype of v. From the kernels a sequence's result has the same
    bits whatever else is in the batch and whichever slots its records lie in: sums are taken over fixed positions of
    the list. The reference does that on a CPU only: on a GPU XLA chooses how to run its products by the batch.

    Logits may be up to 1e8 in size. Beyond, float32 rounds a logit by more than 2^x bears, and a kernel may give NaN.

    Args:
        q: the new token's queries after RoPE.
        slots: one layer's slots, in q's dtype. A record is the K rows of a block and one KV head, then its V rows.
        slot_ids: which slots each KV head attends to, int32, ascending in block order, the newest block last, then -1
            up to the width. Ids must be below the number of slots.
        lengths: tokens stored per sequence, int32, the new one included: the last listed record has
            ``(length - 1) % block + 1`` valid rows of each kind. The others and all slots that are not listed may hold
            anything, NaN included.
        usual: how many records most lists have; None: as many as fit. Only the time depends on it.
        result_lanes: of the result, for a reader that wants more than the batch has; those beyond may hold anything.
            None: those of the batch.
        backend: a name of `Backend`, or None for the fastest that runs here.

    Returns:
        The heads' outputs in q's dtype; zeros where a list is empty (an idle lane).

    Raises:
        ValueError: the shapes or dtypes don't fit each other, ``usual`` is below 1, or the backend is unknown or
            doesn't take them.
    """
    sizes: dict[str, tuple[int, str]] = {}
    check_operands(FLOATS, sizes=sizes, q=(q, "batch kv_heads group head_dim"), slots=(slots, "slots rows head_dim"))
    check_operands(INT32, sizes=sizes, slot_ids=(slot_ids, "batch kv_heads width"), lengths=(lengths, "batch"))
    if slots.shape[1] % 2:
        raise ValueError(f"slots{list(slots.shape)} are no records: they must have as many V rows as K rows.")
    if slots.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype} and slots are {slots.dtype}: they must have the same dtype.")
    if usual is not None and usual < 1:
        raise ValueError(f"usual={usual} must be at least 1, or None.")
    lanes = q.shape[0] if result_lanes is None else result_lanes
    if lanes < q.shape[0]:
        raise ValueError(f"result_lanes={result_lanes} must be at least the batch of {q.shape[0]}, or None.")
    available = [Backend.REFERENCE, Backend.TRITON]
    if mosaic_gpu.takes(q, slots):
        available.append(Backend.MOSAIC_GPU)
    chosen = choose_backend(backend, "sparse_attention", available=available)
    return _jitted(q, slots, slot_ids, lengths, usual=usual, lanes=lanes, backend=chosen)


# One jit object for all layers, so that they share one lowering of the kernels.
@functools.partial(jax.jit, static_argnames=("usual", "lanes", "backend"))
def _jitted(
    q: Array,
    slots: Array,
    slot_ids: Array,
    lengths: Array,
    *,
    usual: int | None,
    lanes: int,
    backend: Backend,
) -> Array:
    if backend is Backend.MOSAIC_GPU:
        return mosaic_gpu.slot_attention(q, slots, slot_ids, lengths, usual=usual, result_lanes=lanes)
    kernels = reference if backend is Backend.REFERENCE else triton
    out = kernels.slot_attention(q, slots, slot_ids, lengths)
    return jnp.pad(out, ((0, lanes - q.shape[0]), (0, 0), (0, 0), (0, 0)))
