"""Decode attention over records in slots for Hopper: TMA copies into a ring, both products on the tensor cores.

A list is cut into parts of a few positions and runs of a few parts. The records of a part are summed up in order, then
the parts of a run, then the runs. A CTA takes one part or several, as the batch needs, keeps its ring full across them,
and adds what are whole runs itself; a second kernel does the rest. So the order of all sums follows from the width of
the list alone. Who adds two parts makes no difference either: their peaks are whole numbers, so that bringing them to
a common one multiplies by powers of two, which rounds nothing.

The products have their operands swapped, so that a group of 16 queries fills the narrow side of a wgmma:
``S^T [block, group] = K q^T`` and ``O^T [head_dim, group] = V^T P^T``.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

_BLOCK = 64
# Less than any logit and finite: the difference of two peaks is never NaN.
_LOWEST = -1e30
# How many partial results of a list the second kernel holds in registers.
_AT_ONCE = 32
# So many keep HBM busy.
_ENOUGH_CTAS = 64
_ROW_SUMS = plgpu.Layout.WGMMA.reduce(0)
# 128-byte rows of 8 x 64 tiles, as wgmma reads 16-bit operands.
_SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
# Automatic barriers would stand around every store and copy. Only the warps' own rows of V are both read and written by
# threads, and each buffer that wgmma or TMA has read is written again after another barrier only.
_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Split:
    """How the positions of a list are spread over CTAs.

    Attributes:
        part: positions that are summed up in a row.
        merged: parts that a CTA adds to one partial result: those of a run, or 1.
        left: results that are still to be added to a run: 1, or the parts of a run.
        stages: records in a CTA's ring.
    """

    part: int
    merged: int
    left: int
    results_per_cta: int
    stages: int

    @property
    def positions(self) -> int:
        """List positions in one result."""
        return self.part * self.merged


def takes(q: Array, slots: Array) -> bool:
    """Whether the kernels can run on such operands: bf16, blocks of 64, groups up to 16, head_dim 64 or 128."""
    block, (group, head_dim) = slots.shape[1] // 2, q.shape[2:]
    return q.dtype == jnp.bfloat16 and block == _BLOCK and group <= 16 and head_dim in (64, 128)


def slot_attention(
    q: BFloat16[Array, "batch kv_heads group head_dim"],
    slots: BFloat16[Array, "slots rows head_dim"],
    slot_ids: Int[Array, "batch kv_heads width"],
    lengths: Int[Array, "batch"],
    *,
    part: int = 3,
    run: int = 4,
    stages: int = 3,
    max_ctas: int = 264,
    usual: int | None = None,
    result_lanes: int | None = None,
) -> Float[Array, "lanes kv_heads group head_dim"]:
    """See `sparse_attention_decode`; bf16, blocks of 64, groups up to 16, head_dim 64 or 128.

    Args:
        part: list positions that are summed up in a row. Results of different `part` or `run` differ by rounding.
        run: parts that are added in a row, before other runs are.
        stages: records in a CTA's ring.
        max_ctas: a CTA takes as many parts as it needs for no more CTAs to have work, if it can.
        usual, result_lanes: as there; the CTAs are spread for lists of the usual length.
    """
    batch, kv_heads, group, head_dim = q.shape
    width = slot_ids.shape[2]
    rows = 8 if group <= 8 else 16
    if rows != group:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
    parts = -(-width // part)
    usual_parts = -(-min(usual or width, width) // part)
    parts_per_cta = -(-usual_parts // max(1, min(usual_parts, max_ctas // (batch * kv_heads))))
    # The parts of a run lie in one CTA, or each is a result of its own. The fewer results the faster the second kernel,
    # so a CTA takes a run as long as half of the SMs have one.
    if batch * kv_heads * -(-usual_parts // run) >= _ENOUGH_CTAS:
        parts_per_cta = max(parts_per_cta, run)
    merged = run if parts_per_cta >= run else 1
    parts_per_cta = -(-parts_per_cta // merged) * merged
    ctas_per_list = -(-parts // parts_per_cta)
    split = _Split(part=part, merged=merged, left=run // merged, results_per_cta=parts_per_cta // merged, stages=stages)
    results = -(-parts // merged)

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, kv_heads, *shape), jnp.float32)

    partials = [f32(results, head_dim, rows), f32(results, rows), f32(results, rows)]
    scratch = [
        plgpu.SMEM((rows, head_dim), jnp.bfloat16, transforms=_SWIZZLED),
        plgpu.SMEM((stages, 2 * _BLOCK, head_dim), jnp.bfloat16, transforms=_SWIZZLED),
        plgpu.SMEM((2, rows, _BLOCK), jnp.bfloat16, transforms=_SWIZZLED),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=stages),
    ]
    sums, peaks, totals = plgpu.kernel(
        functools.partial(_sum_parts, split=split),
        out_type=partials,
        grid=(batch, kv_heads, ctas_per_list),
        grid_names=("lane", "head", "cta"),
        scratch_types=scratch,
        compiler_params=_PARAMS,
        kernel_name="slot_attention_parts",
    )(q, slots, slot_ids, lengths)
    out = plgpu.kernel(
        functools.partial(_add_parts, split=split),
        out_type=jax.ShapeDtypeStruct((result_lanes or batch, *q.shape[1:]), q.dtype),
        grid=(batch, kv_heads, head_dim // 64, rows // 8),
        grid_names=("lane", "head", "columns", "queries"),
        scratch_types=[plgpu.SMEM((8, 64), jnp.bfloat16, transforms=_SWIZZLED)],
        compiler_params=_PARAMS,
        kernel_name="slot_attention_combine",
    )(sums, peaks, totals, slot_ids)
    return out[:, :, :group]


def _sum_parts(
    q, slots, slot_ids, lengths, sums, peaks, totals, q_smem, ring, weights_smem, q_arrived, arrived, *,
    split: _Split,
) -> None:  # fmt: skip
    """The results of one CTA: values weighted by 2^(logit - peak), the peak, the sum of the weights (base 2).

    Nothing is written for a result without records.
    """
    lane, head, cta = (lax.axis_index(name) for name in ("lane", "head", "cta"))
    rows, head_dim = q.shape[2:]
    width = slot_ids.shape[2]
    scale = math.log2(math.e) / math.sqrt(head_dim)
    wgmma = plgpu.Layout.WGMMA
    part, stages = split.part, split.stages
    positions = split.results_per_cta * split.positions
    first = cta * positions

    def slot_at(position: Array) -> Array:
        """-1 beyond the end."""
        slot = slot_ids[lane, head, jnp.minimum(position, width - 1)]
        return jnp.where(position < width, slot, -1)

    def stage_of(position: Array) -> Array:
        return lax.rem(position, jnp.int32(stages))

    def issue(position: Array, slot: Array) -> None:
        stage = stage_of(position)
        plgpu.copy_gmem_to_smem(slots.at[slot], ring.at[stage], arrived.at[stage])

    # The ring is filled before anything else is looked at.
    filling = [slot_at(first + position) for position in range(min(stages, positions))]
    listed = jnp.bool_(True)
    for position, slot in enumerate(filling):
        listed &= slot >= 0

        @pl.when(listed)
        def _(position: int = position, slot: Array = slot) -> None:
            issue(jnp.int32(position), slot)

    plgpu.copy_gmem_to_smem(q.at[lane, head], q_smem, q_arrived)
    tail_rows = ((lengths[lane] - 1) & (_BLOCK - 1)) + 1

    def count_part(index: Array, count: Array) -> Array:
        # The list ends at its first -1: the count grows only as long as there is no gap.
        for offset in range(part):
            position = index * part + offset
            count += ((count == position) & (slot_at(first + position) >= 0)).astype(jnp.int32)
        return count

    count = lax.fori_loop(jnp.int32(0), jnp.int32(positions // part), count_part, jnp.int32(0))
    plgpu.barrier_wait(q_arrived)

    def step(position: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, peak, total = carry
        stage, ahead = stage_of(position), position + (stages - 1)
        # Read long before they are needed.
        slot_ahead, following = slot_at(first + ahead), slot_at(first + position + 1)
        k, v = ring.at[stage, pl.ds(0, _BLOCK)], ring.at[stage, pl.ds(_BLOCK, _BLOCK)]
        stored = jnp.where(following < 0, tail_rows, _BLOCK)
        plgpu.barrier_wait(arrived.at[stage])

        @pl.when(stored < _BLOCK)
        def _() -> None:
            # 0 * NaN is NaN: the values beyond the length have to go.
            row = plgpu.broadcasted_iota(jnp.int32, (_BLOCK, head_dim), 0, layout=wgmma)
            v[...] = jnp.where(row < stored, plgpu.layout_cast(v[...], wgmma), jnp.zeros((), v.dtype))
            plgpu.commit_smem()

        def scores(product) -> Array:
            plgpu.wgmma(product, k, q_smem.transpose((1, 0)))
            return product[...]

        logits = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((_BLOCK, rows), jnp.float32))
        row = plgpu.broadcasted_iota(jnp.int32, (_BLOCK, rows), 0, layout=wgmma)
        logits = jnp.where(row < stored, logits * scale, _LOWEST)
        new_peak = jnp.maximum(peak, jnp.round(logits.max(axis=0)))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(new_peak, logits.shape, [1]))
        shrink = _power_of_two(peak - new_peak)
        weights_t = weights_smem.at[lax.rem(position, jnp.int32(2))]
        weights_t.transpose((1, 0))[...] = plgpu.layout_cast(
            weights.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()

        # Here all warps are done with the record before this one, which was in the stage that is filled now. For the
        # same reason the weights alternate between two buffers.
        @pl.when((position > 0) & (ahead < count))
        def _() -> None:
            issue(ahead, slot_ahead)

        def values(product) -> Array:
            plgpu.wgmma(product, v.transpose((1, 0)), weights_t.transpose((1, 0)))
            return product[...]

        added = pl.run_scoped(values, plgpu.WGMMAAccumulatorRef((head_dim, rows), jnp.float32))
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1]) + added
        total = total * lax.broadcast_in_dim(shrink, total.shape, [1]) + weights
        return acc, new_peak, total

    def add_part(begin: Array, run: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, peak, total = run
        empty = (
            plgpu.layout_cast(jnp.zeros((head_dim, rows), jnp.float32), wgmma),
            plgpu.layout_cast(jnp.full((rows,), _LOWEST, jnp.float32), _ROW_SUMS),
            plgpu.layout_cast(jnp.zeros((_BLOCK, rows), jnp.float32), wgmma),
        )
        part_sums, part_peak, part_weights = lax.fori_loop(begin, jnp.minimum(begin + part, count), step, empty)
        new_peak = jnp.maximum(peak, part_peak)
        shrink, weight = _power_of_two(peak - new_peak), _power_of_two(part_peak - new_peak)
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [1])
        acc += part_sums * lax.broadcast_in_dim(weight, acc.shape, [1])
        return acc, new_peak, total * shrink + part_weights.sum(axis=0) * weight

    def one_result(index: Array, carry: None) -> None:
        begin = index * split.positions

        @pl.when(begin < count)
        def _() -> None:
            empty = (
                plgpu.layout_cast(jnp.zeros((head_dim, rows), jnp.float32), wgmma),
                plgpu.layout_cast(jnp.full((rows,), _LOWEST, jnp.float32), _ROW_SUMS),
                plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), _ROW_SUMS),
            )
            target = cta * split.results_per_cta + index
            sums[lane, head, target], peaks[lane, head, target], totals[lane, head, target] = lax.fori_loop(
                jnp.int32(0), jnp.int32(split.merged), lambda i, run: add_part(begin + i * part, run), empty
            )

    lax.fori_loop(jnp.int32(0), jnp.int32(split.results_per_cta), one_result, None)


def _add_parts(sums, peaks, totals, slot_ids, out, out_smem, *, split: _Split) -> None:
    """64 columns of 8 queries of one list: its results brought to a common peak, divided by the sum of the weights.

    Run by run, about `_AT_ONCE` results loaded at a time. Zeros for a list without records.
    """
    lane, head, columns, queries = (lax.axis_index(name) for name in ("lane", "head", "columns", "queries"))
    wgmma = plgpu.Layout.WGMMA
    results = sums.shape[2]
    runs = -(-results // split.left)
    runs_at_once = min(runs, max(1, _AT_ONCE // split.left))
    shape = (64, 8)
    these_columns, these_queries = pl.ds(columns * 64, 64), pl.ds(queries * 8, 8)

    def loaded(ref, where: tuple, present: Array, absent: float, layout) -> Array:
        value = plgpu.load(ref.at[lane, head, *where], layout=layout, optimized=False)
        return jnp.where(lax.broadcast(present, value.shape), value, absent)

    def load_result(index: Array) -> tuple[Array, Array, Array]:
        inside = jnp.minimum(index, results - 1)
        # A result without records was not written.
        present = (index < results) & (slot_ids[lane, head, inside * split.positions] >= 0)
        return (
            loaded(sums, (inside, these_columns, these_queries), present, 0.0, wgmma),
            loaded(peaks, (inside, these_queries), present, _LOWEST, _ROW_SUMS),
            loaded(totals, (inside, these_queries), present, 0.0, _ROW_SUMS),
        )

    def add(chunk: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, peak, total = carry
        first = chunk * (runs_at_once * split.left)
        chunk_results = [load_result(first + offset) for offset in range(runs_at_once * split.left)]
        new_peak = functools.reduce(jnp.maximum, [result_peak for _, result_peak, _ in chunk_results], peak)
        shrink = _power_of_two(peak - new_peak)
        acc *= lax.broadcast_in_dim(shrink, shape, [1])
        total *= shrink
        for begin in range(0, len(chunk_results), split.left):
            run_sums, run_total = [], []
            for result_sums, result_peak, result_total in chunk_results[begin : begin + split.left]:
                weight = _power_of_two(result_peak - new_peak)
                run_sums.append(result_sums * lax.broadcast_in_dim(weight, shape, [1]))
                run_total.append(result_total * weight)
            acc += functools.reduce(jnp.add, run_sums)
            total += functools.reduce(jnp.add, run_total)
        return acc, new_peak, total

    init = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), wgmma),
        plgpu.layout_cast(jnp.full(shape[1:], _LOWEST, jnp.float32), _ROW_SUMS),
        plgpu.layout_cast(jnp.zeros(shape[1:], jnp.float32), _ROW_SUMS),
    )
    acc, _, total = lax.fori_loop(jnp.int32(0), jnp.int32(-(-runs // runs_at_once)), add, init)
    result = acc / lax.broadcast_in_dim(jnp.where(total > 0, total, 1.0), shape, [1])
    out_smem.transpose((1, 0))[...] = plgpu.layout_cast(result.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out.at[lane, head, these_queries, these_columns])
    # The end of the kernel waits for the writes.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _power_of_two(exponent: Array) -> Array:
    """2^exponent exactly, for whole numbers up to 0; zero below -126."""
    biased = jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased * (1 << 23), jnp.float32)
