"""The softmax over fine keys, as two Pallas kernels lowered through Triton: denominators, then summaries of values."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import interpreting

# Less than any logit and finite: the difference of two peaks is never NaN.
_LOWEST = -1e30


def takes(q: Array | jax.ShapeDtypeStruct, fine: Array | jax.ShapeDtypeStruct, stride: int, block_size: int) -> bool:
    """Whether the kernels can run on such operands: 16-bit numbers, sizes that are powers of two, blocks up to 64."""
    sizes = (q.shape[4], stride, block_size)
    whole = all(size == pl.next_power_of_2(size) for size in sizes) and q.shape[4] >= 16 and 16 <= block_size <= 64
    return q.dtype == fine.dtype and q.dtype.itemsize == 2 and whole


def _call(kernel, *, name: str, grid: tuple[int, ...], out_shape, num_warps: int, num_stages: int):
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_shape=out_shape,
        interpret=interpreting(),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )


def _products(rows: Array, keys: Array) -> Array:
    return plgpu.dot(rows, keys, trans_b=True, precision=lax.Precision.HIGHEST)


def _tile_of(length: int, tile: int) -> int:
    """The largest power of two up to ``tile`` that divides the length."""
    return min(tile, length & -length)


def logs(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    fine: Float[Array, "batch kv_heads length head_dim"],
    first: Int[Array, "batch q_len"],
    last: Int[Array, "batch q_len"],
    *,
    row_tile: int = 128,
    key_tile: int = 128,
    num_warps: int = 8,
    num_stages: int = 2,
) -> Float[Array, "batch kv_heads group q_len"]:
    """The binary logarithm of each head's denominator; 0 where a query sees nothing."""
    batch, q_len, kv_heads, group, head_dim = q.shape
    length = fine.shape[2]
    tile = _tile_of(length, key_tile)
    scale = math.log2(math.e) / math.sqrt(head_dim)

    def kernel(q_ref, keys_ref, first_ref, last_ref, logs_ref):
        b, h = lax.div(pl.program_id(2), kv_heads), lax.rem(pl.program_id(2), kv_heads)
        g = pl.program_id(1)
        # Later queries see more: the longest programs begin first.
        row = (pl.num_programs(0) - 1 - pl.program_id(0)) * row_tile + jnp.arange(row_tile)
        inside = row < q_len
        lowest = plgpu.load(first_ref.at[b, row], mask=inside, other=length)
        highest = plgpu.load(last_ref.at[b, row], mask=inside, other=-1)
        some = lowest <= highest
        begin = lax.div(jnp.min(jnp.where(some, lowest, length)), tile)
        end = lax.div(jnp.max(jnp.where(some, highest, -1)) + tile, tile)
        # Tiles that every row sees as a whole need no mask.
        whole_begin = jnp.minimum(lax.div(jnp.max(lowest) + tile - 1, tile), end)
        whole_end = jnp.maximum(lax.div(jnp.min(highest) + 1, tile), whole_begin)
        d = jnp.arange(head_dim)[None]

        @pl.when(begin < end)
        def _():
            rows = plgpu.load(q_ref.at[b, row[:, None], h, g, d], mask=inside[:, None], other=0)

            def add(t, state, masked: bool):
                peak, total = state
                index = t * tile + jnp.arange(tile)
                z = _products(rows, plgpu.load(keys_ref.at[b, h, index[:, None], d]))
                if masked:
                    seen = (index[None] >= lowest[:, None]) & (index[None] <= highest[:, None])
                    z = jnp.where(seen, z, -jnp.inf)
                higher = jnp.maximum(peak, jnp.max(z, axis=1) * scale)
                weights = jnp.exp2(z * scale - higher[:, None])
                return higher, total * jnp.exp2(peak - higher) + jnp.sum(weights, axis=1)

            state = jnp.full(row_tile, _LOWEST, jnp.float32), jnp.zeros(row_tile, jnp.float32)
            state = lax.fori_loop(begin, whole_begin, lambda t, s: add(t, s, True), state)
            state = lax.fori_loop(whole_begin, whole_end, lambda t, s: add(t, s, False), state)
            peak, total = lax.fori_loop(whole_end, end, lambda t, s: add(t, s, True), state)
            found = jnp.where(total > 0, peak + jnp.log2(jnp.where(total > 0, total, 1)), 0)
            plgpu.store(logs_ref.at[b, h, g, row], found, mask=inside)

        @pl.when(begin >= end)
        def _():
            plgpu.store(logs_ref.at[b, h, g, row], jnp.zeros(row_tile, jnp.float32), mask=inside)

    return _call(
        kernel,
        name="fine_softmax_logs",
        grid=(pl.cdiv(q_len, row_tile), group, batch * kv_heads),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group, q_len), jnp.float32),
        num_warps=num_warps,
        num_stages=num_stages,
    )(q, fine, first, last)


def scores(
    q: Float[Array, "batch q_len kv_heads group head_dim"],
    fine: Float[Array, "batch kv_heads length head_dim"],
    first: Int[Array, "batch q_len"],
    last: Int[Array, "batch q_len"],
    logs: Float[Array, "batch kv_heads group q_len"],
    *,
    stride: int,
    block_size: int,
    row_tile: int = 64,
    key_tile: int = 128,
    num_warps: int = 4,
    num_stages: int = 3,
) -> tuple[Array, Array, Array]:
    """The arrays of `FineScores`.

    Args:
        logs: from `logs`.
    """
    batch, q_len, kv_heads, group, head_dim = q.shape
    length = fine.shape[2]
    tile = _tile_of(length, key_tile)
    strides, blocks = tile // stride, tile // block_size
    scale = math.log2(math.e) / math.sqrt(head_dim)

    def kernel(q_ref, keys_ref, first_ref, last_ref, logs_ref, largest_ref, opening_ref, mass_ref):
        b, h = lax.div(pl.program_id(2), kv_heads), lax.rem(pl.program_id(2), kv_heads)
        t = pl.program_id(0)
        row = pl.program_id(1) * row_tile + jnp.arange(row_tile)
        inside = row < q_len
        lowest = plgpu.load(first_ref.at[b, row], mask=inside, other=length)
        highest = plgpu.load(last_ref.at[b, row], mask=inside, other=-1)
        index = t * tile + jnp.arange(tile)
        some = (lowest <= highest) & (lowest < (t + 1) * tile) & (highest >= t * tile)
        of_stride, of_block = t * strides + jnp.arange(strides), t * blocks + jnp.arange(blocks)

        def put(largest, opening, mass):
            rows = row[:, None]
            plgpu.store(largest_ref.at[b, h, rows, of_stride[None]], largest, mask=inside[:, None])
            plgpu.store(opening_ref.at[b, h, rows, of_stride[None]], opening, mask=inside[:, None])
            plgpu.store(mass_ref.at[b, h, rows, of_block[None]], mass, mask=inside[:, None])

        visible = jnp.max(some.astype(jnp.int32)) > 0

        @pl.when(visible)
        def _():
            d = jnp.arange(head_dim)[None]
            keys = plgpu.load(keys_ref.at[b, h, index[:, None], d])

            def add(g, total):
                rows = plgpu.load(q_ref.at[b, row[:, None], h, g, d], mask=inside[:, None], other=0)
                log = plgpu.load(logs_ref.at[b, h, g, row], mask=inside, other=0)
                return total + jnp.exp2(_products(rows, keys) * scale - log[:, None])

            total = lax.fori_loop(0, group, add, jnp.zeros((row_tile, tile), jnp.float32))
            # What a query does not see may have overflowed.
            seen = (index[None] >= lowest[:, None]) & (index[None] <= highest[:, None])
            total = jnp.where(seen, total, 0)
            by_stride = total.reshape(row_tile, strides, stride)
            opens = (jnp.arange(stride) == 0)[None, None]
            put(
                jnp.max(by_stride, axis=2),
                jnp.sum(jnp.where(opens, by_stride, 0), axis=2),
                jnp.sum(total.reshape(row_tile, blocks, block_size), axis=2),
            )

        @pl.when(~visible)
        def _():
            nothing = jnp.zeros((row_tile, strides), jnp.float32)
            put(nothing, nothing, jnp.zeros((row_tile, blocks), jnp.float32))

    def of(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, kv_heads, q_len, size), jnp.float32)

    return _call(
        kernel,
        name="fine_softmax_scores",
        grid=(length // tile, pl.cdiv(q_len, row_tile), batch * kv_heads),
        out_shape=(of(length // stride), of(length // stride), of(length // block_size)),
        num_warps=num_warps,
        num_stages=num_stages,
    )(q, fine, first, last, logs)
