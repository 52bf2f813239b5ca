"""The training step and loop of the bundled model."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from sparda_jax.model import Decoder, Projections, rope_tables
from sparda_jax.pretrain.attention import dense_attention, sparse_attention
from sparda_jax.pretrain.batches import Batch, LossWeights
from sparda_jax.pretrain.recipe import Phase, Recipe
from sparda_jax.pretrain.routing import RoutingTeacher, foresight_loss, routing_loss, sample_queries
from sparda_jax.selection import Mode

# A layer's projections and the Forecast that selects for it, None without one.
Observe = Callable[[Projections, Array | None], None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """float32 parameters and the optimiser's state."""

    params: nnx.State
    opt_state: optax.OptState
    step: Int[Array, ""]


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW with clipping; matrices decay, norms do not."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        recipe.peak_learning_rate,
        warmup_steps=min(recipe.warmup_steps, recipe.total_steps // 2),
        decay_steps=recipe.total_steps,
        end_value=recipe.final_learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(recipe.max_grad_norm),
        optax.adamw(
            schedule,
            b2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )


def forward_logits(
    model: Decoder,
    tokens: Int[Array, "batch q_len"],
    mode: Mode,
    observe: Observe = lambda projections, forecast: None,
) -> Float[Array, "batch q_len vocab"]:
    """Logits of whole sequences, every layer dense, sparse or routed by the Forecast; ``observe`` sees each layer."""
    config = model.config
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cos, sin = rope_tables(config, positions)

    previous: Projections | None = None

    def attend(projections: Projections) -> Float[Array, "batch q_len heads head_dim"]:
        nonlocal previous
        forecast = projections.q_curr if previous is None else previous.q_future
        previous = projections
        observe(projections, forecast)
        if mode is Mode.DENSE:
            return dense_attention(projections)
        return sparse_attention(config, projections, forecast if mode is Mode.SPARDA else None)

    x = model.embed(tokens)
    for layer in model.layers:
        x = layer(x, cos, sin, attend)
    return model.logits(x)


def loss_and_metrics(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    batch: dict[str, Array],
    key: jax.Array,
    *,
    mode: Mode,
    routing_weight: float,
    foresight_weight: float,
    dtype: jnp.dtype,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Weighted cross entropy plus the weighted losses of routing.py; the parts apart as metrics."""
    model = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype), params))
    tokens, weights = batch["tokens"], batch["loss_weights"]
    value_weight = LossWeights().value
    queries, valid = sample_queries(weights, value_weight, key)
    routing: list[Float[Array, ""]] = []
    foresight: list[Float[Array, ""]] = []

    def observe(projections: Projections, forecast: Array | None) -> None:
        teacher = RoutingTeacher.of(model.config, projections, queries, valid)
        if routing_weight:
            routing.append(routing_loss(model.config, projections, teacher))
        if foresight_weight and forecast is not None:
            foresight.append(foresight_loss(model.config, forecast, projections, teacher))

    logits = forward_logits(model, tokens[:, :-1], mode, observe)
    targets = tokens[:, 1:]
    entropies = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    loss = jnp.sum(entropies * weights) / jnp.maximum(jnp.sum(weights), 1)
    right = jnp.argmax(logits, axis=-1) == targets
    values, text = weights >= value_weight, weights == LossWeights().text
    metrics = {
        "loss": loss,
        "value_accuracy": jnp.sum(right & values) / jnp.maximum(jnp.sum(values), 1),
        "value_loss": jnp.sum(entropies * values) / jnp.maximum(jnp.sum(values), 1),
        "text_loss": jnp.sum(entropies * text) / jnp.maximum(jnp.sum(text), 1),
    }
    for name, weight, losses in (
        ("routing_loss", routing_weight, routing),
        ("foresight_loss", foresight_weight, foresight),
    ):
        if losses:
            metrics[name] = sum(losses, start=jnp.float32(0))
            loss = loss + weight * metrics[name]
    return loss, metrics


def make_train_step(
    graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, recipe: Recipe, dtype: jnp.dtype
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """The jitted step ``(state, batch, mode) -> (state, metrics)``; the state is donated."""

    @functools.partial(jax.jit, static_argnames=("mode",), donate_argnums=(0,))
    def step(state: TrainState, batch: dict[str, Array], *, mode: Mode) -> tuple[TrainState, dict[str, Array]]:
        def loss_fn(params):
            return loss_and_metrics(
                graphdef,
                params,
                batch,
                key,
                mode=mode,
                routing_weight=recipe.routing_weight,
                foresight_weight=recipe.foresight_weight,
                dtype=dtype,
            )

        key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
        (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = cast(nnx.State, optax.apply_updates(state.params, updates))
        metrics |= {"grad_norm": optax.tree.norm(grads)}
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), metrics

    return step


def init_state(model: Decoder, optimizer: optax.GradientTransformation) -> tuple[nnx.GraphDef, TrainState]:
    """A fresh optimiser over a copy of the model's float32 weights (a step donates its state)."""
    graphdef, params = nnx.split(model)
    params = jax.tree.map(jnp.copy, params)
    return graphdef, TrainState(params=params, opt_state=optimizer.init(params), step=jnp.int32(0))


def _on_device(batches: Iterable[Batch]) -> Iterator[dict[str, Array]]:
    """Moves each batch while the step before it runs."""
    waiting: dict[str, Array] | None = None
    for batch in batches:
        moving = {name: jax.device_put(batch[name]) for name in ("tokens", "loss_weights")}
        if waiting is not None:
            yield waiting
        waiting = moving
    if waiting is not None:
        yield waiting


def train(
    model: Decoder,
    recipe: Recipe,
    batches_of: Callable[[Phase, int, int], Iterable[Batch]],
    *,
    dtype: jnp.dtype,
    report: Callable[[dict[str, Any]], None],
    report_every: int = 50,
) -> tuple[Decoder, TrainState]:
    """Runs all phases.

    Args:
        model: float32 weights to start from; they stay as they are.
        batches_of: (phase, first step, number of steps) -> that many batches of ``tokens [batch, seq_len + 1]`` and
            ``loss_weights [batch, seq_len]``.
        dtype: of activations and gradients; parameters and the optimiser stay float32.
        report: gets a dictionary of metrics of two neighbouring steps every ``report_every``.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    optimizer = make_optimizer(recipe)
    graphdef, state = init_state(model, optimizer)
    train_step = make_train_step(graphdef, optimizer, recipe, dtype)
    done, seen = 0, 0
    for phase in recipe.phases:
        started, start_step = time.perf_counter(), done
        for batch in _on_device(batches_of(phase, done, recipe.steps(phase))):
            mode = phase.mode_of(done)
            state, metrics = train_step(state, batch, mode=mode)
            done += 1
            seen += batch["loss_weights"].size
            # Two steps in a row, so that a phase of two modes shows both.
            if done % report_every <= 1 or done == recipe.total_steps:
                values = {name: float(value) for name, value in metrics.items()}
                if not np.isfinite(values["loss"]):
                    raise FloatingPointError(f"loss={values['loss']} at step {done}: lower peak_learning_rate")
                rate = (done - start_step) * recipe.batch_tokens / (time.perf_counter() - started)
                report(
                    {"step": done, "tokens": seen, "seq_len": phase.seq_len, "mode": mode, "tokens_per_s": rate}
                    | values
                )
    return nnx.merge(graphdef, state.params), state
