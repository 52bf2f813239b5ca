"""Block selection for the tokens of a prefill chunk, and the choice of what runs it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.block_selection import prefill_reference, triton_prefill
from sparda_jax.pallas_kernels.block_selection.reference import Scorer
from sparda_jax.pallas_kernels.block_selection.triton_prefill_top import top_bits
from sparda_jax.pallas_kernels.operands import FLOATS, INT32, check_operands

# Scores of so many bytes at a time lie between the kernels. An H200's L2 holds a good part of them, and more launches
# would cost more than it saves.
SCORE_BYTES = 64 << 20
# Rows of the largest tile of the kernels that score.
_ROWS = 128


def select_blocks_prefill(
    queries: Float[Array, "batch q_len kv_heads group head_dim"],
    compressed_k: Float[Array, "batch kv_heads windows head_dim"],
    start: Int[Array, "batch"],
    num_new: Int[Array, "batch"],
    *,
    scorer: Scorer,
    init_blocks: int,
    local_blocks: int,
    num_selected: int,
    backend: str | None = None,
) -> UInt32[Array, "batch kv_heads q_len words"]:
    """The blocks that each token of a chunk attends to (docs/semantics.md sections 4 and 5), as bits.

    What a token gets does not depend on how the prompt is cut, nor on the other sequences. Scores are float32; equal
    scores go to the lowest id.

    Args:
        queries: the Forecast (group 1) or the layer's own queries, after RoPE, in the dtype of the keys. Token t of a
            sequence is at position ``start + t``; tokens from ``num_new`` on are padding and may hold anything.
        compressed_k: window j is the mean of K of tokens 16 j .. 16 j + 31; those of the chunk are there already, and
            windows that end behind it may hold anything.
        start: position of each sequence's first token, int32.
        num_new: how many of a sequence's tokens are real, int32, from 0 to ``q_len``.
        scorer: FORECAST or INFLLM.
        init_blocks, local_blocks: how many blocks at the start and before the token's own are always selected.
        num_selected: how many blocks a token gets, if there are so many up to its own.
        backend: a name of `Backend`, or None for the fastest that runs here.

    Returns:
        Bit ``b % 32`` of word ``b // 32`` is set if the token attends to block b. There are as many blocks as the
        windows begin in. Padding has no bits.

    Raises:
        ValueError: shapes or dtypes that don't fit each other; an unknown scorer; no local block; fewer places than
            blocks that are always selected; FORECAST with several queries per KV head; a backend that is unknown or
            doesn't take the operands.
    """
    if scorer not in list(Scorer):
        raise ValueError(f"scorer={scorer!r} is unknown: use one of {', '.join(Scorer)}.")
    scorer = Scorer(scorer)
    sizes: dict[str, tuple[int, str]] = {}
    keys = compressed_k, "batch kv_heads windows head_dim"
    check_operands(FLOATS, sizes=sizes, queries=(queries, "batch q_len kv_heads group head_dim"), compressed_k=keys)
    check_operands(INT32, sizes=sizes, start=(start, "batch"), num_new=(num_new, "batch"))
    if queries.dtype != compressed_k.dtype:
        raise ValueError(f"queries are {queries.dtype} and compressed_k {compressed_k.dtype}: use one dtype for both.")
    for name, value, least in (("init_blocks", init_blocks, 0), ("local_blocks", local_blocks, 1)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")
    forced = init_blocks + local_blocks + 1
    if num_selected < forced:
        raise ValueError(f"num_selected={num_selected} must hold the {forced} blocks that are always selected.")
    if scorer is Scorer.FORECAST and queries.shape[3] != 1:
        raise ValueError(f"scorer=forecast takes one query per KV head, not a group of {queries.shape[3]}: use infllm.")
    available = [Backend.REFERENCE]
    head_dim = queries.shape[4]
    # The tensor cores take no float32, and products without them would be slower than XLA's.
    if queries.dtype.itemsize == 2 and head_dim >= 16 and not head_dim & (head_dim - 1):
        available.append(Backend.TRITON)
    chosen = choose_backend(backend, "block_selection", available=available)
    limits = {"init_blocks": init_blocks, "local_blocks": local_blocks, "num_selected": num_selected}
    select = _select_reference if chosen is Backend.REFERENCE else _select_triton
    return select(queries, compressed_k, start, num_new, scorer=scorer, **limits)


_select_reference = jax.jit(
    prefill_reference.select_blocks_prefill,
    static_argnames=("scorer", "init_blocks", "local_blocks", "num_selected"),
)


def _select_triton(queries: Array, compressed_k: Array, *tokens: Array, scorer: Scorer, **limits: int) -> Array:
    batch, q_len, kv_heads, *_ = queries.shape
    logs, parts = None, 1
    if scorer is Scorer.INFLLM:
        logs, parts = _logs(queries, compressed_k, *tokens, num_selected=limits["num_selected"]), 2
    row_bytes = 4 * batch * kv_heads * parts * -(-compressed_k.shape[2] // 4)
    rows = min(q_len, _ROWS * max(1, SCORE_BYTES // (_ROWS * row_bytes)))
    pieces = [
        _select_rows(queries, compressed_k, *tokens, jnp.full(1, first, jnp.int32), logs, rows=rows, **limits)
        for first in range(0, q_len, rows)
    ]
    return lax.bitcast_convert_type(jnp.concatenate(pieces, axis=2)[:, :, :q_len], jnp.uint32)


_logs = jax.jit(triton_prefill.softmax_logs, static_argnames="num_selected")


# One jit object for all pieces and layers, so that they share one lowering of the kernels.
@functools.partial(jax.jit, static_argnames=("rows", "init_blocks", "local_blocks", "num_selected"))
def _select_rows(
    queries: Array,
    compressed_k: Array,
    start: Array,
    num_new: Array,
    offset: Array,
    logs: Array | None,
    *,
    rows: int,
    init_blocks: int,
    local_blocks: int,
    num_selected: int,
) -> Array:
    """The int32 bits of ``rows`` tokens of each sequence from ``offset`` on; with ``logs`` InfLLM scores them."""
    operands = queries, compressed_k, start, num_new, offset
    blocks = -(-compressed_k.shape[2] // 4)
    limits = {"local_blocks": local_blocks, "num_selected": num_selected}
    if logs is None:
        scores = triton_prefill.forecast_scores(*operands, rows=rows, blocks=blocks, **limits)
    else:
        scores = triton_prefill.infllm_scores(*operands, logs, rows=rows, blocks=blocks, **limits)
    return top_bits(scores, start, num_new, offset, init_blocks=init_blocks, **limits)
