"""The compiled programs of contiguous caches: a prefill chunk or decode step, log probabilities of a chunk, growing.

Each is compiled once per cache capacity and number of new tokens. `generate` decides which one runs when.
"""

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparda_jax.adjusting import count
from sparda_jax.cache import KVCache
from sparda_jax.cache.chunk_store import ChunkStore, written_by
from sparda_jax.cache.pool import Pools
from sparda_jax.decode_plan import GPU_OPTIONS
from sparda_jax.forward import forward
from sparda_jax.logprobs import Scores, score, score_if
from sparda_jax.model import Decoder
from sparda_jax.sampling import SamplingState, sample


@functools.partial(jax.jit, static_argnames=("graphdef", "mode", "decode", "max_len"), donate_argnames=("cache",))
def advance(
    graphdef,
    state,
    skew,
    cache,
    tokens,
    num_new,
    sparse,
    sampling,
    seen,
    allowed,
    *,
    mode,
    decode,
    max_len,
    foresight=None,
    budget=None,
):
    model = nnx.merge(graphdef, state)
    ways = {"mode": mode, "decode": decode, "max_len": max_len, "skew": skew, "foresight": foresight, "budget": budget}
    return forward_and_sample(model, cache, tokens, num_new, sparse, sampling, seen, allowed, **ways)


@functools.cache
def storing(host: jax.sharding.Sharding) -> Callable[..., tuple[Pools, "Advanced"]]:
    """`advance` that also writes to pools in ``host`` memory, which have to be named as such among its results."""
    return jax.jit(
        advance_and_store,
        static_argnames=("graphdef", "mode", "decode", "max_len"),
        donate_argnames=("cache", "pools"),
        out_shardings=(host, None),
        compiler_options=GPU_OPTIONS,  # so that the copies run beside the rest
    )


def advance_and_store(
    graphdef,
    state,
    skew,
    cache,
    tokens,
    num_new,
    sparse,
    sampling,
    seen,
    allowed,
    *,
    pools,
    block_ids,
    mode,
    decode,
    max_len,
):
    model = nnx.merge(graphdef, state)
    where = ChunkStore(block_ids=block_ids, start=cache.lengths[0], num_new=num_new[0])
    block_size = model.config.sparse.block_size
    written, on_layer = written_by(pools, where, chunk=tokens.shape[1], block_size=block_size)
    ways = {"mode": mode, "decode": decode, "max_len": max_len, "skew": skew, "on_layer": on_layer}
    advanced = forward_and_sample(model, cache, tokens, num_new, sparse, sampling, seen, allowed, **ways)
    return tuple(written), advanced


count_tokens = jax.jit(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteAhead:
    """Where the blocks that a chunk finishes go while it is computed.

    Attributes:
        lend: runs a program that gets the host pool and gives it back (`DecodeLanes.lend_pool`).
        blocks: the physical block of each whole block of the sequence, up to the chunk's end.
    """

    lend: "Callable[[Callable[[Pools], tuple[Pools, Advanced]]], Advanced]"
    blocks: Seq[int]


@functools.partial(jax.jit, static_argnames=("graphdef", "rows"))
def score_rows(graphdef, state, stream, lane, start, targets, *, rows):
    """Log probabilities of the tokens that follow ``rows`` positions of a chunk."""
    hidden = jax.lax.dynamic_slice(stream, (lane, start, 0), (1, rows, stream.shape[2]))[0]
    return score(nnx.merge(graphdef, state).logits(hidden), targets)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Advanced:
    """What one prefill chunk or decode step gives.

    Attributes:
        tokens: those that follow each sequence's last new one.
        cache: with the new tokens.
        read, visible: blocks, per layer and sequence, and per sequence.
        logprobs: of ``tokens``; zeros where nobody wants them.
        stream: the new tokens' residual stream before the final norm.
    """

    tokens: Int[Array, "batch"]
    cache: KVCache
    read: Int[Array, "layers batch"]
    visible: Int[Array, "batch"]
    logprobs: Scores
    stream: Float[Array, "batch q_len hidden"]


def forward_and_sample(
    model: Decoder,
    cache: KVCache,
    tokens: Int[Array, "batch q_len"],
    num_new: Int[Array, "batch"],
    sparse: Bool[Array, "batch"],
    sampling: SamplingState,
    seen: Int[Array, "batch vocab"] | None = None,
    allowed: UInt32[Array, "batch words"] | None = None,
    **ways: Any,
) -> Advanced:
    """One prefill chunk or decode step, and the token that follows each sequence's last new one.

    Args:
        ways: further arguments of `forward`, which says what the others are; ``sampling``, ``seen`` and
            ``allowed`` as of `sample`.
    """
    x, cache, trace = forward(model, cache, tokens, num_new, sparse, **ways)
    last = jnp.take_along_axis(x, jnp.maximum(num_new - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = model.logits(last)
    following = sample(logits, sampling, cache.lengths, seen, allowed)
    return Advanced(
        tokens=following,
        cache=cache,
        read=trace.blocks_read,
        visible=trace.blocks_visible,
        logprobs=score_if(sampling.logprobs, logits, following),
        stream=x,
    )


Scored = tuple[Scores, slice]


@functools.partial(jax.jit, static_argnames=("capacity",))
def grow(cache: KVCache, *, capacity: int) -> KVCache:
    return cache.grow(capacity)
