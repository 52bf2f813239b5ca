"""What decode over the offload cache takes of device and host memory, known before anything is allocated.

What the cache takes is asked of the functions that make it, evaluated for shapes only. Estimated are only the
temporary arrays of the compiled programs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sparda_jax.cache.host_dtype import KvHostDtype, host_record
from sparda_jax.cache.kv import KVCache
from sparda_jax.cache.pinning import GIB, pinned_bytes, pinned_limit_for
from sparda_jax.cache.state import CacheShape, DecodeState, empty_state
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.decode_plan import DecodePlan, Fetch, check_streaming
from sparda_jax.generate import MAX_CHUNK_BYTES, PREFILL_CHUNKS
from sparda_jax.logprobs import SCORED_TOKENS
from sparda_jax.model import abstract_decoder
from sparda_jax.pallas_kernels.block_selection.prefill import SCORE_BYTES
from sparda_jax.selection import Mode
from sparda_jax.telemetry import no_counts

SPARE_SLOTS = 32
"""Slots of a lane, layer and KV head besides those that one step attends to, where more would not fit."""

SHORT_PROMPT_TOKENS = 8192
"""Tokens of prompts that are prefilled beside one of the longest, so that they need not wait for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """What is to be decoded.

    Attributes:
        config: the model.
        dtype: of weights, keys and values.
        mode: what scores the blocks.
        has_forecast: whether the weights hold one.
        max_model_len: tokens of the longest sequence, prompt and answer together.
        batch: decode lanes.
        host_pool: bytes of the host pool; None: every lane at its full length.
        fetch: when missing records are fetched; None: ahead where the mode can, else in turn. `fit.settle_fetch` makes
            None to a stream of whole layers where dense needs that.
        prefill_chunks: tokens of a prefill chunk, ascending.
        kv_host_dtype: what the host pool keeps of keys and values.

    Raises:
        ConfigError: a number is too small, the host pool can't hold one sequence, or the mode can't fetch so.
    """

    config: ModelConfig
    dtype: jnp.dtype
    mode: Mode
    has_forecast: bool
    max_model_len: int
    batch: int
    host_pool: int | None = None
    fetch: Fetch | None = None
    prefill_chunks: tuple[int, ...] = PREFILL_CHUNKS["gpu"]
    kv_host_dtype: KvHostDtype = KvHostDtype.AUTO

    def __post_init__(self) -> None:
        _ = self.decode_plan  # which refuses what the mode can't do
        check_streaming(self.fetch, self.kv_host_dtype)
        for flag, value, least in (("--max-model-len", self.max_model_len, 2), ("--batch", self.batch, 1)):
            if value < least:
                raise ConfigError(f"{flag} {value} is not allowed: it must be at least {least}")
        if self.num_blocks < self.max_blocks:
            needed = math.ceil(100 * self.max_blocks * self.block_bytes / GIB) / 100
            raise ConfigError(
                f"host memory: --host-pool-gib {(self.host_pool or 0) / GIB:g} holds {self.num_blocks} blocks, and a "
                f"sequence of {self.max_model_len} tokens has {self.max_blocks}: give {needed:g} or more, or a smaller "
                "--max-model-len"
            )

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.config.sparse.block_size)

    @property
    def capacity(self) -> int:
        """Tokens of the blocks of the longest sequence."""
        return self.max_blocks * self.config.sparse.block_size

    @property
    def short_tokens(self) -> int:
        """Tokens of prompts beside the longest one in prefill."""
        return min(self.capacity, SHORT_PROMPT_TOKENS)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's records on the host, in all layers and KV heads."""
        config = self.config
        record = host_record((2 * config.sparse.block_size, config.head_dim), self.dtype, self.kv_host_dtype)
        return config.num_layers * config.num_kv_heads * record.size * record.dtype.itemsize

    @property
    def num_blocks(self) -> int:
        """Blocks of the host pool."""
        return self.batch * self.max_blocks if self.host_pool is None else self.host_pool // self.block_bytes

    @property
    def decode_plan(self) -> DecodePlan:
        """The static choices of its steps."""
        usual = Fetch.AHEAD if self.mode.looks_ahead else Fetch.IN_TURN
        return DecodePlan(mode=self.mode, fetch=self.fetch or usual, max_len=self.max_model_len)

    @property
    def streams(self) -> bool:
        """Whether each step brings whole layers from the host."""
        return self.fetch is Fetch.STREAM

    @property
    def list_width(self) -> int:
        """Blocks that one step attends to at most, per lane, layer and KV head."""
        return self.decode_plan.list_width(self.config, self.max_blocks)

    @property
    def min_slots(self) -> int:
        """Slots of a lane, layer and KV head that a step must have: for its list, or if it streams for a few blocks."""
        return self.decode_plan.min_slots(self.config, self.max_blocks)

    @property
    def least_slots(self) -> int:
        """Slots of a lane, layer and KV head that a plan begins with; a stream has no use for more than it needs."""
        return self.min_slots if self.streams else min(self.max_blocks, self.min_slots + SPARE_SLOTS)

    @property
    def stream_buffer(self) -> int:
        """Bytes of one of the two buffers that layers are streamed through: a layer's whole pool array."""
        return self.num_blocks * self.block_bytes // self.config.num_layers if self.streams else 0

    def shape(self, slots_per_lane: int) -> CacheShape:
        """The sizes of the cache.

        Raises:
            ConfigError: the slots can't hold what one step reads in them.
        """
        slots, least = min(slots_per_lane, self.max_blocks), self.min_slots
        if slots < least:
            plan = self.decode_plan
            beyond = plan.mode is Mode.DENSE and plan.fetch is Fetch.IN_TURN
            raise ConfigError(
                f"--slots {slots_per_lane} cannot hold the {least} blocks that a step of mode={plan.mode.value} with "
                f"fetch={plan.fetch.value} reads in slots: use {least} or more"
                + (", or no --slots: then whole layers are streamed where so many do not fit" if beyond else "")
            )
        return CacheShape(
            lanes=self.batch,
            max_blocks=self.max_blocks,
            num_blocks=self.num_blocks,
            slots_per_lane=slots,
            kv_host_dtype=self.kv_host_dtype,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a demand takes with a number of slots.

    Attributes:
        demand: what is to be decoded.
        shape: of the cache.
        weights: the model's parameters.
        first_layer: slots of layer 0, which hold everything.
        slots: those of the other layers.
        pages: compressed keys of every block in the pool.
        partial_keys: what InfiniGen scores, and its bases; 0 in other modes.
        tables: which block lies where, lengths, what the steps count.
        staging: keys, values and compressed keys of prompts in prefill: of a whole sequence, half of it once more while
            it grows, and of short prompts beside it, whose caches may be half empty.
        workspace: temporary arrays of the compiled programs, estimated.
        host_pool: the records of all layers, in pinned host memory; an array a layer.
    """

    demand: Demand
    shape: CacheShape
    weights: int
    first_layer: int
    slots: int
    pages: int
    partial_keys: int
    tables: int
    staging: int
    workspace: int
    host_pool: int

    @property
    def device(self) -> int:
        """Device memory, in bytes, at the time that takes most."""
        cache = self.first_layer + self.slots + self.pages + self.partial_keys + self.tables
        # Before the rest is there, the pool is made: layer by layer, through device memory.
        return self.weights + max(cache + self.staging + self.workspace, self.pool_array)

    @property
    def pool_array(self) -> int:
        """One layer's records in the host pool."""
        return self.host_pool // self.demand.config.num_layers

    @property
    def pinned_limit(self) -> int:
        """The GiB that JAX must be allowed to pin."""
        return pinned_limit_for(self.pool_array, self.demand.config.num_layers)

    def pinned(self, limit: int) -> int | None:
        """Host memory, in bytes, that gets pinned if JAX may pin ``limit`` bytes; None if that is too little."""
        return pinned_bytes(self.pool_array, self.demand.config.num_layers, limit)


@functools.lru_cache(maxsize=1024)
def plan_memory(demand: Demand, slots_per_lane: int) -> MemoryPlan:
    """Adds up what a demand takes; allocates nothing.

    Args:
        demand: what is to be decoded.
        slots_per_lane: HBM slots of a lane per layer and KV head.

    Raises:
        ConfigError: the slots can't hold what one step reads in them.
    """
    config, dtype, shape = demand.config, demand.dtype, demand.shape(slots_per_lane)
    channels = demand.mode.partial_channels(config)
    # The layers after the first are alike, so two of them tell all.
    two = dataclasses.replace(config, num_layers=min(config.num_layers, 2))
    state = jax.eval_shape(lambda: empty_state(two, shape, dtype, partial_channels=channels))
    staging = jax.eval_shape(lambda: KVCache.empty(two, 1, demand.capacity, dtype, infinigen=channels > 0))
    counts = jax.eval_shape(lambda: no_counts(config.num_layers, shape.lanes))
    first, others = state.layers[0], config.num_layers - 1

    def all_layers(part: Callable[[Any], Any], cache: DecodeState | KVCache = state) -> int:
        return _bytes(part(cache.layers[0])) + others * _bytes(part(cache.layers[-1]))

    skew = 4 * config.num_layers * config.num_kv_heads * config.head_dim**2 if channels else 0
    return MemoryPlan(
        demand=demand,
        shape=shape,
        weights=_weights(config, dtype, demand.has_forecast),
        first_layer=_bytes(first.slots),
        slots=others * _bytes(state.layers[-1].slots),
        pages=all_layers(lambda layer: layer.pages),
        partial_keys=all_layers(lambda layer: (layer.partial_keys, layer.partial_basis)) + skew,
        tables=all_layers(lambda layer: layer.residency) + _bytes(dataclasses.replace(state, layers=(), counts=counts)),
        staging=_staging(demand, all_layers(lambda layer: layer, staging) + _bytes(staging.lengths)),
        workspace=max(prefill_workspace(demand), scoring_workspace(demand)) + decode_workspace(demand),
        host_pool=demand.num_blocks * demand.block_bytes,
    )


def _staging(demand: Demand, whole: int) -> int:
    """Of a cache for a whole sequence."""
    return whole + whole // 2 + 2 * whole * demand.short_tokens // demand.capacity


@functools.cache
def _weights(config: ModelConfig, dtype: jnp.dtype, has_forecast: bool) -> int:
    return _bytes(nnx.state(abstract_decoder(config, has_forecast=has_forecast, dtype=dtype)))


def _bytes(tree: Any) -> int:
    """Of all arrays in a tree, or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def prefill_workspace(demand: Demand) -> int:
    """Temporary arrays of a prefill chunk, as an upper estimate in bytes.

    Four residual streams, and the MLP's inner arrays or what attention takes, where that is more. The kernels of a GPU
    keep masks, and while they select, scores of a part of the chunk and of InfLLM-V2 a denominator for each head.
    Plain chunks (float32) of c tokens over a cache of n have a float32 and a probability for
    each of ``num_heads c n`` scores and two masks for each of ``num_kv_heads c n``; such a chunk is the smallest one at
    the whole length, or any that stays below the bound on scores.
    """
    config, item, chunks = demand.config, demand.dtype.itemsize, demand.prefill_chunks
    streams = chunks[-1] * 4 * config.hidden_size * item
    inner = chunks[-1] * 3 * config.intermediate_size * item
    if item == 2:
        rows = chunks[-1] * config.num_kv_heads
        selecting = min(SCORE_BYTES, 2 * 4 * rows * demand.max_blocks) + 4 * chunks[-1] * config.num_heads
        needed = streams + max(inner, selecting) + rows * demand.max_blocks // 8
        # XLA doesn't place them without gaps.
        return needed + needed // 32
    bound = MAX_CHUNK_BYTES // (4 * config.num_heads)
    pairs = max(chunks[0] * demand.capacity, min(chunks[-1] * demand.capacity, bound))
    scores = pairs * (config.num_heads * (4 + item) + 2 * config.num_kv_heads)
    return max(scores, inner) + streams


def scoring_workspace(demand: Demand) -> int:
    """Temporary arrays while a prompt's tokens are scored, as an upper estimate in bytes: logits, and streams."""
    rows = min(SCORED_TOKENS, demand.prefill_chunks[-1])
    return rows * (demand.config.vocab_size * demand.dtype.itemsize + 4 * demand.config.hidden_size)


def decode_workspace(demand: Demand) -> int:
    """Temporary arrays of a decode step, as an upper estimate in bytes.

    For each lane five float32 arrays over the vocabulary, the partial results of its attention (one for 3 list
    positions, padded to 16 heads a group), its streams and the MLP's inner arrays. Where whole layers are streamed, two
    of them besides: one is read while the next one comes.
    """
    config, item = demand.config, demand.dtype.itemsize
    partials = 4 * 16 * config.num_kv_heads * -(-demand.list_width // 3) * (config.head_dim + 2)
    streams = item * (4 * config.hidden_size + 3 * config.intermediate_size)
    in_flight = min(2, config.num_layers - 1) * demand.stream_buffer
    return demand.batch * (5 * 4 * config.vocab_size + partials + streams) + in_flight
