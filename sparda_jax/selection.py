"""Which blocks a query attends to: one interface, one selector a mode.

A selector turns a layer's projections into a score per (KV head, query, block); forcing, top-k and the tie rule are the
same for all (``pallas_kernels/block_selection``), so that a comparison of modes isolates the score.
"""

import dataclasses
import enum
from typing import NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparda_jax.cache import LayerCache
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.model import DecoderLayer, Projections
from sparda_jax.pallas_kernels.block_selection import Scorer, forecast_scores, infllm_scores, pool_to_blocks
from sparda_jax.pallas_kernels.compressed_keys import num_windows

# InfiniGen keeps this many of the skewed channels (docs/semantics.md section 7.3).
INFINIGEN_CHANNELS = 32


class Mode(enum.StrEnum):
    """What scores the blocks."""

    DENSE = "dense"  # nothing: every block is read
    SPARSE = "sparse"  # InfLLM-V2: the layer's own queries
    SPARDA = "sparda"  # the previous layer's Forecast, in prefill and decode
    SPARDA_DECODE_ONLY = "sparda-decode-only"  # the Forecast in decode, InfLLM-V2 in prefill
    INFINIGEN = "infinigen"  # this layer's queries of the previous layer's input, 32 skewed channels, in decode
    RANDOM = "random"  # a hash: the control that any method must beat
    STREAMING_LLM = "streaming-llm"  # nothing: the first blocks and the newest, in prefill and decode
    QUEST = "quest"  # a bound on each block's products with the layer's queries, in decode; prefill is dense

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        """Raises a ConfigError that names the modes there are."""
        raise ConfigError(f"mode={value} is not known: use one of {', '.join(cls)}")

    @property
    def needs_forecast(self) -> bool:
        return self in (Mode.SPARDA, Mode.SPARDA_DECODE_ONLY)

    @property
    def looks_ahead(self) -> bool:
        """In decode a layer's blocks are scored with what the layer before computes before it attends."""
        return self.needs_forecast or self is Mode.INFINIGEN

    @property
    def in_lanes(self) -> bool:
        """Whether decode lanes, and with them the server, have this mode; the others are for comparisons."""
        return self not in (Mode.STREAMING_LLM, Mode.QUEST)

    def selects(self, *, decode: bool) -> bool:
        """Whether a long request attends to selected blocks only, in decode or in its prompt."""
        return self is not Mode.DENSE and (decode or self is not Mode.QUEST)

    def partial_channels(self, config: ModelConfig) -> int:
        """Channels of the partial keys that a decode cache has to carry for this mode; 0: it needs none."""
        return min(INFINIGEN_CHANNELS, config.head_dim) if self is Mode.INFINIGEN else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryContext:
    """What a selector may look at, besides the keys.

    Attributes:
        layer_index, layer: where we are; InfiniGen applies this layer's query projection to another layer's input.
        current: this layer's projections. previous: those of the layer before, None in layer 0.
        positions: of the queries. decode: one new token per sequence, after its prompt.
        cos, sin: the rotation at ``positions``.
        skew: InfiniGen's calibrated basis of this layer.
        foreseen: what `Foresight.queries` gives in place of the model's own Forecast.
    """

    layer_index: int
    layer: DecoderLayer
    current: Projections
    previous: Projections | None
    positions: Int[Array, "batch q_len"]
    cos: Float[Array, "batch q_len half"]
    sin: Float[Array, "batch q_len half"]
    decode: bool
    skew: Float[Array, "kv_heads head_dim head_dim"] | None
    foreseen: Float[Array, "batch q_len kv_heads heads head_dim"] | None = None

    def grouped_q(self, config: ModelConfig) -> Float[Array, "batch q_len kv_heads group head_dim"]:
        return group_heads(self.current.q, config)


def group_heads(
    q: Float[Array, "batch q_len heads head_dim"], config: ModelConfig
) -> Float[Array, "batch q_len kv_heads group head_dim"]:
    """Query head h uses KV head ``h // group_size``."""
    return q.reshape(*q.shape[:2], config.num_kv_heads, config.group_size, config.head_dim)


def visible_windows(positions: Int[Array, "batch q_len"], config: ModelConfig) -> Int[Array, "batch q_len"]:
    """How many compressed keys end at or before each position."""
    sparse = config.sparse
    return num_windows(positions + 1, sparse.kernel_size, sparse.kernel_stride)


def block_scores(
    mode: Mode, config: ModelConfig, query: QueryContext, cache: LayerCache
) -> Float[Array, "batch kv_heads q_len blocks"]:
    """The score of every block under ``mode``; one that no visible window touches gets -inf or an unspecified value."""
    if mode is Mode.RANDOM:
        return random_scores(config, query.layer_index, query.positions, cache.k.shape[2] // config.sparse.block_size)
    if mode is Mode.STREAMING_LLM:
        return newest_scores(config, query.positions, cache.k.shape[2] // config.sparse.block_size)
    if mode is Mode.QUEST:
        return _quest_scores(config, query, cache)
    if mode is Mode.INFINIGEN and query.decode and query.layer_index > 0:
        return _infinigen_scores(config, query, cache)
    visible = visible_windows(query.positions, config)
    scorer, queries = scored_with(mode, config, query)
    if scorer is Scorer.FORECAST:
        scores = forecast_scores(queries[:, :, :, 0], cache.compressed_k, visible)
    else:
        scores = infllm_scores(queries, cache.compressed_k, visible)
    return pool_to_blocks(scores, config.sparse.windows_per_block)


def scored_with(
    mode: Mode, config: ModelConfig, query: QueryContext
) -> tuple[Scorer, Float[Array, "batch q_len kv_heads group head_dim"]]:
    """How compressed keys are scored and with which queries, in modes and steps that score them."""
    if mode is Mode.SPARDA or (mode is Mode.SPARDA_DECODE_ONLY and query.decode):
        heads = _forecast(query)[:, :, :, None] if query.foreseen is None else query.foreseen
        return (Scorer.FORECAST if heads.shape[3] == 1 else Scorer.INFLLM), heads
    return Scorer.INFLLM, query.grouped_q(config)


def _forecast(query: QueryContext) -> Float[Array, "batch q_len kv_heads head_dim"]:
    """Layer 0 uses its own ``q_curr``; layer l the ``q_future`` of layer l - 1 (docs/semantics.md section 5.3)."""
    forecast = query.current.q_curr if query.previous is None else query.previous.q_future
    if forecast is None:
        raise ConfigError("mode=sparda needs a Forecast, which this model does not carry; convert one with --forecast")
    return forecast


def random_scores(
    config: ModelConfig, layer_index: int, positions: Int[Array, "batch q_len"], blocks: int
) -> Float[Array, "batch kv_heads q_len blocks"]:
    """A hash of (layer, KV head, position, block), the same however the prompt is cut or batched."""
    ids = jnp.arange(blocks, dtype=jnp.uint32)
    heads = jnp.arange(config.num_kv_heads, dtype=jnp.uint32)[:, None, None]
    mixed = positions.astype(jnp.uint32)[:, None, :, None] * jnp.uint32(0x9E3779B1)
    mixed = (mixed ^ (ids * jnp.uint32(0x85EBCA77))) + heads * jnp.uint32(0xC2B2AE3D)
    mixed = mixed + jnp.uint32(layer_index * 0x27D4EB2F & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return (mixed >> 8).astype(jnp.float32)


def newest_scores(
    config: ModelConfig, positions: Int[Array, "batch q_len"], blocks: int
) -> Float[Array, "batch kv_heads q_len blocks"]:
    """The later a block, the better (docs/semantics.md section 7.4)."""
    ids = jnp.arange(blocks, dtype=jnp.float32)
    return jnp.broadcast_to(ids, (positions.shape[0], config.num_kv_heads, positions.shape[1], blocks))


def _quest_scores(
    config: ModelConfig, query: QueryContext, cache: LayerCache
) -> Float[Array, "batch kv_heads q_len blocks"]:
    """``sum_h sum_c max(q_hc min_c, q_hc max_c)`` over each block's stored keys (docs/semantics.md section 7.5).

    A positive channel of a query meets the block's largest key and a negative one the smallest, so that two products
    with the summed positive and negative parts give the sum over the heads of a group.
    """
    batch, kv_heads, capacity, head_dim = cache.k.shape
    block_size = config.sparse.block_size
    k = cache.k.astype(jnp.float32).reshape(batch, kv_heads, capacity // block_size, block_size, head_dim)
    rows = jnp.arange(capacity).reshape(-1, block_size, 1)
    stored = rows <= query.positions[:, -1, None, None, None, None]
    smallest = jnp.min(jnp.where(stored, k, jnp.inf), axis=3)
    largest = jnp.max(jnp.where(stored, k, -jnp.inf), axis=3)
    empty = jnp.isinf(smallest)
    smallest, largest = (jnp.where(empty, 0.0, bound) for bound in (smallest, largest))
    q = query.grouped_q(config).astype(jnp.float32)
    upper, lower = (jnp.sum(part, axis=3) for part in (jnp.maximum(q, 0), jnp.minimum(q, 0)))
    return _highest("bqhd,bhnd->bhqn", upper, largest) + _highest("bqhd,bhnd->bhqn", lower, smallest)


def _infinigen_scores(
    config: ModelConfig, query: QueryContext, cache: LayerCache
) -> Float[Array, "batch kv_heads 1 blocks"]:
    """``sum_h ((q_h A)[I] . (k A)[I]) / sqrt(|I|)`` per token, pooled to blocks (docs/semantics.md section 7.3).

    Projecting the head-summed query back, ``A[I] (A[I]^T q)``, gives the same numbers from K itself.
    """
    if query.previous is None or query.skew is None or cache.channel_weight is None:
        raise ConfigError("mode=infinigen needs a calibrated basis and a cache made for it")
    guess = infinigen_query(config, query.layer, query.previous, query.cos, query.sin)
    basis = kept_basis(config, query.skew, cache.channel_weight)
    skewed = _highest("bqhd,bhdc->bqhc", guess, basis) / jnp.sqrt(jnp.float32(basis.shape[-1]))
    projected = _highest("bqhc,bhdc->bqhd", skewed, basis)
    scores = _highest("bqhd,bhwd->bhqw", projected, cache.k.astype(jnp.float32))
    past = jnp.arange(cache.k.shape[2]) < query.positions[:, None, :, None]
    return pool_to_blocks(jnp.where(past, scores, -jnp.inf), config.sparse.block_size)


def partial_key_scores(
    query: Float[Array, "batch kv_heads head_dim"],
    basis: Float[Array, "batch kv_heads head_dim channels"],
    partial_keys: Float[Array, "num_blocks kv_heads block_size channels"],
    block_table: Int[Array, "batch blocks"],
    position: Int[Array, "batch"],
) -> Float[Array, "batch kv_heads blocks"]:
    """InfiniGen's block scores of one new token per sequence, from partial keys read through a table.

    Args:
        query: `infinigen_query` of the new token.
        basis: `kept_basis` of each sequence.
        partial_keys: ``(k A)[I]`` of every token, by physical block.
        block_table: the physical block of each block of a sequence.
        position: of the new token; tokens at and behind it are not scored and may hold anything.
    """
    skewed = _highest("bhd,bhdc->bhc", query, basis) / jnp.sqrt(jnp.float32(basis.shape[-1]))
    # A product and a sum in place of a matrix product: XLA reads the keys where they lie, and the gathered and widened
    # keys never exist in memory.
    keys = partial_keys.at[block_table].get(mode="clip").astype(jnp.float32)
    scores = jnp.sum(keys * skewed[:, None, :, None], axis=-1)
    scores = jnp.swapaxes(scores, 1, 2).reshape(*skewed.shape[:2], -1)
    past = jnp.arange(scores.shape[-1]) < position[:, None, None]
    return pool_to_blocks(jnp.where(past, scores, -jnp.inf), partial_keys.shape[2])


def infinigen_query(
    config: ModelConfig,
    layer: DecoderLayer,
    previous: Projections,
    cos: Float[Array, "batch q_len half"],
    sin: Float[Array, "batch q_len half"],
) -> Float[Array, "batch q_len kv_heads head_dim"]:
    """This layer's query projection of the *previous* layer's input, summed over the heads of a group, float32."""
    assert previous.normed is not None  # see `LayerChain.begin`
    guess = layer.self_attn.project_query(previous.normed, cos, sin)
    return jnp.sum(group_heads(guess, config).astype(jnp.float32), axis=3)


def kept_basis(
    config: ModelConfig,
    skew: Float[Array, "kv_heads head_dim head_dim"],
    channel_weight: Float[Array, "batch kv_heads head_dim"],
) -> Float[Array, "batch kv_heads head_dim channels"]:
    """``A[I]``: the columns of the basis, one per sequence and KV head, that weighed most over the prompt."""
    _, channels = jax.lax.top_k(channel_weight, Mode.INFINIGEN.partial_channels(config))
    return jnp.take_along_axis(skew[None], channels[:, :, None], axis=-1)


def channel_importance(
    config: ModelConfig, query: QueryContext, valid: Float[Array, "batch q_len"]
) -> Float[Array, "batch kv_heads head_dim"]:
    """InfiniGen's weight of each skewed channel over these tokens: ``sum_h sum_t |(q_h A)_c|``."""
    q = query.grouped_q(config).astype(jnp.float32)
    skewed = jnp.abs(_highest("bqhgd,hdc->bqhgc", q, query.skew))
    return jnp.einsum("bqhgc,bq->bhc", skewed, valid.astype(jnp.float32))


def _highest(spec: str, a: Array, b: Array | None) -> Array:
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)
