"""What the engine's benchmark drives: an executor whose pool holds one long prefix that nobody had to prefill.

The prefix is random keys and values, published under the keys of a random prompt. Every request begins with it, so its
blocks lie in the pool once, however many requests there are, and a request is there after reading it back.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from sparda_jax.cache.kv import KVCache, LayerCache
from sparda_jax.cache.prefix import KeyChain, PrefixBlocks
from sparda_jax.config import ModelConfig
from sparda_jax.generate import Runner
from sparda_jax.model import Decoder
from sparda_jax.pallas_kernels.compressed_keys import compress_windows, num_windows
from sparda_jax.planned_lanes import demand_for, planned_lanes
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from sparda_jax.serve.executor import Executor

SALT = b"bench"
SPARE_BLOCKS = 64
"""Of the pool, besides what the requests of a row can take together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Sizes of the requests, in tokens.

    Attributes:
        batch: decode lanes, and requests that decode together.
        context: of the longest request, prompt and answer.
        answer: of a request that keeps its lane busy.
        hit: found in the cache, where the time to the first token behind a prefix is measured.
        short: of a short prompt. longs: of the prompts beside it.
        computed: what such a long prompt lacks in the cache, at most.
        steps: decode steps that are timed.
        block_size: of the model.
    """

    batch: int
    context: int
    answer: int
    hit: int
    short: int
    longs: tuple[int, ...]
    computed: int
    steps: int
    block_size: int

    @property
    def prefix(self) -> int:
        """Tokens of the shared prefix: whole blocks that leave room for a block of a request's own and its answer."""
        return (self.context - self.answer) // self.block_size * self.block_size - self.block_size

    @property
    def extra(self) -> int:
        """Requests more than lanes, where they take turns."""
        return max(2, self.batch // 2)

    @property
    def num_blocks(self) -> int:
        """Blocks that the pool needs: the prefix once, and what the requests add to it."""
        own = self.block_size + self.answer
        tokens = self.prefix + (self.batch + self.extra) * own + self.short + max(self.longs, default=0)
        # Each request may end in a block that is not full.
        return -(-tokens // self.block_size) + self.batch + self.extra + SPARE_BLOCKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
        executor: with lanes and a pool.
        prefix: the tokens whose keys and values the pool holds.
        load: what it is given to do.
        block_bytes: of a block of the pool, all layers together.
    """

    executor: Executor
    prefix: tuple[int, ...]
    load: Load
    block_bytes: int

    def prompt(self, number: int, *, hit: int | None = None) -> list[int]:
        """A prompt of its own: the prefix, or its first ``hit`` tokens, and up to a block of other ones.

        Prompts of different numbers are of different lengths, as far as a block goes, so that lanes end their blocks in
        different steps.
        """
        size = self.load.block_size
        own = 1 + number * max(size // self.load.batch, 1) % (size - 1)
        end = None if hit is None else hit // size * size
        return [*self.prefix[:end], *self.tokens(own, number)]

    def tokens(self, count: int, number: int) -> list[int]:
        """So many random tokens."""
        rng = np.random.default_rng((1, number % 2**32))
        return rng.integers(0, self.executor.runner.config.vocab_size, count).tolist()


def make_subject(model: Decoder, mode: Mode, load: Load, *, slots: str) -> Subject:
    """Allocates lanes and pool, and publishes the prefix.

    Args:
        model: the weights.
        mode: what scores the blocks; one whose sequences share blocks.
        load: sizes.
        slots: HBM slots of a lane per layer and KV head; ``auto``: as many as fit, ``least``: few to spare.

    Raises:
        ConfigError: it does not fit into this machine.
    """
    runner = Runner(model, mode=mode, max_model_len=load.context)
    demand = demand_for(model, mode=mode, max_model_len=load.context, batch=load.batch)
    demand = dataclasses.replace(demand, host_pool=load.num_blocks * demand.block_bytes)
    blocks = PrefixBlocks(demand.num_blocks)
    chosen = None if slots == "auto" else demand.least_slots if slots == "least" else int(slots)
    lanes = planned_lanes(model, demand, slots_per_lane=chosen, blocks=blocks)
    staging = demand.capacity + demand.short_tokens
    executor = Executor(runner, lanes, blocks, salt=SALT, staging_tokens=staging)
    # The scheduler reserves a request's shared blocks as if they were its own. Here they are there once.
    executor.num_blocks = (load.batch + load.extra + 2) * demand.max_blocks
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, load.prefix).tolist()
    chain = KeyChain(salt=SALT, sparse=model.config.sparse)
    chain.extend(tokens, executor.selects(load.context))
    cache = random_cache(model.config, runner.capacity_for(load.context), load.prefix, model.embed_tokens.dtype)
    # It is never dropped, so nothing takes the place of its blocks.
    kept = lanes.adopt(cache, 0, SamplingParams())
    for block, key in zip(kept.blocks, chain.keys, strict=True):
        blocks.publish(block, key)
    return Subject(executor=executor, prefix=tuple(tokens), load=load, block_bytes=demand.block_bytes)


def random_cache(config: ModelConfig, capacity: int, length: int, dtype: jnp.dtype) -> KVCache:
    """A contiguous cache of one sequence with normal keys and values, and the compressed keys of these."""
    shape = (1, config.num_kv_heads, capacity, config.head_dim)
    kernel = (config.sparse.kernel_size, config.sparse.kernel_stride)

    @jax.jit
    def layer(key: Array) -> LayerCache:
        k, v = (jax.random.normal(part, shape, dtype) for part in jax.random.split(key))
        windows = jnp.arange(capacity // config.sparse.kernel_stride)
        means = compress_windows(k, windows[None], *kernel)
        complete = (windows < num_windows(jnp.int32(length), *kernel))[:, None]
        return LayerCache(k=k, v=v, compressed_k=jnp.where(complete, means, 0).astype(dtype))

    device = functools.partial(jax.device_put, device=jax.devices()[0])
    layers = tuple(layer(key) for key in jax.random.split(jax.random.key(0), config.num_layers))
    return KVCache(layers=layers, lengths=device(np.array([length], np.int32)))
