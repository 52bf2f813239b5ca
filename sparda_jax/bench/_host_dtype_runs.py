"""Answers and logits of lanes all of whose blocks were on the host, in one format or another."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.cache.kv import KVCache
from sparda_jax.cache.state import CacheShape
from sparda_jax.decode import decode_step
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.generate import Runner
from sparda_jax.lanes import DecodeLanes
from sparda_jax.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=1)


class LogitLanes(DecodeLanes):
    """Lanes that decode greedily and show the logits of each step, for which there is no other use."""

    logits: Float[Array, "batch vocab"]

    def _program(self, plan: DecodePlan) -> Callable:
        def step(leaves, state, pools, tokens, new_blocks, sampling):
            model = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))
            x, state, copies = decode_step(model, state, pools, tokens, new_blocks, plan)
            logits = model.logits(x)
            following = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return state, jnp.where(state.live, following, tokens), copies, logits

        return jax.jit(step, donate_argnums=1, compiler_options=plan.compiler_options)

    def _take(self, step: Callable, tokens: Int[Array, "batch"], new_blocks: Int[Array, "batch"]) -> None:
        self._state, self._tokens, self.copies, self.logits = step(
            self._weights, self._state, self._pool.arrays, tokens, new_blocks, self._sampling
        )

    def go_on_with(self, tokens: Int[np.ndarray, "batch"]) -> None:
        """Exchanges the input of the next step."""
        self._tokens = jax.device_put(np.asarray(tokens, np.int32), self._device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prefilled prompt: its cache, and the token that follows it."""

    cache: KVCache
    first_token: int


def prefill(runner: Runner, ids: Sequence[int]) -> Prompt:
    """Computes a prompt on the device, without any host memory."""
    sequence = runner.start(list(ids), GREEDY)
    while (token := sequence.advance()) is None:
        pass
    return Prompt(cache=sequence.take_cache(), first_token=token)


def lanes_for(runner: Runner, batch: int, kv_host_dtype: KvHostDtype) -> LogitLanes:
    """Lanes with as few slots as a step can do with."""
    config = runner.config
    fetch = Fetch.AHEAD if runner.mode.looks_ahead else Fetch.IN_TURN
    plan = DecodePlan(mode=runner.mode, fetch=fetch, max_len=runner.max_model_len)
    blocks = -(-runner.max_model_len // config.sparse.block_size)
    shape = CacheShape(
        lanes=batch,
        max_blocks=blocks,
        num_blocks=batch * blocks,
        slots_per_lane=plan.min_slots(config, blocks),
        kv_host_dtype=kv_host_dtype,
    )
    return LogitLanes(runner.model, shape, plan, runner.skew)


def enter(lanes: LogitLanes, prompts: Sequence[Prompt]) -> None:
    """Gives each lane a prompt of which nothing is in a slot but the newest two blocks, which were on the host, too."""
    for lane in range(lanes.shape.lanes):
        lanes.leave(lane)
    for lane, prompt in enumerate(prompts):
        lanes.resume(lane, lanes.adopt(prompt.cache, prompt.first_token, GREEDY))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """Of a batch.

    Attributes:
        tokens: of each prompt, from the first one that the prompt's last chunk gave; an end token is the last.
        logits: float32, of the steps; those of step i follow token i. A prompt's own are as many as it has tokens
            behind the first.
    """

    tokens: list[list[int]]
    logits: list[Float[np.ndarray, "batch vocab"]]


def decode(
    lanes: LogitLanes,
    prompts: Sequence[Prompt],
    *,
    ends: Sequence[int],
    most: int,
    forced: Sequence[Sequence[int]] | None = None,
) -> Answers:
    """Decodes until every prompt has its end, or ``most`` tokens.

    Args:
        lanes: of the prompts' model.
        prompts: as many as there are lanes at most.
        ends: tokens that end an answer.
        most: tokens of an answer.
        forced: answers to follow in place of the lanes' own.
    """
    enter(lanes, prompts)
    tokens = [[prompt.first_token] for prompt in prompts]
    logits = []

    def is_done(lane: int) -> bool:
        return tokens[lane][-1] in ends or len(tokens[lane]) == most

    while not all(is_done(lane) for lane in range(len(prompts))):
        own = np.asarray(lanes.step())
        logits.append(np.asarray(lanes.logits))
        following = own.copy()
        for lane, found in enumerate(tokens):
            if not is_done(lane):
                following[lane] = own[lane] if forced is None else forced[lane][len(found)]
                found.append(int(following[lane]))
        if forced is not None:
            lanes.go_on_with(following)
    return Answers(tokens=tokens, logits=logits)
