"""Sampling parameters and the sampler that runs on the device."""

import dataclasses
import math
import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparda_jax.adjusting import MAX_BIASES, MAX_STOP_IDS, Adjustments, adjust
from sparda_jax.logprobs import MAX_LOGPROBS

# Uniform already, and still a float32.
_HOTTEST = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is continued.

    Attributes:
        max_tokens: new tokens at most.
        temperature: 0 is greedy.
        top_p: sample from the smallest set of tokens that holds this much probability.
        top_k: sample from this many most likely tokens; 0: all.
        seed: the same seed, prompt and parameters give the same tokens; None: a fresh one.
        min_p: sample from the tokens that are at least so many times as likely as the likeliest one; 0: all.
        presence_penalty: taken from the logit of each token that the answer holds.
        frequency_penalty: likewise, for each time that the answer holds it.
        repetition_penalty: positive logits of the tokens in prompt and answer are divided by it, negative ones
            multiplied.
        logit_bias: pairs of a token id and what is added to its logit, such as ``tuple(biases.items())``.
        min_tokens: so many tokens come before any of ``stop_token_ids``.
        stop_token_ids: what ``min_tokens`` holds back; to stop at one is the caller's part.
        logprobs: report each new token's log probability and those of so many likeliest ones; None: report none.
        prompt_logprobs: the same of the prompt's tokens.
        masked: each token is one of a mask's, which whoever advances the sequence gives before (`Sequence.allow`,
            `DecodeLanes.allow`).

    A token is chosen by vLLM's order: ``min_tokens`` and ``logit_bias``, the penalties (repetition, frequency,
    presence), the mask, then the largest logit if greedy, else temperature, ``min_p``, ``top_k`` and ``top_p``.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    masked: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError whose message begins with the field's name."""
        optional = ("seed", "logprobs", "prompt_logprobs")
        for name in ("max_tokens", "top_k", "min_tokens", *optional):
            value = getattr(self, name)
            if not (isinstance(value, int | np.integer) or (name in optional and value is None)):
                raise ValueError(f"{name}={value!r} is not allowed: it must be an integer")
        biases = [bias for _, bias in self.logit_bias]
        rules = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number, 0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "an integer of 64 bits"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100"),
            ("logit_bias", len(biases) <= MAX_BIASES, f"at most {MAX_BIASES} pairs"),
            ("logit_bias", len(dict(self.logit_bias)) == len(biases), "one bias a token"),
            ("logit_bias", all(-100 <= bias <= 100 for bias in biases), "biases from -100 to 100"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens={self.max_tokens}"),
            ("stop_token_ids", self._can_wait, f"at most {MAX_STOP_IDS} ids with min_tokens"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: it must be {rule}")

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters which tokens prompt and answer hold."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def adjusts(self) -> bool:
        """Whether more than temperature, ``top_k`` and ``top_p`` decides."""
        return self.counts_tokens or bool(self.logit_bias or self.min_tokens or self.min_p or self.masked)

    @property
    def _can_wait(self) -> bool:
        return not self.min_tokens or len(set(self.stop_token_ids)) <= MAX_STOP_IDS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingState:
    """The sampling parameters of a batch, on the device; ``logprobs``: who wants them."""

    temperature: Float[Array, "batch"]
    top_p: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    seed: UInt32[Array, "batch 2"]
    adjustments: Adjustments
    logprobs: Bool[Array, "batch"]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], prompt_lengths: Sequence[int] | None = None) -> "SamplingState":
        """``prompt_lengths`` tells where each answer begins, which only ``min_tokens`` asks for; None: at 0."""
        seeds = [(secrets.randbits(64) if p.seed is None else p.seed) % 2**64 for p in params]
        arrays = {
            "temperature": np.array([min(p.temperature, _HOTTEST) for p in params], np.float32),
            "top_p": np.array([p.top_p for p in params], np.float32),
            # Beyond any vocabulary all are the same; the device counts in 32 bits.
            "top_k": np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
            "seed": np.array([[s >> 32, s & 0xFFFFFFFF] for s in seeds], np.uint32),
            "logprobs": np.array([p.logprobs is not None for p in params]),
        }
        adjustments = Adjustments.of(params, prompt_lengths or [0] * len(params))
        return cls(**jax.device_put(arrays), adjustments=adjustments)


def sample(
    logits: Float[Array, "batch vocab"],
    state: SamplingState,
    position: Int[Array, "batch"],
    seen: Int[Array, "batch vocab"] | None = None,
    allowed: UInt32[Array, "batch words"] | None = None,
) -> Int[Array, "batch"]:
    """The next token of each sequence. The draw depends on (seed, position) only, never on the rest of the batch.

    Args:
        logits: the model's.
        state: how each sequence is sampled.
        position: tokens before the new one.
        seen: which tokens prompt and answer hold, see `adjusting.count`; None: nobody has penalties.
        allowed: which tokens may come, see `adjusting.all_allowed`; None: nobody has a mask.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, "batch"]:
        adjusted = adjust(logits, state.adjustments, position, seen, allowed)
        drawn = jax.vmap(_draw)(adjusted, state, position)
        return jnp.where(state.temperature > 0, drawn, jnp.argmax(adjusted, axis=-1).astype(jnp.int32))

    return jax.lax.cond(jnp.any((state.temperature > 0) | state.adjustments.on), draw, lambda: greedy)


def _draw(logits: Float[Array, "vocab"], state: SamplingState, position: Int[Array, ""]) -> Int[Array, ""]:
    vocab = logits.shape[0]
    rank = jnp.arange(vocab)
    # The index is a key of its own: what sorts by one key alone, and is long, XLA makes a library call that no CUDA
    # graph takes, so that the host would wait for every step.
    _, order = jax.lax.sort((-logits, rank), num_keys=2, is_stable=False)
    ranked = logits[order] / jnp.maximum(state.temperature, 1e-6)
    kept = rank < jnp.where(state.top_k > 0, state.top_k, vocab)
    kept = kept & (ranked >= ranked[0] + jnp.log(state.adjustments.min_p))
    probability = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
    # A token stays while the ones before it hold less than top_p, so the first always does.
    kept = kept & (jnp.cumsum(probability) - probability < state.top_p)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), position)
    noisy = jnp.where(kept, ranked, -jnp.inf) + jax.random.gumbel(key, (vocab,))
    return order[jnp.argmax(noisy)].astype(jnp.int32)
