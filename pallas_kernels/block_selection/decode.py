"""Block selection for one new token per sequence, and the choice of what runs it."""

import functools

import jax
from jaxtyping import Array, Float, Int

from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.block_selection import mosaic_gpu, reference, triton
from sparda_jax.pallas_kernels.block_selection.reference import Scorer
from sparda_jax.pallas_kernels.operands import FLOATS, INT32, check_operands


def select_blocks_decode(
    queries: Float[Array, "batch kv_heads group head_dim"],
    pages: Float[Array, "num_pages kv_heads 4 head_dim"],
    block_table: Int[Array, "batch blocks"],
    visible: Int[Array, "batch"],
    query_block: Int[Array, "batch"],
    num_selected: Int[Array, "batch"],
    *,
    scorer: Scorer,
    init_blocks: int,
    local_blocks: int,
    width: int,
    backend: str | None = None,
) -> Int[Array, "batch kv_heads width"]:
    """The blocks that each sequence's next token attends to (docs/semantics.md sections 4 and 5).

    Scores every compressed key that a sequence sees, takes the max over each block's five windows and keeps the best
    ``num_selected``, with the first ``init_blocks`` and the last ``local_blocks`` before the query's own among them.
    Scores are float32; equal scores go to the lowest id.

    Args:
        queries: the Forecast (group 1) or the layer's own queries, after RoPE, in the dtype of the pages.
        pages: compressed keys. Window j (tokens 16 j .. 16 j + 31) is entry ``(j + 1) % 4`` of the sequence's page
            ``(j + 1) // 4``; entries of windows that a sequence does not see may hold anything.
        block_table: physical page of each block, int32; anything for a block without a visible window.
        visible: compressed keys that each sequence sees, int32.
        query_block: the block of the new token, int32; -1 for an idle lane, which gets no blocks.
        num_selected: how many blocks to select, int32, at most ``width``.
        scorer: FORECAST or INFLLM.
        init_blocks, local_blocks: how many blocks at the start and before the query's own are always selected.
        width: the length of the lists.
        backend: a name of `Backend`, or None for the fastest that runs here.

    Returns:
        Block ids, ascending, int32, -1 at the end. A sequence gets ``min(num_selected, query_block + 1)``. NaN in
        its own queries makes a sequence's choice unspecified, though still one of distinct ids up to its own block.

    Raises:
        ValueError: shapes or dtypes that don't fit each other; an unknown scorer; a limit below its least; FORECAST
            with several queries per KV head; a backend that is unknown or doesn't take the operands.
    """
    blocks, _ = select_blocks_with_scratch(
        queries,
        pages,
        block_table,
        visible,
        query_block,
        num_selected,
        scorer=scorer,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        width=width,
        backend=backend,
    )
    return blocks


def select_blocks_with_scratch(
    queries: Float[Array, "batch kv_heads group head_dim"],
    pages: Float[Array, "num_pages kv_heads 4 head_dim"],
    block_table: Int[Array, "batch blocks"],
    visible: Int[Array, "batch"],
    query_block: Int[Array, "batch"],
    num_selected: Int[Array, "batch"],
    *,
    scorer: Scorer,
    init_blocks: int,
    local_blocks: int,
    width: int,
    backend: str | None = None,
    scratch: Float[Array, "..."] | None = None,
) -> tuple[Int[Array, "batch kv_heads width"], Float[Array, "..."]]:
    """`select_blocks_decode` for a program with many selections, which pass the place of their scores on to each other.

    So that place is nobody else's in the whole program. Otherwise XLA gives it away once the blocks are chosen, and
    what gets it has to wait until then, although it may have nothing to do with the selection.

    Args:
        scratch: what the selection before returned, float32 and of a shape that is the backend's own; of the same
            operands' shapes, scorer and backend. What it holds does not matter. None for the first one.

    Returns:
        The blocks, and the scratch to pass on.

    Raises:
        ValueError: as `select_blocks_decode`.
    """
    if scorer not in list(Scorer):
        raise ValueError(f"scorer={scorer!r} is unknown: use one of {', '.join(Scorer)}.")
    scorer = Scorer(scorer)
    sizes: dict[str, tuple[int, str]] = {}
    keys = pages, "num_pages kv_heads 4 head_dim"
    check_operands(FLOATS, sizes=sizes, queries=(queries, "batch kv_heads group head_dim"), pages=keys)
    lanes = {"visible": visible, "query_block": query_block, "num_selected": num_selected}
    per_lane = {name: (numbers, "batch") for name, numbers in lanes.items()}
    check_operands(INT32, sizes=sizes, block_table=(block_table, "batch blocks"), **per_lane)
    if pages.shape[2] != 4:
        raise ValueError(f"pages{list(pages.shape)} must have 4 compressed keys each, those of a block.")
    if queries.dtype != pages.dtype:
        raise ValueError(f"queries are {queries.dtype} and pages {pages.dtype}: they must have the same dtype.")
    for name, value, least in (("init_blocks", init_blocks, 0), ("local_blocks", local_blocks, 0), ("width", width, 1)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")
    if scorer is Scorer.FORECAST and queries.shape[2] != 1:
        raise ValueError(f"scorer=forecast takes one query per KV head, not a group of {queries.shape[2]}: use infllm.")
    available = [Backend.REFERENCE, Backend.TRITON]
    if mosaic_gpu.takes(queries, pages, scorer=scorer, width=width):
        available.append(Backend.MOSAIC_GPU)
    chosen = choose_backend(backend, "block_selection", available=available)
    limits = {"init_blocks": init_blocks, "local_blocks": local_blocks, "width": width}
    operands = queries, pages, block_table, visible, query_block, num_selected
    return _select(*operands, scratch, scorer=scorer, backend=chosen, **limits)


# One jit object for all layers, so that they share one lowering of the kernels.
@functools.partial(jax.jit, static_argnames=("scorer", "backend", "init_blocks", "local_blocks", "width"))
def _select(
    queries: Array,
    pages: Array,
    block_table: Array,
    visible: Array,
    query_block: Array,
    num_selected: Array,
    scratch: Array | None,
    *,
    scorer: Scorer,
    backend: Backend,
    **limits: int,
) -> tuple[Array, Array]:
    if backend is Backend.REFERENCE:
        scores = reference.block_scores_decode(queries, pages, block_table, visible, scorer=scorer)
        return reference.choose_blocks_decode(scores, query_block, num_selected, **limits), scores
    if backend is Backend.TRITON:
        scores = triton.score_pages(queries, pages, block_table, visible, scorer=scorer, scratch=scratch)
        return triton.top_blocks(scores, visible, query_block, num_selected, **limits), scores
    scores = mosaic_gpu.score_pages(queries, pages, block_table, visible, scorer=scorer)
    return mosaic_gpu.top_blocks(scores, visible, query_block, num_selected, **limits), scores
