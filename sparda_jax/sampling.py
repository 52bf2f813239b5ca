"""Sampling parameters and the sampler that runs on the device."""

import dataclasses
import math
import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

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
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError whose message begins with the field's name."""
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not (isinstance(value, int | np.integer) or (name == "seed" and value is None)):
                raise ValueError(f"{name}={value!r} is not allowed: it must be an integer")
        rules = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number, 0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "an integer of 64 bits"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed: it must be {rule}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingState:
    """The sampling parameters of a batch, on the device."""

    temperature: Float[Array, "batch"]
    top_p: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    seed: UInt32[Array, "batch 2"]

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "SamplingState":
        seeds = [(secrets.randbits(64) if p.seed is None else p.seed) % 2**64 for p in params]
        return cls(
            temperature=jnp.asarray([min(p.temperature, _HOTTEST) for p in params], jnp.float32),
            top_p=jnp.asarray([p.top_p for p in params], jnp.float32),
            # Beyond any vocabulary all are the same; the device counts in 32 bits.
            top_k=jnp.asarray([min(p.top_k, 2**31 - 1) for p in params], jnp.int32),
            seed=jnp.asarray(np.array([[s >> 32, s & 0xFFFFFFFF] for s in seeds], np.uint32)),
        )


def sample(
    logits: Float[Array, "batch vocab"], state: SamplingState, position: Int[Array, "batch"]
) -> Int[Array, "batch"]:
    """The next token of each sequence. The draw depends on (seed, position) only, never on the rest of the batch."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, "batch"]:
        drawn = jax.vmap(_draw)(logits, state, position)
        return jnp.where(state.temperature > 0, drawn, greedy)

    return jax.lax.cond(jnp.any(state.temperature > 0), draw, lambda: greedy)


def _draw(logits: Float[Array, "vocab"], state: SamplingState, position: Int[Array, ""]) -> Int[Array, ""]:
    vocab = logits.shape[0]
    rank = jnp.arange(vocab)
    # The index is a key of its own: what sorts by one key alone, and is long, XLA makes a library call that no CUDA
    # graph takes, so that the host would wait for every step.
    _, order = jax.lax.sort((-logits, rank), num_keys=2, is_stable=False)
    ranked = logits[order] / jnp.maximum(state.temperature, 1e-6)
    kept = rank < jnp.where(state.top_k > 0, state.top_k, vocab)
    probability = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
    # A token stays while the ones before it hold less than top_p, so the first always does.
    kept = kept & (jnp.cumsum(probability) - probability < state.top_p)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.seed), position)
    noisy = jnp.where(kept, ranked, -jnp.inf) + jax.random.gumbel(key, (vocab,))
    return order[jnp.argmax(noisy)].astype(jnp.int32)
