"""Decode attention over records in slots, lowered through Triton: partial sums of list parts, then their combination.

A list is cut into parts of `part` positions. One program sums up one part, in order, whatever the batch; a second
kernel adds the parts of a list. So the order of all sums follows from the width of the list alone.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import interpreting

# tl.dot wants at least 16 rows.
_MIN_ROWS = 16
# How many parts the second kernel holds in registers at a time.
_PARTS_AT_ONCE = 32


def slot_attention(
    q: Float[Array, "batch kv_heads group head_dim"],
    slots: Float[Array, "slots rows head_dim"],
    slot_ids: Int[Array, "batch kv_heads width"],
    lengths: Int[Array, "batch"],
    *,
    part: int = 6,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Float[Array, "batch kv_heads group head_dim"]:
    """See `sparse_attention_decode`.

    Args:
        part: list positions per program. Results of different `part` differ by rounding.
        num_warps, num_stages: of the first kernel, as Triton names them.
    """
    batch, kv_heads, group, head_dim = q.shape
    width = slot_ids.shape[2]
    rows = max(_MIN_ROWS, pl.next_power_of_2(group))
    if rows != group:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    parts = -(-width // part)

    def per_list(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda b, h, i: (b, h, *([0] * len(shape))))

    def per_part(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, None, *shape), lambda b, h, i: (b, h, i, *([0] * len(shape))))

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    sums, peaks, totals = pl.pallas_call(
        functools.partial(_sum_part, part=part, block=slots.shape[1] // 2),
        grid=(batch, kv_heads, parts),
        in_specs=[per_list(rows, head_dim), anywhere, anywhere, anywhere],
        out_specs=[per_part(rows, head_dim), per_part(rows), per_part(rows)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, parts, rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, parts, rows), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, parts, rows), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpreting(),
        name="slot_attention_parts",
    )(q, slots, slot_ids, lengths)
    return pl.pallas_call(
        functools.partial(_add_parts, parts=parts),
        grid=(batch, kv_heads, group),
        in_specs=[anywhere, anywhere, anywhere],
        out_specs=pl.BlockSpec((None, None, None, head_dim), lambda b, h, g: (b, h, g, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group, head_dim), q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpreting(),
        name="slot_attention_combine",
    )(sums, peaks, totals)


def _sum_part(q_ref, slots, slot_ids, lengths, sums_ref, peaks_ref, totals_ref, *, part: int, block: int) -> None:
    """One part of one list: the values weighted by 2^(logit - peak), the peak, and the sum of the weights.

    Logits are in base 2. A part without records gives a sum and a total of zero.
    """
    lane, head, index = (pl.program_id(axis) for axis in range(3))
    width = slot_ids.shape[2]
    rows, head_dim = q_ref.shape
    q = q_ref[...]
    scale = math.log2(math.e) / math.sqrt(head_dim)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    first = index * part
    offsets = jnp.arange(pl.next_power_of_2(part))
    inside = (offsets < part) & (first + offsets < width)
    ids = plgpu.load(slot_ids.at[lane, head, pl.ds(first, offsets.shape[0])], mask=inside, other=-1)
    # The list ends at the first -1.
    count = jnp.min(jnp.where(ids < 0, offsets, part))
    tail_rows = (lengths[lane] - 1) % block + 1
    row = jnp.arange(block)

    def step(i, carry):
        acc, peak, total = carry
        position = first + i
        slot = slot_ids[lane, head, position]
        following = slot_ids[lane, head, jnp.minimum(position + 1, width - 1)]
        is_tail = (position + 1 == width) | (following < 0)
        stored = row < jnp.where(is_tail, tail_rows, block)
        k = slots[slot, pl.ds(0, block), :]
        # 0 * NaN is NaN, so values beyond the length are not read.
        v = plgpu.load(slots.at[slot, pl.ds(block, block), :], mask=stored[:, None], other=0)
        logits = plgpu.dot(q, k.T, precision=precision) * scale
        logits = jnp.where(stored[None, :], logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(axis=1))
        weights = jnp.exp2(logits - new_peak[:, None])
        shrink = jnp.exp2(peak - new_peak)
        acc = acc * shrink[:, None] + plgpu.dot(weights.astype(v.dtype), v, precision=precision)
        return acc, new_peak, total * shrink + weights.sum(axis=1)

    init = (
        jnp.zeros((rows, head_dim), jnp.float32),
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    sums_ref[...], peaks_ref[...], totals_ref[...] = lax.fori_loop(0, count, step, init)


def _add_parts(sums, peaks, totals, out_ref, *, parts: int) -> None:
    """All parts of one query, brought to a common peak and divided by the sum of the weights; zeros for no records."""
    lane, head, query = (pl.program_id(axis) for axis in range(3))
    at_once = min(_PARTS_AT_ONCE, pl.next_power_of_2(parts))
    chunks = []
    for start in range(0, parts, at_once):
        # A constant start would be refused where the last chunk reaches beyond the parts; the mask deals with that.
        these = pl.ds(jnp.int32(start), at_once)
        inside = start + jnp.arange(at_once) < parts
        peak = plgpu.load(peaks.at[lane, head, these, query], mask=inside, other=-jnp.inf)
        chunks.append((these, inside, peak))
    highest = functools.reduce(jnp.maximum, [peak.max() for _, _, peak in chunks])
    # An empty list has no finite peak, and exp2(-inf - -inf) would be NaN.
    highest = jnp.maximum(highest, jnp.finfo(jnp.float32).min)
    acc, total = jnp.zeros(out_ref.shape, jnp.float32), jnp.float32(0)
    for these, inside, peak in chunks:
        weight = jnp.exp2(peak - highest)
        part_sums = plgpu.load(sums.at[lane, head, these, query, :], mask=inside[:, None], other=0)
        part_totals = plgpu.load(totals.at[lane, head, these, query], mask=inside, other=0)
        acc += (part_sums * weight[:, None]).sum(axis=0)
        total += (part_totals * weight).sum()
    out_ref[...] = (acc / jnp.where(total > 0, total, 1)).astype(out_ref.dtype)
