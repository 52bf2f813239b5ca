"""What decode lanes refuse, before anything is allocated or changed."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from sparda_jax.cache.blocks import BlockAllocator
from sparda_jax.cache.kv import KVCache
from sparda_jax.cache.state import CacheShape
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.decode_plan import DecodePlan, Fetch, check_streaming
from sparda_jax.forward import Skew
from sparda_jax.model import Decoder
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode


def check_lanes(
    model: Decoder,
    shape: CacheShape,
    plan: DecodePlan,
    skew: Skew | None,
    sample_every: int | None,
    blocks: BlockAllocator | None,
) -> None:
    """Raises the ConfigError that the constructor of `DecodeLanes` names."""
    config = model.config
    if plan.mode.needs_forecast and not model.has_forecast:
        raise ConfigError(
            f"mode={plan.mode.value} needs a Forecast, and this checkpoint carries none: add one with "
            "`python -m sparda_jax.convert SRC DST --forecast FILE`, or use mode=sparse"
        )
    if not plan.mode.in_lanes:
        able = ", ".join(mode.value for mode in Mode if mode.in_lanes)
        raise ConfigError(
            f"mode={plan.mode.value} is there for comparisons with a contiguous cache only (`Runner`, `SparDA`, "
            f"`python -m sparda_jax.eval`): decode lanes take {able}"
        )
    if plan.mode is Mode.INFINIGEN and skew is None:
        raise ConfigError("mode=infinigen needs a calibrated basis (`calibrate`), and none was given")
    if sample_every is not None and sample_every < 2:
        raise ConfigError(f"sample_every={sample_every} is not allowed: use 2 or more, or None for no samples")
    if sample_every is not None and plan.fetch is Fetch.STREAM:
        raise ConfigError(
            f"sample_every={sample_every} compares selections, and fetch={plan.fetch.value} has none: use None"
        )
    check_streaming(plan.fetch, shape.kv_host_dtype)
    least = plan.min_slots(config, shape.max_blocks)
    if min(shape.slots_of(layer) for layer in range(config.num_layers)) < least:
        beyond = plan.mode is Mode.DENSE and plan.fetch is Fetch.IN_TURN
        or_stream = f", or fetch={Fetch.STREAM.value}" if beyond else ""
        raise ConfigError(
            f"slots_per_lane={shape.slots_per_lane} cannot hold the {least} blocks that a step of "
            f"mode={plan.mode.value} with fetch={plan.fetch.value} reads in slots: use {least} or more{or_stream}"
        )
    if blocks is not None and blocks.num_blocks != shape.num_blocks:
        raise ConfigError(
            f"blocks.num_blocks={blocks.num_blocks} is not the pool's num_blocks={shape.num_blocks}: give an allocator "
            "of that size"
        )


def check_sequence(
    cache: KVCache, there: Sequence[int], config: ModelConfig, shape: CacheShape, plan: DecodePlan, dtype: jnp.dtype
) -> int:
    """The length of a sequence that comes to decode, in tokens; raises what `DecodeLanes.enter` names.

    Args:
        cache: the sequence.
        there: the blocks that hold its first tokens already.
        config, shape, plan: of the lanes.
        dtype: of their keys and values.
    """
    block_size = config.sparse.block_size
    keys = cache.layers[0].k
    rows = -(-cache.capacity // block_size) * block_size
    wanted = (config.num_layers, (1, config.num_kv_heads, rows, config.head_dim), dtype)
    if (given := (len(cache.layers), keys.shape, keys.dtype)) != wanted:
        raise ValueError(
            f"a cache of {given[0]} layers of {given[2]}{list(given[1])} was given: these lanes take one of "
            f"{wanted[0]} layers of {wanted[2]}{list(wanted[1])}, that is one sequence of their own model"
        )
    # Not `cache.lengths[0]`: that is a program, and would wait for all that has been launched.
    length = int(np.asarray(cache.lengths)[0])
    if not 0 < length < shape.max_blocks * block_size:
        raise ValueError(
            f"a sequence of {length} tokens was given: a lane takes 1 to "
            f"{shape.max_blocks * block_size - 1} (max_blocks={shape.max_blocks})"
        )
    if len(there) * block_size > length:
        raise ValueError(
            f"{len(there)} blocks are shared or written, and a sequence of {length} tokens has "
            f"{length // block_size} whole ones: give those at most"
        )
    if plan.mode is Mode.INFINIGEN and cache.layers[0].channel_weight is None:
        raise ConfigError("mode=infinigen needs a cache made for it (KVCache.empty(..., infinigen=True))")
    return length


def check_input(
    first_token: int, params: SamplingParams, seen: Int[Array, "1 vocab"] | None, config: ModelConfig
) -> None:
    """Raises the ValueError that `DecodeLanes.enter` names for what a sequence goes on with."""
    if not 0 <= first_token < config.vocab_size:
        raise ValueError(f"first_token={first_token} is outside vocab_size={config.vocab_size}")
    if params.counts_tokens and seen is None:
        raise ValueError("seen is missing: with penalties, give the tokens of prompt and answer (`Sequence.seen`)")


def check_sharing(shared: Sequence[int], plan: DecodePlan) -> None:
    """Raises a ConfigError if sequences of the mode can't share blocks."""
    if shared and plan.mode is Mode.INFINIGEN:
        raise ConfigError(
            f"mode={plan.mode.value} can't share {len(shared)} blocks: their partial keys are one sequence's own. "
            "Share none"
        )
