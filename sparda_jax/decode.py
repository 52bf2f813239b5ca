"""One decode step over the offload cache: select, fetch what is missing, attend; the next layer's fetch beside it.

The order of a layer is that of docs/semantics.md sections 4 and 5: in a mode that looks ahead, layer l scores the
blocks of layer l + 1 as soon as its own projections are there, and the records that layer l + 1 lacks travel while
layer l attends and runs its MLP. Every other mode fetches for the layer it is in, and waits.

What makes XLA:GPU run the fetch beside the layer is the graph mode of `decode_plan.GPU_OPTIONS` and the two ties marked
below (docs/performance.md, "Overlap"). The fetch has until the next layer attends, so it may run beside that layer's
own products, too.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from sparda_jax.cache.partial_keys import write_partial_key
from sparda_jax.cache.pool import Pools
from sparda_jax.cache.state import DecodeState, LayerState
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.layer_chain import LayerChain
from sparda_jax.model import Decoder, DecoderLayer, Projections, rope_tables
from sparda_jax.pallas_kernels.block_selection import Scorer, select_blocks_decode, select_blocks_with_scratch
from sparda_jax.pallas_kernels.block_selection.reference import choose_blocks_decode
from sparda_jax.pallas_kernels.compressed_keys import num_windows
from sparda_jax.pallas_kernels.record_copy import fetch_records_queued, unpack_plan
from sparda_jax.pallas_kernels.residency import plan_residency
from sparda_jax.pallas_kernels.sparse_attention import sparse_attention_decode
from sparda_jax.pallas_kernels.token_append import append_token, finish_window, write_token
from sparda_jax.selection import Mode, group_heads, infinigen_query, partial_key_scores, random_scores
from sparda_jax.streaming import LayerStream, newest_blocks
from sparda_jax.telemetry import compare_selections

# What an H200 moves. Only their ratio counts, and only for what waits for what.
_HBM_BYTES_PER_SECOND, _LINK_BYTES_PER_SECOND = 4.3e12, 54e9

Choose = Callable[[int, Int[Array, "batch"], Int[Array, "batch kv_heads width"]], Int[Array, "batch kv_heads width"]]
"""(layer, position of the new token, selected blocks) -> the blocks to attend to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """What the layers of one step share; positions and blocks are -1 in idle lanes.

    Lists have `width` entries, since a lane below ``dense_len`` attends to everything; of them `usual` are in use.
    `fetch_is_long`: a layer's fetch may take as long as the layer, so nothing should delay it.
    """

    plan: DecodePlan
    choose: Choose | None
    config: ModelConfig
    cos: Float[Array, "batch 1 half"]
    sin: Float[Array, "batch 1 half"]
    position: Int[Array, "batch"]
    query_block: Int[Array, "batch"]
    num_selected: Int[Array, "batch"]
    written: Int[Array, "batch"]
    block_table: Int[Array, "batch blocks"]
    width: int
    usual: int
    fetch_is_long: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A layer whose blocks are selected and on their way.

    Attributes:
        layer: its cache.
        blocks: those that it attends to. slot_ids: where they are or will be.
        copy_plan: what is fetched.
        queue: for the next fetch, see `fetch_records_queued`.
        scratch: for the next selection ahead, see `select_blocks_with_scratch`.
    """

    layer: LayerState
    blocks: Int[Array, "batch kv_heads width"]
    slot_ids: Int[Array, "batch kv_heads width"]
    copy_plan: Int[Array, "plan"]
    queue: Int[Array, "4"]
    scratch: Float[Array, "..."] | None


def decode_step(
    model: Decoder,
    state: DecodeState,
    pools: Pools,
    tokens: Int[Array, "batch"],
    new_blocks: Int[Array, "batch"],
    plan: DecodePlan,
    choose: Choose | None = None,
) -> tuple[Float[Array, "batch hidden"], DecodeState, Int[Array, "layers batch kv_heads"]]:
    """Appends one token to every live lane and computes its residual stream.

    Args:
        model: the weights.
        state: the cache; donated, it is updated in place.
        pools: the host pool's records; only read.
        tokens: each lane's newest token.
        new_blocks: the physical block that a lane whose length is whole blocks begins, or -1.
        plan: the static choices.
        choose: exchanges the selected blocks of a layer for others, so that a benchmark can set how many are missing.

    Returns:
        The stream before the final norm, the new cache, and how many records each layer copied per lane and KV head;
        of a layer that came as a whole, those that the lane reads.
    """
    config = model.config
    step = _begin(config, state, pools, new_blocks, plan, choose)
    position = step.position
    layers, copies, attended, compared = list(state.layers), [], [], []
    ahead: _Prepared | None = None
    scratch: Array | None = None
    queue = jnp.zeros(4, jnp.int32)
    previous: Projections | None = None
    stream = LayerStream(pools, step.block_table, step.query_block) if plan.fetch is Fetch.STREAM else None
    chain = LayerChain.begin(
        model,
        model.embed(tokens[:, None]),
        step.cos,
        step.sin,
        needs_normed=plan.mode is Mode.INFINIGEN,
        backend=plan.backends.between_attentions,
    )
    for index, module in enumerate(model.layers):
        projections = chain.projections
        assert projections is not None
        k, v, q = projections.k[:, 0], projections.v[:, 0], group_heads(projections.q, config)[:, 0]
        looked_ahead = ahead is not None
        if ahead:
            ready, scratch, ahead = ahead, ahead.scratch, None
        else:
            k, layer = _finish_window(step, layers[index], k)
            queries = _queries(step, module, projections, previous)
            ready = _prepare(step, index, layer, pools[index], queries, position + 1, queue)
        queue = ready.queue
        if plan.fetch is Fetch.AHEAD and index + 1 < config.num_layers:
            # The keys of layer l + 1 are still those before this token; the blocks that it could change are always
            # selected (docs/semantics.md section 5.4).
            queries = _ahead(step, model.layers[index + 1], projections)
            # Layer l attends beside this selection, and shares no memory with it.
            ahead = _prepare(step, index + 1, layers[index + 1], pools[index + 1], queries, position, queue, scratch)
            # Tie 2: XLA orders the layer's attention behind the plan; the other way round the plan would get temporary
            # buffers of the layer's, and wait for it.
            q, copy_plan = jax.lax.optimization_barrier((q, ahead.copy_plan))
            ahead = dataclasses.replace(ahead, copy_plan=copy_plan)
        # A layer that was looked at ahead waits for its fetch only here: its own products have run beside it, too.
        after = ahead.copy_plan if ahead and step.fetch_is_long else None
        layer = _append(step, ready.layer, k, v, window=looked_ahead, after=after)
        if plan.compares:
            compared.append(_compare(step, dataclasses.replace(ready, layer=layer), q))
        layer = write_partial_key(layer, k, position, step.block_table)
        records, listed = layer.slots, ready.slot_ids
        if stream and plan.streams(index):
            records, listed, q = stream.take(index, layer, ready.slot_ids, q)
        out = sparse_attention_decode(
            q,
            records,
            listed,
            position + 1,
            usual=step.usual,
            result_lanes=chain.attended_lanes,
            backend=plan.backends.sparse_attention,
        )
        layers[index], previous = layer, projections
        segments = state.num_lanes * config.num_kv_heads
        missed = ready.copy_plan[:segments].reshape(state.num_lanes, config.num_kv_heads)
        copies.append(_written(step, missed) if plan.streams(index) else missed)
        attended.append(listed)
        chain = chain.after(out)
    x = chain.residual()
    copied = jnp.stack(copies)
    # All layers at once: a few kernels, and not some a layer.
    read = jnp.sum(jnp.stack(attended) >= 0, axis=(2, 3), dtype=jnp.int32)
    counts = state.counts.add(attended=_after(x, read), copied=_after(x, jnp.sum(copied, axis=2)))
    if compared:
        counts = counts.add(**jax.tree.map(lambda *layers: jnp.stack(layers), *compared))
    new_state = dataclasses.replace(
        state, layers=tuple(layers), block_table=step.block_table, lengths=state.lengths + state.live, counts=counts
    )
    return x, new_state, copied


def _after(x: Float[Array, "batch hidden"], amount: Int[Array, "layers batch"]) -> Int[Array, "layers batch"]:
    """A count, for a kernel that waits for the stream: one that nothing waits for is slow beside a fetch."""
    return jnp.where((amount < 0) & (x[0, 0] > 0), 0, amount)


def _finish_window(
    step: _Step, layer: LayerState, k: Float[Array, "batch kv_heads head_dim"]
) -> tuple[Float[Array, "batch kv_heads head_dim"], LayerState]:
    """The cache with the compressed key that the new token may complete, and the token's key to go on with."""
    pages = finish_window(
        layer.pages,
        layer.slots,
        k,
        layer.residency.slot_of_block,
        step.block_table,
        step.position,
        kernel_size=step.config.sparse.kernel_size,
        kernel_stride=step.config.sparse.kernel_stride,
        backend=step.plan.backends.token_append,
    )
    # The window is read from the slots before the token is written to them; else XLA would keep a copy of them.
    k, pages = jax.lax.optimization_barrier((k, pages))
    return k, dataclasses.replace(layer, pages=pages)


def _append(
    step: _Step,
    layer: LayerState,
    k: Float[Array, "batch kv_heads head_dim"],
    v: Float[Array, "batch kv_heads head_dim"],
    *,
    window: bool,
    after: Float[Array, "..."] | None,
) -> LayerState:
    """The cache with the new token, and with the compressed key that it may complete if there is a ``window`` to do.

    With ``after``, the next layer's scores, the layer attends when they are there: both are bound by HBM, and the
    sooner the scores are done the sooner the next fetch begins. What follows them is short chains of few programs,
    which attention hides. Where the fetch has time to spare the two share HBM better side by side.
    """
    backend, slot_of_block = step.plan.backends.token_append, layer.residency.slot_of_block
    if not window:
        slots = write_token(layer.slots, k, v, slot_of_block, step.position, backend=backend)
        return dataclasses.replace(layer, slots=slots)
    slots, pages = append_token(
        layer.slots,
        layer.pages,
        k,
        v,
        slot_of_block,
        step.block_table,
        step.position,
        kernel_size=step.config.sparse.kernel_size,
        kernel_stride=step.config.sparse.kernel_stride,
        after=after,
        backend=backend,
    )
    return dataclasses.replace(layer, slots=slots, pages=pages)


def _begin(
    config: ModelConfig,
    state: DecodeState,
    pools: Pools,
    new_blocks: Int[Array, "batch"],
    plan: DecodePlan,
    choose: Choose | None,
) -> _Step:
    sparse, max_blocks = config.sparse, state.block_table.shape[1]
    query_block = jnp.where(state.live, state.lengths // sparse.block_size, -1)
    begun = jnp.where(new_blocks >= 0, query_block, max_blocks)
    width = plan.list_width(config, max_blocks)
    # One decision per request: below dense_len it attends to everything, which fits into the list.
    is_sparse = (state.lengths + 1 >= sparse.dense_len) & (plan.mode is not Mode.DENSE)
    position = jnp.where(state.live, state.lengths, -1)
    cos, sin = rope_tables(config, jnp.maximum(position, 0)[:, None], plan.max_len)
    return _Step(
        plan=plan,
        choose=choose,
        config=config,
        cos=cos,
        sin=sin,
        position=position,
        query_block=query_block,
        num_selected=jnp.where(is_sparse, min(sparse.num_selected_blocks, width), width),
        written=state.written,
        block_table=state.block_table.at[jnp.arange(state.num_lanes), begun].set(new_blocks, mode="drop"),
        width=width,
        usual=width if plan.mode is Mode.DENSE else min(sparse.num_selected_blocks, width),
        fetch_is_long=_fetch_is_long(config, state, math.prod(pools[-1].shape[1:]) * pools[-1].dtype.itemsize),
    )


def _fetch_is_long(config: ModelConfig, state: DecodeState, record_bytes: int) -> bool:
    """Whether copying a tenth of what a layer attends to takes half as long as its weights, or longer.

    Measured on both sides in docs/performance.md; where every block has a slot, nothing is copied.
    """
    heads, blocks = config.num_kv_heads, config.sparse.num_selected_blocks
    slots = state.layers[-1].slots
    if slots.shape[0] >= state.block_table.size * heads:
        return False
    columns = 2 * config.num_heads * config.head_dim + 3 * config.intermediate_size
    weights = config.hidden_size * columns * slots.dtype.itemsize
    copied = state.num_lanes * heads * blocks * record_bytes / 10
    return copied / _LINK_BYTES_PER_SECOND > weights / _HBM_BYTES_PER_SECOND / 2


def _written(step: _Step, like: Int[Array, "batch kv_heads"]) -> Int[Array, "batch kv_heads"]:
    """The records that a lane reads of a layer that came from the host as a whole."""
    return jnp.broadcast_to(jnp.where(step.position >= 0, step.written, 0)[:, None], like.shape)


def _forecast(
    projection: Float[Array, "batch 1 kv_heads head_dim"] | None,
) -> Float[Array, "batch kv_heads 1 head_dim"]:
    if projection is None:
        raise ConfigError("mode=sparda needs a Forecast, which this model does not carry; convert one with --forecast")
    return jnp.swapaxes(projection, 1, 2)


def _ahead(step: _Step, module: DecoderLayer, previous: Projections) -> Float[Array, "batch kv_heads 1 head_dim"]:
    """What the blocks of a layer are scored with before the layer before it has attended."""
    if step.plan.mode.needs_forecast:
        return _forecast(previous.q_future)
    return jnp.swapaxes(infinigen_query(step.config, module, previous, step.cos, step.sin), 1, 2)


def _queries(
    step: _Step, module: DecoderLayer, current: Projections, previous: Projections | None
) -> Float[Array, "batch kv_heads group head_dim"]:
    """What a layer that was not prepared ahead scores its own blocks with."""
    if previous and step.plan.mode.looks_ahead:
        return _ahead(step, module, previous)
    if step.plan.mode.needs_forecast:
        return _forecast(current.q_curr)
    return group_heads(current.q, step.config)[:, 0]


def _prepare(
    step: _Step,
    index: int,
    layer: LayerState,
    pool: Shaped[Array, "records pool_rows head_dim"],
    queries: Float[Array, "batch kv_heads group head_dim"],
    stored: Int[Array, "batch"],
    queue: Int[Array, "4"],
    scratch: Float[Array, "..."] | None = None,
) -> _Prepared:
    """Selects a layer's blocks, gives them slots, and fetches what is missing.

    Args:
        step: what the layers share.
        index: of the layer.
        layer: its cache.
        pool: its records on the host.
        queries: what its blocks are scored with.
        stored: tokens per lane whose compressed keys the layer's pages hold.
        queue: of the fetch before.
        scratch: of the selection before.
    """
    backends, streamed = step.plan.backends, step.plan.streams(index)
    if streamed:
        blocks = newest_blocks(step.query_block, step.config.num_kv_heads)
    else:
        blocks, scratch = _select(step, index, layer, queries, stored, scratch)
        if step.choose:
            blocks = step.choose(index, step.position, blocks)
    residency, slot_ids, copy_plan = plan_residency(
        layer.residency, blocks, step.block_table, step.query_block, step.written, backend=backends.residency
    )
    # Tie 1: the plan leaves the selection as one array, at once.
    copy_plan = jax.lax.optimization_barrier(copy_plan)
    layer = dataclasses.replace(layer, residency=residency)
    if not streamed:  # else none of them is missing
        segments = slot_ids.shape[0] * slot_ids.shape[1]
        slots, queue = fetch_records_queued(
            copy_plan,
            pool,
            layer.slots,
            queue,
            segments=segments,
            backend=backends.record_copy,
            settings=step.plan.copies,
        )
        layer = dataclasses.replace(layer, slots=slots)
    return _Prepared(layer=layer, blocks=blocks, slot_ids=slot_ids, copy_plan=copy_plan, queue=queue, scratch=scratch)


def _compare(
    step: _Step, ready: _Prepared, q: Float[Array, "batch kv_heads group head_dim"]
) -> dict[str, Int[Array, "batch"]]:
    """What InfLLM-V2 picks with the layer's own queries, compared with the blocks that it attends to."""
    sparse, width = step.config.sparse, step.width
    own = select_blocks_decode(
        q,
        ready.layer.pages,
        step.block_table,
        num_windows(step.position + 1, sparse.kernel_size, sparse.kernel_stride),
        step.query_block,
        step.num_selected,
        scorer=Scorer.INFLLM,
        init_blocks=sparse.init_blocks,
        local_blocks=sparse.local_blocks,
        width=width,
        backend=step.plan.backends.block_selection,
    )
    batch, kv_heads = own.shape[:2]
    counts, pairs = unpack_plan(ready.copy_plan, batch * kv_heads)
    first = jnp.full(batch, sparse.init_blocks)
    has_choice = step.query_block + 1 > step.num_selected
    return compare_selections(
        own,
        ready.blocks,
        counts.reshape(batch, kv_heads),
        pairs[..., 0].reshape(batch, kv_heads, width),
        step.block_table,
        (first, jnp.where(has_choice, step.query_block - sparse.local_blocks, first)),
    )


def _select(
    step: _Step,
    index: int,
    layer: LayerState,
    queries: Float[Array, "batch kv_heads group head_dim"],
    stored: Int[Array, "batch"],
    scratch: Float[Array, "..."] | None,
) -> tuple[Int[Array, "batch kv_heads width"], Float[Array, "..."] | None]:
    config, mode = step.config, step.plan.mode
    sparse, max_blocks = config.sparse, step.block_table.shape[1]
    limits = {"init_blocks": sparse.init_blocks, "local_blocks": sparse.local_blocks, "width": step.width}
    if mode is Mode.DENSE:
        every = jnp.arange(step.width)
        every = jnp.where(every <= step.query_block[:, None], every, -1)
        return jnp.broadcast_to(every[:, None], (every.shape[0], config.num_kv_heads, step.width)), None
    if mode is Mode.RANDOM:
        scores = random_scores(config, index, step.position[:, None], max_blocks)[:, :, 0]
        return choose_blocks_decode(scores, step.query_block, step.num_selected, **limits), None
    if layer.partial_keys is not None and layer.partial_basis is not None:
        scores = partial_key_scores(
            queries[:, :, 0], layer.partial_basis, layer.partial_keys, step.block_table, step.position
        )
        return choose_blocks_decode(scores, step.query_block, step.num_selected, **limits), None
    return select_blocks_with_scratch(
        queries,
        layer.pages,
        step.block_table,
        num_windows(stored, sparse.kernel_size, sparse.kernel_stride),
        step.query_block,
        step.num_selected,
        scorer=Scorer.FORECAST if mode.needs_forecast else Scorer.INFLLM,
        backend=step.plan.backends.block_selection,
        scratch=scratch,
        **limits,
    )
