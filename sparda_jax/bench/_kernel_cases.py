"""The decode kernels' work in the geometry of MiniCPM4.1-8B, as chains of calls whose data no cache can hold.

32 query and 2 KV heads of 128, blocks of 64 tokens, 96 blocks selected of which 34 are forced, bf16. Contents are
random. Each call of a selection or an attention reads pages or records of its own; the calls of a plan are consecutive
steps in which 10 of each KV head's 96 blocks are new; a copy moves those 10. The products between two attentions are
those of a hidden size of 4096 and an MLP of 16384; their weights are eight times an L2 cache.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparda_jax.bench._timing import Chain
from sparda_jax.pallas_kernels.between_attentions import LayerWeights, padded_rows
from sparda_jax.pallas_kernels.block_selection import Scorer
from sparda_jax.pallas_kernels.record_copy import pack_plan
from sparda_jax.pallas_kernels.residency import Residency, empty_residency

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 2, 16, 128, 64
HEADS, INTERMEDIATE = KV_HEADS * GROUP, 16384
WIDTH, INIT_BLOCKS, LOCAL_BLOCKS = 96, 1, 32
DENSE_WIDTH = 128
"""Of the lists of a decode step, in which a sequence below 8192 tokens attends to all its blocks."""
MISSES, SPARE = 10, 32
RECORD = (2 * BLOCK, HEAD_DIM)
RECORD_BYTES = 2 * BLOCK * HEAD_DIM * 2
PAGE_BYTES = KV_HEADS * 4 * HEAD_DIM * 2
HBM_BYTES_PER_SECOND = 4.3e12
"""What a copy within an H200's memory reaches, reads and writes together."""
COPY_ENGINE_BYTES_PER_SECOND = 54e9
"""What the copy engine reaches between pinned host memory and an H200, on large contiguous pieces."""
LIMITS = {"init_blocks": INIT_BLOCKS, "local_blocks": LOCAL_BLOCKS, "width": WIDTH}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much the kernels are given.

    Attributes:
        batch: sequences, all of the same length.
        context: tokens of a sequence.
        calls: calls of a chain; so many that a block which leaves the wanted list has lost its slot when it returns.
        inputs: how many different parts of the pool the calls read in turn.
        pool_bytes: of the arrays that the calls choose their own parts of; several times an L2 of 60 MB.
    """

    batch: int
    context: int
    calls: int = 40
    inputs: int = 20
    pool_bytes: int = 1 << 29

    def __post_init__(self) -> None:
        """Refuses a context without enough blocks for the steps of a plan, and steps that would find hits."""
        if self.calls * MISSES < WIDTH + 2 * SPARE:
            raise ValueError(f"calls={self.calls} are too few: use at least {-(-(WIDTH + 2 * SPARE) // MISSES)}.")
        least = BLOCK * (INIT_BLOCKS + LOCAL_BLOCKS + 1 + self.calls * MISSES)
        if self.context < least:
            raise ValueError(
                f"context={self.context} is too short for {self.calls} steps: use at least {least} tokens."
            )

    @property
    def blocks(self) -> int:
        return -(-self.context // BLOCK)

    @property
    def segments(self) -> int:
        return self.batch * KV_HEADS

    @property
    def visible(self) -> int:
        """Compressed keys of a sequence."""
        return (self.context - 32) // 16 + 1

    @property
    def seconds_for_keys(self) -> float:
        """Floor of a selection: reading the compressed keys."""
        return self.batch * self.visible * PAGE_BYTES / 4 / HBM_BYTES_PER_SECOND

    @property
    def seconds_for_records(self) -> float:
        """Floor of an attention: reading the selected blocks."""
        return self.segments * WIDTH * RECORD_BYTES / HBM_BYTES_PER_SECOND

    @property
    def seconds_for_weights(self) -> float:
        """Floor of a layer's products: reading its weights."""
        columns = (2 * HEADS + 3 * KV_HEADS) * HEAD_DIM + 3 * INTERMEDIATE
        return 2 * HEADS * HEAD_DIM * columns / HBM_BYTES_PER_SECOND

    @property
    def copied_bytes(self) -> int:
        """What a copy moves in a call."""
        return self.segments * MISSES * RECORD_BYTES


def selection(size: Size, scorer: Scorer, select: Callable[..., jax.Array]) -> Chain:
    """Calls of ``select(queries, pages, block_table, visible, query_block, num_selected)``."""

    def step(state: Any, shared: dict[str, jax.Array], own: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        return state, select(**shared, **own)

    shared, inputs = _selection_operands(size, scorer)
    return Chain(step=step, state=(), shared=shared, inputs=inputs, num_calls=size.calls)


def plan(size: Size, plan_residency: Callable[..., Any]) -> Chain:
    """Calls of ``plan_residency(state, wanted, block_table, query_block, written)``, 10 misses each."""

    def step(residency: Residency, shared: dict[str, jax.Array], wanted: jax.Array) -> tuple[Residency, Any]:
        residency, *rest = plan_residency(residency, wanted, **shared)
        return residency, rest

    shared, inputs = _plan_operands(size)
    return Chain(step=step, state=_residency(size), shared=shared, inputs=inputs, num_calls=size.calls)


def selection_and_plan(
    size: Size, scorer: Scorer, select: Callable[..., Any], plan_residency: Callable[..., Any]
) -> Chain:
    """Both in turn. The plan takes prepared lists, so that its misses are known, once the selection is there."""
    for_selection, selections = _selection_operands(size, scorer)
    for_plan, lists = _plan_operands(size)
    inputs = [(selections[call % len(selections)], wanted) for call, wanted in enumerate(lists)]

    def step(residency: Residency, shared: Any, own: Any) -> tuple[Residency, Any]:
        for_selection, for_plan = shared
        wanted, ids = jax.lax.optimization_barrier((own[1], select(**for_selection, **own[0])))
        residency, *rest = plan_residency(residency, wanted, **for_plan)
        return residency, (ids, rest)

    shared = (for_selection, for_plan)
    return Chain(step=step, state=_residency(size), shared=shared, inputs=inputs, num_calls=size.calls)


def attention(size: Size, attend: Callable[..., jax.Array], width: int = WIDTH) -> Chain:
    """Calls of ``attend(q, slots, slot_ids, lengths)`` over 96 records, in lists of ``width`` entries."""
    needed = size.segments * WIDTH
    count = max(4 * needed, size.pool_bytes // RECORD_BYTES)
    lists = _parts(np.random.default_rng(1), count, needed)
    unused = ((0, 0), (0, 0), (0, width - WIDTH))
    inputs = [
        jnp.asarray(np.pad(next(lists).reshape(size.batch, KV_HEADS, WIDTH), unused, constant_values=-1))
        for _ in range(size.inputs)
    ]
    shared = {
        "q": _normal(1, (size.batch, KV_HEADS, GROUP, HEAD_DIM)),
        "slots": _normal(0, (count, *RECORD)),
        "lengths": jnp.full((size.batch,), size.context, jnp.int32),
    }

    def step(state: Any, shared: dict[str, jax.Array], slot_ids: jax.Array) -> tuple[Any, jax.Array]:
        return state, attend(slot_ids=slot_ids, **shared)

    return Chain(step=step, state=(), shared=shared, inputs=inputs, num_calls=size.calls)


def between(size: Size, run: Callable[..., Any]) -> Chain:
    """Calls of ``run(attended, residual, weights, cos, sin, batch=...)``: from one layer's attention to the next."""
    rows, hidden, inner, heads = padded_rows(size.batch), HEADS * HEAD_DIM, INTERMEDIATE, HEADS + 3 * KV_HEADS
    weights = LayerWeights(
        output=_weights(1, hidden, hidden),
        mlp_norm=jnp.ones(hidden, jnp.bfloat16),
        gate_up=_weights(2, hidden, 2 * inner),
        down=_weights(3, inner, hidden),
        attention_norm=jnp.ones(hidden, jnp.bfloat16),
        qkvf=_weights(4, hidden, heads * HEAD_DIM),
    )
    shared = {
        "attended": _normal(5, (rows, hidden)),
        "weights": weights,
        "cos": jnp.ones((HEAD_DIM // 2, rows)),
        "sin": jnp.zeros((HEAD_DIM // 2, rows)),
    }

    def step(residual: jax.Array, shared: dict[str, Any], own: Any) -> tuple[jax.Array, Any]:
        return run(residual=residual, batch=size.batch, **shared)

    residual = _normal(6, (hidden, rows))
    return Chain(step=step, state=residual, shared=shared, inputs=[()], num_calls=size.calls)


def fetch(size: Size, copy: Callable[..., jax.Array]) -> Chain:
    """Calls of ``copy(plan, pool, slots)``: 10 records for each KV head out of pinned host memory."""
    pool, slots, inputs = _copy_operands(size)

    def step(slots: jax.Array, pool: jax.Array, own: jax.Array) -> tuple[jax.Array, Any]:
        return copy(own, pool, slots), ()

    return Chain(step=step, state=slots, shared=pool, inputs=inputs, num_calls=size.calls)


def write_back(size: Size, copy: Callable[..., jax.Array]) -> Chain:
    """Calls of ``copy(plan, slots, pool)``: 10 records for each KV head into pinned host memory."""
    pool, slots, inputs = _copy_operands(size)

    def step(pool: jax.Array, slots: jax.Array, own: jax.Array) -> tuple[jax.Array, Any]:
        return copy(own, slots, pool), ()

    return Chain(step=step, state=pool, shared=slots, inputs=inputs, num_calls=size.calls)


def _weights(seed: int, inner: int, outer: int) -> jax.Array:
    return _normal(seed, (inner, outer)) * inner**-0.5


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _parts(rng: np.random.Generator, count: int, needed: int) -> Iterator[np.ndarray]:
    """Lists of ``needed`` numbers below ``count``; as many lists as fit are disjoint, then it starts anew."""
    while True:
        order = rng.permutation(count).astype(np.int32)
        yield from (order[start : start + needed] for start in range(0, count - needed + 1, needed))


def _query_block(size: Size) -> jax.Array:
    return jnp.full((size.batch,), size.blocks - 1, jnp.int32)


def _num_pages(size: Size) -> int:
    return max(4 * size.batch * size.blocks, size.pool_bytes // PAGE_BYTES)


def _selection_operands(size: Size, scorer: Scorer) -> tuple[dict[str, jax.Array], list[dict[str, jax.Array]]]:
    """What all calls share, and each call's queries and table of pages."""
    group = 1 if scorer is Scorer.FORECAST else GROUP
    tables = _parts(np.random.default_rng(1), _num_pages(size), size.batch * size.blocks)
    shared = {
        "pages": _normal(0, (_num_pages(size), KV_HEADS, 4, HEAD_DIM)),
        "visible": jnp.full((size.batch,), size.visible, jnp.int32),
        "query_block": _query_block(size),
        "num_selected": jnp.full((size.batch,), WIDTH, jnp.int32),
    }
    return shared, [
        {
            "queries": _normal(call, (size.batch, KV_HEADS, group, HEAD_DIM)),
            "block_table": jnp.asarray(next(tables).reshape(size.batch, size.blocks)),
        }
        for call in range(size.inputs)
    ]


def _residency(size: Size) -> Residency:
    per_lane = WIDTH + SPARE
    return empty_residency(
        base=jnp.arange(size.batch, dtype=jnp.int32) * per_lane,
        count=jnp.full((size.batch,), per_lane, jnp.int32),
        kv_heads=KV_HEADS,
        max_blocks=size.blocks,
        num_slots=size.batch * per_lane,
    )


def _plan_operands(size: Size) -> tuple[dict[str, jax.Array], list[jax.Array]]:
    """What all steps share, and each step's wanted list.

    The steps go in a circle: the blocks that are not forced are a window that moves over a ring by 10 blocks a step.
    """
    rng = np.random.default_rng(2)
    last = size.blocks - 1
    forced = [*range(INIT_BLOCKS), *range(last - LOCAL_BLOCKS, last + 1)]
    free = np.arange(INIT_BLOCKS, last - LOCAL_BLOCKS)
    rings = [rng.permutation(free)[: size.calls * MISSES] for _ in range(size.segments)]
    table = jnp.asarray(rng.permutation(size.batch * size.blocks).reshape(size.batch, -1).astype(np.int32))

    def wanted(ring: np.ndarray, call: int) -> np.ndarray:
        window = np.take(ring, range(call * MISSES, call * MISSES + WIDTH - len(forced)), mode="wrap")
        return np.sort(np.concatenate([forced, window]))

    query_block = _query_block(size)
    # Everything before the tail is in the host pool.
    shared = {"block_table": table, "query_block": query_block, "written": query_block}
    lists = [np.stack([wanted(ring, call) for ring in rings]) for call in range(size.calls)]
    return shared, [jnp.asarray(ids.reshape(size.batch, KV_HEADS, WIDTH), jnp.int32) for ids in lists]


def _copy_operands(size: Size) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    rng = np.random.default_rng(3)
    records, slots = max(4 * size.segments * WIDTH, size.pool_bytes // RECORD_BYTES), size.segments * (WIDTH + SPARE)
    from_ids, to_ids = (_parts(rng, count, size.segments * MISSES) for count in (records, slots))
    counts = jnp.full((size.segments,), MISSES, jnp.int32)

    def plan() -> jax.Array:
        pairs = np.zeros((size.segments, WIDTH, 2), np.int32)
        pairs[:, :MISSES] = np.stack([next(from_ids), next(to_ids)], axis=-1).reshape(size.segments, MISSES, 2)
        return pack_plan(counts, jnp.asarray(pairs))

    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    pool = jax.device_put(_normal(0, (records, *RECORD)), host)
    return pool, _normal(1, (slots, *RECORD)), [plan() for _ in range(size.inputs)]
