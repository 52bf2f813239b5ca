"""The cached forward pass: prefill chunks and decode steps of a ragged batch, in every mode."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparda_jax.adaptive import Budget, select_by_share
from sparda_jax.cache import KVCache, LayerCache
from sparda_jax.cache.chunk_store import OnLayer
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.decode_plan import Backends
from sparda_jax.foresight import Foresight
from sparda_jax.model import Decoder, rope_tables
from sparda_jax.pallas_kernels.block_selection import block_mask, select_blocks
from sparda_jax.pallas_kernels.sparse_attention import list_attention, masked_attention
from sparda_jax.prefill import Choose, Chunk, by_bits, count_bits
from sparda_jax.selection import (
    Mode,
    QueryContext,
    block_scores,
    channel_importance,
    group_heads,
    random_scores,
    scored_with,
)

Skew = tuple[Float[Array, "kv_heads head_dim head_dim"], ...]
_Ids = Int[Array, "batch kv_heads q_len selected"]
_FASTEST = Backends()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What happened inside; anything a caller does not return from its jitted function costs nothing.

    Attributes:
        selected: per layer, block ids ``[batch, kv_heads, q_len, selected]``, ascending, -1 padded; None where every
            visible block is read whatever the scores (dense mode, or fewer blocks than the width).
        blocks_read: ``[layers, batch]``, (token, KV head, block) triples that the new tokens attended to.
        blocks_visible: ``[batch]``, the triples a dense layer would have read.
    """

    selected: tuple[Int[Array, "batch kv_heads q_len selected"] | None, ...]
    blocks_read: Int[Array, "layers batch"]
    blocks_visible: Int[Array, "batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """The part of a forward pass that every layer shares."""

    mode: Mode
    config: ModelConfig
    decode: bool
    positions: Int[Array, "batch q_len"]
    num_new: Int[Array, "batch"]
    total: Int[Array, "batch"]
    valid: Bool[Array, "batch q_len"]
    sparse: Bool[Array, "batch"]
    chunk: Chunk | None
    budget: Budget | None

    @property
    def query_block(self) -> Int[Array, "batch q_len"]:
        return self.positions // self.config.sparse.block_size

    @property
    def visible(self) -> Int[Array, "batch"]:
        """(Token, KV head, block) triples up to the new tokens' own blocks."""
        blocks = jnp.where(self.valid, self.query_block + 1, 0)
        return jnp.sum(blocks, axis=1) * self.config.num_kv_heads


def forward(
    model: Decoder,
    cache: KVCache,
    tokens: Int[Array, "batch q_len"],
    num_new: Int[Array, "batch"],
    sparse: Bool[Array, "batch"],
    *,
    mode: Mode,
    decode: bool,
    max_len: int | None = None,
    skew: Skew | None = None,
    foresight: Foresight | None = None,
    budget: Budget | None = None,
    backends: Backends = _FASTEST,
    choose: Choose | None = None,
    on_layer: OnLayer | None = None,
) -> tuple[Float[Array, "batch q_len hidden"], KVCache, Trace]:
    """Appends ``num_new`` tokens of each sequence to the cache and computes their residual stream.

    Prefill from any start position, chunk by chunk, and decode are the same computation: the result does not depend on
    how a prompt is cut, nor on the other sequences of the batch.

    Args:
        tokens: new tokens, right-padded; each sequence continues at its own ``cache.lengths``.
        num_new: how many of them are real; 0 leaves a sequence as it is. ``lengths + num_new`` must fit the capacity.
        sparse: False: this request attends to everything (it is shorter than ``dense_len``), whatever the mode.
        mode: the selector. ``dense`` ignores ``sparse``; ``infinigen`` is never dense (docs/semantics.md section 2.3).
        decode: one new token per sequence, behind its prompt (InfiniGen and sparda-decode-only care).
        max_len: longest sequence to be served, for the choice of RoPE factors.
        skew: InfiniGen's calibrated basis, a matrix per KV head and layer.
        foresight: a Forecast in place of the model's own, for experiments; in modes that have one.
        budget: how many blocks a row of a decode step gets in place of the constant, for experiments; of modes that
            score by one query for each KV head, so that a score is a logit.
        backends: of the kernels that compute chunks of several tokens on a GPU; elsewhere they are plain jnp, and hold
            a score for each pair of a new token and a cached one.
        choose: see `prefill.Choose`; of such chunks only.
        on_layer: is shown each layer's cache as soon as the new tokens are in it, layer by layer.

    Returns:
        The stream before the final norm (``model.logits`` takes it), the new cache and the trace.
    """
    config = model.config
    if budget is not None and (not mode.needs_forecast or (foresight and foresight.design.heads_per_group > 1)):
        raise ConfigError(f"mode={mode.value} has no budget by confidence: use sparda with one head for each KV head")
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
    sparse = jnp.ones_like(sparse) if mode is Mode.INFINIGEN else sparse
    chunk = None
    if tokens.shape[1] > 1 and by_bits(backends):
        chunk = Chunk(
            start=cache.lengths,
            num_new=num_new,
            sparse=sparse,
            config=config.sparse,
            backends=backends,
            choose=choose,
        )
    step = _Step(
        mode=mode,
        config=config,
        decode=decode,
        positions=positions,
        num_new=num_new,
        total=cache.lengths + num_new,
        valid=jnp.arange(tokens.shape[1]) < num_new[:, None],
        sparse=sparse,
        chunk=chunk,
        budget=budget,
    )
    cos, sin = rope_tables(config, positions, max_len)
    x = model.embed(tokens)
    layers, selected, read, previous, inputs = [], [], [], None, []
    for index, (layer, layer_cache) in enumerate(zip(model.layers, cache.layers, strict=True)):
        context = {"layer_index": index, "layer": layer, "previous": previous, "cos": cos, "sin": sin}
        context |= {"positions": positions, "decode": decode, "skew": skew[index] if skew else None}

        def attend(projections, context=context, layer_cache=layer_cache):
            nonlocal previous
            inputs.append(projections.normed)
            foreseen = foresight and foresight.queries(len(layers), inputs, cos, sin, config)
            query = QueryContext(current=projections, foreseen=foreseen, **context)
            out, new_cache, ids, count = _attend(step, query, layer_cache, cache.lengths)
            if on_layer is not None:
                on_layer(len(layers), new_cache)
            layers.append(new_cache)
            selected.append(ids)
            read.append(step.visible if count is None else jnp.where(step.sparse, count, step.visible))
            previous = projections
            return out

        x = layer(x, cos, sin, attend)
    trace = Trace(selected=tuple(selected), blocks_read=jnp.stack(read), blocks_visible=step.visible)
    return x, KVCache(layers=tuple(layers), lengths=step.total), trace


def _attend(
    step: _Step, query: QueryContext, cache: LayerCache, lengths: Int[Array, "batch"]
) -> tuple[Float[Array, "batch q_len heads head_dim"], LayerCache, _Ids | None, Int[Array, "batch"] | None]:
    """The heads' outputs, the cache with the new tokens, and what was selected, if so: the ids and how many."""
    config, projections = step.config, query.current
    cache = cache.append(projections.k, projections.v, lengths, step.num_new, config.sparse)
    if cache.channel_weight is not None and not step.decode:
        weight = cache.channel_weight + channel_importance(config, query, step.valid)
        cache = dataclasses.replace(cache, channel_weight=weight)
    blocks = cache.k.shape[2] // config.sparse.block_size
    selects = step.mode.selects(decode=step.decode) and blocks > config.sparse.num_selected_blocks
    if step.chunk is not None:
        bits = _select_bits(step, step.chunk, query, cache) if selects else None
        out = step.chunk.attend(projections.q, cache, bits)
        if bits is None:
            return out, cache, None, None
        cache = _keep_selected(step, cache, step.chunk.ids(_of_last_token(step, bits), blocks))
        return out, cache, step.chunk.ids(bits, blocks), count_bits(bits)
    ids = _select(step, query, cache) if selects else None
    if ids is not None and not step.decode:
        cache = _keep_selected(step, cache, _of_last_token(step, ids))
    q = group_heads(projections.q, config)
    listed = min(max(config.sparse.min_list_width, 0 if ids is None else ids.shape[3]), blocks)
    if ids is not None and q.shape[1] == 1 and listed < blocks:
        out = list_attention(q, cache.k, cache.v, _block_list(step, ids, listed), step.total, config.sparse.block_size)
    else:
        out = _masked(step, q, cache, ids)
    count = None if ids is None else jnp.sum((ids >= 0) & step.valid[:, None, :, None], axis=(1, 2, 3))
    return out.reshape(projections.q.shape), cache, ids, count


def _of_last_token(step: _Step, rows: Int[Array, "batch kv_heads q_len width"]) -> Int[Array, "batch kv_heads 1 width"]:
    """What belongs to the last new token of each sequence."""
    return jnp.take_along_axis(rows, jnp.maximum(step.num_new - 1, 0)[:, None, None, None], axis=2)


def _keep_selected(step: _Step, cache: LayerCache, ids: Int[Array, "batch kv_heads 1 width"]) -> LayerCache:
    """The cache with the last token's selection; a sequence without new tokens keeps what it had."""
    if cache.selected is None:
        return cache
    width = cache.selected.shape[2]
    ids = jnp.pad(ids[:, :, 0, :width], ((0, 0), (0, 0), (0, max(0, width - ids.shape[3]))), constant_values=-1)
    return dataclasses.replace(cache, selected=jnp.where(step.num_new[:, None, None] > 0, ids, cache.selected))


def _select(step: _Step, query: QueryContext, cache: LayerCache) -> _Ids:
    sparse = step.config.sparse
    scores = block_scores(step.mode, step.config, query, cache)
    if step.budget is not None and step.decode:
        return select_by_share(scores, step.query_block, step.budget, step.config)
    return select_blocks(
        scores,
        step.query_block,
        init_blocks=sparse.init_blocks,
        local_blocks=sparse.local_blocks,
        num_selected=sparse.num_selected_blocks,
    )


def _select_bits(
    step: _Step, chunk: Chunk, query: QueryContext, cache: LayerCache
) -> UInt32[Array, "batch kv_heads q_len words"]:
    blocks = cache.k.shape[2] // step.config.sparse.block_size
    if step.mode is Mode.STREAMING_LLM:
        return chunk.newest(step.query_block, blocks, step.config.num_kv_heads)
    if step.mode is Mode.RANDOM:
        return chunk.best(
            lambda positions: random_scores(step.config, query.layer_index, positions, blocks),
            q_len=step.positions.shape[1],
            row_bytes=4 * step.positions.shape[0] * step.config.num_kv_heads * blocks,
        )
    return chunk.select(*scored_with(step.mode, step.config, query), cache)


def _block_list(
    step: _Step, ids: Int[Array, "batch kv_heads 1 selected"], listed: int
) -> Int[Array, "batch kv_heads listed"]:
    """The blocks to read in decode: the selection, or all blocks of a request that is still below ``dense_len``."""
    ids = ids[:, :, 0]
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, listed - ids.shape[-1])), constant_values=-1)
    every = jnp.arange(listed)
    every = jnp.where(every <= step.query_block, every, -1)[:, None]
    return jnp.where(step.sparse[:, None, None], ids, every)


def _masked(
    step: _Step, q: Array, cache: LayerCache, ids: Array | None
) -> Float[Array, "batch q_len kv_heads group head_dim"]:
    kv_len, block_size = cache.k.shape[2], step.config.sparse.block_size
    rows = jnp.arange(kv_len)
    stored = jnp.broadcast_to((rows < step.total[:, None])[:, None], cache.k.shape[:3])
    allowed = (rows <= step.positions[..., None])[:, None] & stored[:, :1, None]
    if ids is not None:
        mask = block_mask(ids, kv_len // block_size) | ~step.sparse[:, None, None, None]
        allowed = allowed & jnp.repeat(mask, block_size, axis=-1)
    return masked_attention(q, cache.k, cache.v, allowed, stored)
