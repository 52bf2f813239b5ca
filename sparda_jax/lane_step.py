"""One step of all decode lanes as one program: the new token of each, drawn on the device."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from sparda_jax.adjusting import count
from sparda_jax.cache.pool import Pools
from sparda_jax.cache.state import DecodeState
from sparda_jax.decode import Choose, decode_step
from sparda_jax.decode_plan import DecodePlan
from sparda_jax.logprobs import Scores, score_if
from sparda_jax.sampling import SamplingState, sample


def step_and_sample(
    graphdef: nnx.GraphDef,
    plan: DecodePlan,
    weights: nnx.State,
    state: DecodeState,
    pools: Pools,
    tokens: Int[Array, "batch"],
    new_blocks: Int[Array, "batch"],
    sampling: SamplingState,
    choose: Choose | None = None,
) -> tuple[Int[Array, "batch"], DecodeState, Int[Array, "layers batch kv_heads"], Scores]:
    """One step of all lanes as one program.

    Returns the new tokens, the cache, the records that each layer copied, and the new tokens' log probabilities.
    The arguments are those of `decode_step` and `sample`; the model comes in two parts, as `nnx.split` gives them.
    """
    model = nnx.merge(graphdef, weights)
    x, state, copies = decode_step(model, state, pools, tokens, new_blocks, plan, choose)
    logits = model.logits(x)
    following = sample(logits, sampling, state.lengths, state.seen, state.allowed)
    logprobs = score_if(sampling.logprobs, logits, following)
    state = dataclasses.replace(state, seen=count(state.seen, following))
    return jnp.where(state.live, following, tokens), state, copies, logprobs


def state_first(
    step: Callable[..., tuple[Int[Array, "batch"], DecodeState, Int[Array, "layers batch kv_heads"], Scores]],
) -> Callable[..., tuple[DecodeState, Int[Array, "batch"], Int[Array, "layers batch kv_heads"], Scores]]:
    """`step_and_sample` with the state as its first result, for a program that it is donated to.

    A donated array becomes the first result of its shape. Behind the tokens, each of the state's numbers per lane would
    get the place of the one before it, and XLA would copy them all: two copies a layer.
    """

    def reordered(*args):
        tokens, state, copies, logprobs = step(*args)
        return state, tokens, copies, logprobs

    return reordered
