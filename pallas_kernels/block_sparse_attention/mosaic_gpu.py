"""Block-sparse prefill attention for Hopper: tiles of neighbouring tokens, each over the union of its tokens' blocks.

A CTA has a producer and several consumer warpgroups. A consumer's 64 rows are the query heads of a few neighbouring
tokens. The producer walks the bits of the masks of all tokens of the CTA, ascending, and copies every block that one of
them selected into a ring, together with which tokens did. A consumer passes over the blocks that none of its own tokens
selected, so what is loaded is the union over the CTA's tokens, and what is computed the union over a consumer's.

The consumers run freely: while one is at its softmax, the tensor cores work for another.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int

from sparda_jax.pallas_kernels.block_sparse_attention.groups import drop_padding, pad_groups

_BLOCK = 64
# Rows of a wgmma.
_ROWS = 64
# Less than any logit and finite: the difference of two peaks is never NaN.
_LOWEST = -1e30
# Set in the tokens of a CTA's last block.
_LAST = -(2**31)
_ROW_SUMS = plgpu.Layout.WGMMA.reduce(1)
# 128-byte rows of 8 x 64 tiles, as wgmma reads 16-bit operands.
_SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tile:
    """What one CTA computes.

    Attributes:
        rows: rows of a token: its query heads, padded to 8, 16, 32 or 64.
        consumers: warpgroups that compute.
        stages: blocks in the ring.
        weights_in_shared: see `attention`.
    """

    rows: int
    consumers: int
    stages: int
    weights_in_shared: bool

    @property
    def own(self) -> int:
        """Tokens of one consumer."""
        return _ROWS // self.rows

    @property
    def tokens(self) -> int:
        return self.own * self.consumers


def takes(q: Array, k: Array, block_size: int) -> bool:
    """Whether the kernel can run on such operands: bf16, blocks of 64, groups up to 64, head_dim 64 or 128."""
    group = q.shape[2] // k.shape[1]
    return q.dtype == jnp.bfloat16 and block_size == _BLOCK and group <= _ROWS and q.shape[3] in (64, 128)


def attention(
    q: BFloat16[Array, "batch q_len heads head_dim"],
    k: BFloat16[Array, "batch kv_heads capacity head_dim"],
    v: BFloat16[Array, "batch kv_heads capacity head_dim"],
    masks: Int[Array, "batch kv_heads q_len words"],
    start: Int[Array, "batch"],
    lengths: Int[Array, "batch"],
    *,
    consumers: int | None = None,
    stages: int = 4,
    weights_in_shared: bool = False,
) -> BFloat16[Array, "batch q_len heads head_dim"]:
    """See `block_sparse_attention_prefill`; operands as `takes` says.

    Args:
        consumers: warpgroups that compute, each with ``64 // group`` tokens; up to 3, and up to 2 for groups below 16,
            since the producer keeps a word of each token's mask in a register. None: as many.
        stages: blocks in a CTA's ring.
        weights_in_shared: the probabilities go to the tensor cores through shared memory. Slower; Pallas' interpreter
            takes them from nowhere else.
    """
    batch, q_len, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = max(8, pl.next_power_of_2(heads // kv_heads))
    consumers = consumers or (3 if rows >= 16 else 2)
    q = pad_groups(q, kv_heads, rows)
    tile = _Tile(rows=rows, consumers=consumers, stages=stages, weights_in_shared=weights_in_shared)
    tiles = -(-q_len // tile.tokens)
    scratch = [
        plgpu.SMEM((consumers, _ROWS, head_dim), jnp.bfloat16, transforms=_SWIZZLED),
        plgpu.SMEM((stages, _BLOCK, head_dim), jnp.bfloat16, transforms=_SWIZZLED),
        plgpu.SMEM((stages, _BLOCK, head_dim), jnp.bfloat16, transforms=_SWIZZLED),
        plgpu.SMEM((stages,), jnp.int32),
        plgpu.SMEM((stages,), jnp.int32),
        plgpu.Barrier(num_arrivals=tile.own, num_barriers=consumers),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    ]
    if weights_in_shared:
        scratch.append(plgpu.SMEM((consumers, _ROWS, _BLOCK), jnp.bfloat16, transforms=_SWIZZLED))
    out = plgpu.kernel(
        functools.partial(_tile, tile=tile),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        # One KV head after the other, and tokens in order: what neighbouring CTAs read stays in L2.
        grid=(tiles, kv_heads, batch),
        grid_names=("tile", "head", "lane"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Automatic barriers would stand around every store and copy.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="block_sparse_attention",
    )(q, k, v, masks, start, lengths)
    return drop_padding(out, kv_heads, heads)


def _tile(
    q, k, v, masks, start, lengths, out, q_smem, k_ring, v_ring, blocks, chosen, q_arrived, arrived, consumed,
    weights_smem=None, *, tile: _Tile,
) -> None:  # fmt: skip
    warpgroup = lax.axis_index("warpgroup")
    # Registers of a consumer's thread and of a producer's; together no more than all start with, or they would wait for
    # ever: 512 shared out in multiples of 8.
    consumer_registers, producer_registers = {1: (232, 56), 2: (224, 56), 3: (152, 56)}[tile.consumers]

    def consume() -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")
        _consume(
            q, start, lengths, out, q_smem, k_ring, v_ring, blocks, chosen, q_arrived, arrived, consumed,
            weights_smem, tile=tile,
        )  # fmt: skip

    def produce() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        _produce(k, v, masks, start, lengths, k_ring, v_ring, blocks, chosen, arrived, consumed, tile=tile)

    lax.cond(warpgroup < tile.consumers, consume, produce)


def _produce(
    k, v, masks, start, lengths, k_ring, v_ring, blocks, chosen, arrived, consumed, *, tile: _Tile
) -> None:  # fmt: skip
    """Copies the blocks of the union into the ring, ascending; at least one, so that there is a last one."""
    index, head, lane = (lax.axis_index(name) for name in ("tile", "head", "lane"))
    q_len, words = masks.shape[2:]
    first = index * tile.tokens
    # Tokens of this tile that exist.
    count = jnp.clip(jnp.minimum(lengths[lane] - start[lane], q_len) - first, 0, tile.tokens)
    last_block = lax.shift_right_arithmetic(start[lane] + first + count - 1, jnp.int32(6))
    num_words = jnp.where(count > 0, jnp.minimum(lax.shift_right_arithmetic(last_block, jnp.int32(5)) + 1, words), 0)

    def load(word: Array) -> tuple[Array, ...]:
        """A word of every token's mask."""

        def of(token: int) -> Array:
            return jnp.where(token < count, masks[lane, head, jnp.minimum(first + token, q_len - 1), word], 0)

        return tuple(of(token) for token in range(tile.tokens))

    def issue(position: Array, block: Array, tokens: Array) -> None:
        stage = lax.rem(position, jnp.int32(tile.stages))

        @pl.when(position >= tile.stages)
        def _() -> None:
            plgpu.barrier_wait(consumed.at[stage])

        blocks[stage], chosen[stage] = block, tokens
        # All warps have written before the copies, whose arrival shows these entries, too.
        plgpu.commit_smem()
        rows = pl.ds(block * _BLOCK, _BLOCK)
        plgpu.copy_gmem_to_smem(k.at[lane, head, rows], k_ring.at[stage], arrived.at[stage])
        plgpu.copy_gmem_to_smem(v.at[lane, head, rows], v_ring.at[stage], arrived.at[stage])

    # A block is copied when the next one is found, for the last one has to say that it is.
    def walk(carry: tuple) -> tuple:
        left, bits, word, position, block, tokens = carry

        @pl.when(block >= 0)
        def _() -> None:
            issue(position, block, tokens)

        position += (block >= 0).astype(jnp.int32)
        bit = 31 - lax.clz(left & -left)
        ones = [lax.shift_right_logical(mask, bit) & 1 for mask in bits]
        tokens = functools.reduce(jnp.bitwise_or, [one << token for token, one in enumerate(ones)])
        return left & (left - 1), bits, word, position, word * 32 + bit, tokens

    def one_word(word: Array, carry: tuple) -> tuple:
        position, block, tokens = carry
        bits = load(word)
        left = functools.reduce(jnp.bitwise_or, bits)
        # A block after the last token's own has no keys for any of them, and may lie beyond the cache.
        up_to = jnp.minimum(last_block - word * 32, 31)
        left &= lax.shift_right_logical(jnp.int32(-1), 31 - up_to)
        walked = lax.while_loop(lambda c: c[0] != 0, walk, (left, bits, word, position, block, tokens))
        return walked[3:]

    nothing = (jnp.int32(0), jnp.int32(-1), jnp.int32(0))
    position, block, tokens = lax.fori_loop(jnp.int32(0), num_words, one_word, nothing)
    issue(position, jnp.maximum(block, 0), tokens | _LAST)

    # Only the interpreter wants to see the end of what was begun.
    def drain(position: Array, carry: None) -> None:
        plgpu.barrier_wait(consumed.at[lax.rem(position, jnp.int32(tile.stages))])

    lax.fori_loop(jnp.maximum(position + 1 - tile.stages, 0), position + 1, drain, None)


def _consume(
    q, start, lengths, out, q_smem, k_ring, v_ring, blocks, chosen, q_arrived, arrived, consumed, weights_smem, *,
    tile: _Tile,
) -> None:  # fmt: skip
    """Attention of one consumer's tokens."""
    index, head, lane = (lax.axis_index(name) for name in ("tile", "head", "lane"))
    warpgroup = lax.axis_index("warpgroup")
    q_len, head_dim = q.shape[1], q.shape[3]
    wgmma = plgpu.Layout.WGMMA
    scale = math.log2(math.e) / math.sqrt(head_dim)
    first_own = warpgroup * tile.own
    first = index * tile.tokens + first_own
    own_smem = q_smem.at[warpgroup]
    heads = pl.ds(head * tile.rows, tile.rows)

    for token in range(tile.own):
        rows = own_smem.at[pl.ds(token * tile.rows, tile.rows)]
        there = jnp.minimum(first + token, q_len - 1)
        plgpu.copy_gmem_to_smem(q.at[lane, there, heads], rows, q_arrived.at[warpgroup])

    own_tokens = lax.shift_right_logical(
        plgpu.broadcasted_iota(jnp.int32, (_ROWS,), 0, layout=_ROW_SUMS), jnp.int32(tile.rows.bit_length() - 1)
    )
    length = lengths[lane]
    first_position = start[lane] + first
    plgpu.barrier_wait(q_arrived.at[warpgroup])

    def stage_of(position: Array) -> Array:
        return lax.rem(position, jnp.int32(tile.stages))

    def arrive_at(position: Array) -> tuple[Array, Array]:
        plgpu.barrier_wait(arrived.at[stage_of(position)])
        tokens = chosen[stage_of(position)]
        return position, tokens

    def own(tokens: Array) -> Array:
        return lax.shift_right_logical(tokens, first_own) & ((1 << tile.own) - 1)

    def pass_over(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        position, _ = carry
        plgpu.barrier_arrive(consumed.at[stage_of(position)])
        return arrive_at(position + 1)

    def step(carry: tuple) -> tuple:
        position, _, acc, peak, total = carry
        position, tokens = lax.while_loop(
            lambda found: (own(found[1]) == 0) & (found[1] >= 0), pass_over, arrive_at(position)
        )
        stage = stage_of(position)
        begin = blocks[stage] * _BLOCK
        own_v = v_ring.at[stage]

        # A tile without any block has one that nobody selected.
        stored = jnp.where(tokens == _LAST, 0, length - begin)

        @pl.when(stored < _BLOCK)
        def _() -> None:
            # 0 * NaN is NaN: the values beyond what is stored have to go. Consumers that do so at once write the same.
            row = plgpu.broadcasted_iota(jnp.int32, (_BLOCK, head_dim), 0, layout=wgmma)
            values = plgpu.layout_cast(own_v[...], wgmma)
            own_v[...] = jnp.where(row < stored, values, jnp.zeros((), values.dtype))
            plgpu.commit_smem()

        def scores(product) -> Array:
            plgpu.wgmma(product, own_smem, k_ring.at[stage].transpose((1, 0)))
            return product[...]

        logits = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((_ROWS, _BLOCK), jnp.float32))
        # The first key of the block that a row does not attend to.
        selected = lax.shift_right_logical(jnp.broadcast_to(own(tokens), own_tokens.shape), own_tokens) & 1
        stop = jnp.where(selected > 0, first_position + 1 - begin + own_tokens, 0)
        column = plgpu.broadcasted_iota(jnp.int32, (_ROWS, _BLOCK), 1, layout=wgmma)
        logits = jnp.where(column < lax.broadcast_in_dim(stop, column.shape, [0]), logits, -jnp.inf)
        new_peak = jnp.maximum(peak, logits.max(axis=1) * scale)
        weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(new_peak, logits.shape, [0]))
        shrink = jnp.exp2(peak - new_peak)
        total = total * shrink + weights.sum(axis=1)
        acc *= lax.broadcast_in_dim(shrink, acc.shape, [0])
        acc = _add_values(acc, weights.astype(v_ring.dtype), own_v, weights_smem)
        plgpu.barrier_arrive(consumed.at[stage])
        return position + 1, tokens, acc, new_peak, total

    init = (
        jnp.int32(0),
        jnp.int32(0),
        plgpu.layout_cast(jnp.zeros((_ROWS, head_dim), jnp.float32), wgmma),
        plgpu.layout_cast(jnp.full((_ROWS,), _LOWEST, jnp.float32), _ROW_SUMS),
        plgpu.layout_cast(jnp.zeros((_ROWS,), jnp.float32), _ROW_SUMS),
    )
    _, _, acc, _, total = lax.while_loop(lambda carry: carry[1] >= 0, step, init)
    share = 1.0 / jnp.where(total > 0, total, 1.0)
    own_smem[...] = (acc * lax.broadcast_in_dim(share, acc.shape, [0])).astype(out.dtype)
    plgpu.commit_smem()
    for token in range(tile.own):

        @pl.when(first + token < q_len)
        def _(token: int = token) -> None:
            rows = own_smem.at[pl.ds(token * tile.rows, tile.rows)]
            plgpu.copy_smem_to_gmem(rows, out.at[lane, first + token, heads])

    # The end of the kernel waits for the writes.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _add_values(acc: Array, weights: Array, values, weights_smem) -> Array:
    """``acc + weights values``."""
    if weights_smem is None:

        def add(product) -> None:
            plgpu.wgmma(product, weights, values)

        return pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))  # pyright: ignore[reportReturnType]

    own = weights_smem.at[lax.axis_index("warpgroup")]
    own[...] = weights
    plgpu.commit_smem()

    def multiply(product) -> Array:
        plgpu.wgmma(product, own, values)
        return product[...]

    return acc + pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((acc.shape[0], acc.shape[1]), jnp.float32))
