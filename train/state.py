"""What a step changes: the weights and the optimiser's moments, all float32, and the number of steps done."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from sparda_jax.train.config import TrainConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Attributes:
    weights: see `sparda_jax.train.forecast`.
    opt_state: of `make_optimizer`.
    step: optimiser steps done, and the number of the step that comes next.
    """

    weights: Float[Array, "layers hidden outputs"]
    opt_state: optax.OptState
    step: Int[Array, ""]


def learning_rate(config: TrainConfig, step: jax.typing.ArrayLike) -> Float[Array, ""]:
    """Of step ``step``, counted from 0: linear warm-up, then half a cosine down to ``final_learning_rate``."""
    warmup = min(config.warmup_steps, config.steps // 10)
    step = jnp.asarray(step)
    rising = (step + 1) / (warmup + 1)
    done = jnp.clip((step - warmup) / max(config.steps - warmup, 1), 0, 1)
    span = config.learning_rate - config.final_learning_rate
    falling = config.final_learning_rate + span * 0.5 * (1 + jnp.cos(jnp.pi * done))
    return jnp.where(step < warmup, config.learning_rate * rising, falling)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with the published betas and epsilon, after clipping by the norm over all layers; of single layers, by the
    norm of each, and the others stay.
    """
    adamw = optax.adamw(
        lambda step: learning_rate(config, step), b1=0.9, b2=0.95, eps=1e-6, weight_decay=config.weight_decay
    )
    if config.layers is None:
        clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
        return optax.chain(clip, adamw)
    limit, trained = config.max_grad_norm or jnp.inf, np.asarray(config.layers)

    def clip_each(gradient: Any, _: object) -> Array:
        norms = jnp.sqrt(jnp.sum(gradient**2, axis=(1, 2), keepdims=True))
        return jnp.where(norms < limit, gradient, gradient / norms * limit)

    def keep_others(updates: Any, _: object) -> Array:
        return jnp.zeros_like(updates).at[trained].set(updates[trained])

    return optax.chain(optax.stateless(clip_each), adamw, optax.stateless(keep_others))


def init_state(weights: Float[Array, "layers hidden outputs"], optimizer: optax.GradientTransformation) -> TrainState:
    """Before the first step."""
    return TrainState(weights=weights, opt_state=optimizer.init(weights), step=jnp.int32(0))


def apply_gradient(
    state: TrainState, gradient: Float[Array, "layers hidden outputs"], optimizer: optax.GradientTransformation
) -> TrainState:
    """The state after one step."""
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.weights)
    weights = cast(jax.Array, optax.apply_updates(state.weights, updates))
    return TrainState(weights=weights, opt_state=opt_state, step=state.step + 1)
