"""The choice of blocks from scores for rows that hold several documents, and what runs it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.block_selection.prefill_bits import mask_to_bits
from sparda_jax.pallas_kernels.block_selection.reference import block_mask
from sparda_jax.pallas_kernels.block_selection.triton_row_top import row_top_bits
from sparda_jax.pallas_kernels.operands import FLOATS, INT32, check_operands


def choose_blocks(
    scores: Float[Array, "batch kv_heads q_len blocks"],
    first: Int[Array, "batch q_len"],
    own: Int[Array, "batch q_len"],
    *,
    init_blocks: int,
    local_blocks: int,
    num_selected: int,
    backend: str | None = None,
) -> UInt32[Array, "batch kv_heads q_len words"]:
    """The ``num_selected`` best blocks of each query's document, those that are always selected among them.

    Of blocks after the query's own only the next one competes; if it wins, its place stays empty (docs/semantics.md
    section 11.3). Where it must not, its score is -inf. Ties go to the lowest id.

    Args:
        scores: float32, of blocks counted from the start of the row; any number where a block can't be chosen.
        first: the block in which the query's document begins, int32.
        own: the query's own block, int32; below 0 for a query that gets no block.
        init_blocks, local_blocks: of a document, always selected, with the query's own.
        backend: a name of `Backend`, or None for the fastest that runs here.

    Returns:
        The chosen blocks as bits, see `select_blocks_prefill`.

    Raises:
        ValueError: shapes or dtypes that don't fit each other; fewer places than blocks that are always selected; an
            unknown backend, or one that doesn't take the operands.
    """
    sizes: dict[str, tuple[int, str]] = {}
    check_operands(FLOATS, sizes=sizes, scores=(scores, "batch kv_heads q_len blocks"))
    check_operands(INT32, sizes=sizes, first=(first, "batch q_len"), own=(own, "batch q_len"))
    forced = init_blocks + local_blocks + 1
    if num_selected < forced:
        raise ValueError(f"num_selected={num_selected} must hold the {forced} blocks that are always selected.")
    available = [Backend.REFERENCE]
    if scores.dtype == jnp.float32:
        available.append(Backend.TRITON)
    chosen = choose_backend(backend, "block_selection", available=available)
    limits = {"init_blocks": init_blocks, "local_blocks": local_blocks, "num_selected": num_selected}
    if chosen is Backend.REFERENCE:
        return _reference(scores, first, own, **limits)
    return lax.bitcast_convert_type(_kernel(scores, first, own, **limits), jnp.uint32)


# One jit object for all layers, so that they share one lowering of the kernel.
_kernel = jax.jit(row_top_bits, static_argnames=("init_blocks", "local_blocks", "num_selected"))


@functools.partial(jax.jit, static_argnames=("init_blocks", "local_blocks", "num_selected"))
def _reference(
    scores: Array, first: Array, own: Array, *, init_blocks: int, local_blocks: int, num_selected: int
) -> Array:
    blocks = scores.shape[-1]
    ids = jnp.arange(blocks)
    first, own = first[:, None, :, None], own[:, None, :, None]
    past = (ids >= first) & (ids <= own)
    forced = past & ((ids < first + init_blocks) | (ids >= own - local_blocks))
    competes = (ids >= first) & (ids <= own + 1)
    # Infinite scores must not tie with the blocks that always win and those that never do. NaN counts as the largest.
    largest = jnp.finfo(scores.dtype).max
    finite = jnp.maximum(jnp.where(scores <= largest, scores, largest), -largest)
    # top_k sorts -0 below 0, and they are equal scores.
    ranked = jnp.where(competes, jnp.where(forced, jnp.inf, jnp.where(finite == 0, 0, finite)), -jnp.inf)
    _, chosen = lax.top_k(ranked, min(num_selected, blocks))
    return mask_to_bits(block_mask(chosen, blocks) & past)
