"""The partial results of decode attention added up, as a Pallas kernel lowered through Triton.

It follows the Hopper kernel, and is lowered through Triton because it is all latency: it needs a few plain loads that
are all under way at once, and no tensor core.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import interpreting, outside_mosaic_interpreter

LOWEST = -1e30
"""The peak of nothing. Less than any logit and finite: the difference of two peaks is never NaN."""

# Columns of a program: with 16 queries one load of 16 bytes for each of its 64 threads and each result.
_COLUMNS = 16
# Results that are under way at once.
_AT_ONCE = 16


def add_results(
    sums: Float[Array, "batch kv_heads results head_dim rows"],
    peaks: Float[Array, "batch kv_heads results rows"],
    totals: Float[Array, "batch kv_heads results rows"],
    slot_ids: Int[Array, "batch kv_heads width"],
    *,
    group: int,
    positions: int,
    run: int,
    dtype: jnp.dtype,
) -> Float[Array, "batch kv_heads group head_dim"]:
    """Results brought to their common peak, added run by run, and divided by the sum of the weights.

    Zeros for a list without records. The order of the sums follows from ``results`` and ``run`` alone, and peaks are
    whole numbers, so that scaling by powers of two rounds nothing.

    Args:
        sums: values weighted by ``2^(logit - peak)``; anything where a result has no records.
        peaks: whole numbers.
        totals: sums of the weights.
        slot_ids: the lists; what it holds at a result's first position says whether the result has records.
        group: query heads; the rows beyond are padding.
        positions: list positions of a result.
        run: results that are added in a row, before other runs are.
        dtype: of the attention's output.
    """
    batch, kv_heads, _, head_dim, _ = sums.shape
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    with outside_mosaic_interpreter():
        return pl.pallas_call(
            functools.partial(_add_results, positions=positions, run=run),
            grid=(head_dim // _COLUMNS, kv_heads, batch),
            in_specs=[anywhere] * 4,
            out_specs=anywhere,
            out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group, head_dim), dtype),
            compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
            interpret=interpreting(),
            name="slot_attention_combine",
        )(sums, peaks, totals, slot_ids)


def _add_results(sums, peaks, totals, slot_ids, out, *, positions: int, run: int) -> None:
    tile, head, lane = (pl.program_id(axis) for axis in range(3))
    results, rows = peaks.shape[2:]
    group = out.shape[2]
    columns, queries = tile * _COLUMNS + jnp.arange(_COLUMNS), jnp.arange(rows)

    def first_slot(index: Array) -> Array:
        """At least 0 if the result has records."""
        slot = plgpu.load(slot_ids.at[lane, head, jnp.minimum(index, results - 1) * positions])
        return jnp.where(index < results, slot, -1)

    index = jnp.arange(pl.next_power_of_2(results))
    present = (first_slot(index) >= 0)[:, None]
    every = plgpu.load(peaks.at[lane, head, index[:, None], queries[None]], mask=present, other=LOWEST)
    peak = jnp.max(every, axis=0)
    at_once = max(min(results, _AT_ONCE) // run, 1) * run

    def load(index: Array) -> tuple[Array, Array, Array, Array]:
        inside = jnp.minimum(index, results - 1)
        return (
            plgpu.load(sums.at[lane, head, inside, columns[:, None], queries[None]]),
            plgpu.load(peaks.at[lane, head, inside, queries]),
            plgpu.load(totals.at[lane, head, inside, queries]),
            first_slot(index),
        )

    def add(chunk: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        acc, total = carry
        # The compiler keeps the order of loads and uses: all are requested before any is used. What was not written is
        # dropped afterwards.
        loaded = [load(chunk * at_once + number) for number in range(at_once)]
        for begin in range(0, at_once, run):
            run_sums, run_total = jnp.zeros_like(acc), jnp.zeros_like(total)
            for part_sums, part_peak, part_total, slot in loaded[begin : begin + run]:
                weight = power_of_two(jnp.where(slot >= 0, part_peak, LOWEST) - peak)
                run_sums += jnp.where(slot >= 0, part_sums, 0) * weight[None]
                run_total += jnp.where(slot >= 0, part_total, 0) * weight
            acc, total = acc + run_sums, total + run_total
        return acc, total

    init = jnp.zeros((_COLUMNS, rows), jnp.float32), jnp.zeros((rows,), jnp.float32)
    acc, total = lax.fori_loop(0, -(-results // at_once), add, init)
    result = acc / jnp.where(total > 0, total, 1)[None]
    place = out.at[lane, head, jnp.where(queries < group, queries, group)[None], columns[:, None]]
    plgpu.store(place, result.astype(out.dtype), mask=(queries < group)[None] & (columns >= 0)[:, None])


def power_of_two(exponent: Array) -> Array:
    """2^exponent exactly, for whole numbers up to 0; zero below -126."""
    biased = jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(biased * (1 << 23), jnp.float32)
