"""The training step and loop of the bundled model."""

import dataclasses
import functools
import math
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


def learning_rate(recipe: Recipe, step: int, *, fresh_at: int = 0) -> float:
    """Of step ``step``, counted from 0: linear from 0 while the optimiser is fresh, and a cosine down to the end.

    Args:
        fresh_at: the step that began with an optimiser that had seen nothing.
    """
    warmup = min(recipe.warmup_steps, recipe.total_steps // 2)
    done = min(max(step - warmup, 0) / max(recipe.total_steps - warmup, 1), 1.0)
    span = recipe.peak_learning_rate - recipe.final_learning_rate
    rate = recipe.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * done))
    return rate * min(1.0, (step - fresh_at) / max(warmup, 1))


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW with clipping, up to the learning rate, which the step multiplies; matrices decay, norms do not."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.max_grad_norm),
        optax.scale_by_adam(b2=recipe.beta2),
        optax.add_decayed_weights(recipe.weight_decay, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
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
    routing_weight: float | Array | None,
    foresight_weight: float | Array | None,
    dtype: jnp.dtype,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Weighted cross entropy plus the losses of routing.py that have a weight; the parts apart as metrics."""
    model = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype), params))
    tokens, weights = batch["tokens"], batch["loss_weights"]
    value_weight = LossWeights().value
    queries, valid = sample_queries(weights, value_weight, key)
    routing: list[Float[Array, ""]] = []
    foresight: list[Float[Array, ""]] = []

    def observe(projections: Projections, forecast: Array | None) -> None:
        teacher = RoutingTeacher.of(model.config, projections, queries, valid)
        if routing_weight is not None:
            routing.append(routing_loss(model.config, projections, teacher))
        if foresight_weight is not None and forecast is not None:
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
        if losses and weight is not None:
            metrics[name] = sum(losses, start=jnp.float32(0))
            loss = loss + weight * metrics[name]
    return loss, metrics


def make_train_step(
    graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, dtype: jnp.dtype
) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
    """The jitted step ``(state, batch, scalars, mode) -> (state, metrics)``; the state is donated.

    ``scalars`` are `step_scalars`: arguments, so that stages and lengths of a run share a compiled program.
    """

    @functools.partial(jax.jit, static_argnames=("mode",), donate_argnums=(0,))
    def step(
        state: TrainState, batch: dict[str, Array], scalars: dict[str, Array], *, mode: Mode
    ) -> tuple[TrainState, dict[str, Array]]:
        def loss_fn(params):
            return loss_and_metrics(
                graphdef,
                params,
                batch,
                key,
                mode=mode,
                routing_weight=scalars.get("routing"),
                foresight_weight=scalars.get("foresight"),
                dtype=dtype,
            )

        key = jax.random.fold_in(jax.random.key(scalars["seed"]), state.step)
        (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        directions, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda x: -scalars["learning_rate"] * x, directions)
        params = cast(nnx.State, optax.apply_updates(state.params, updates))
        metrics |= {"grad_norm": optax.tree.norm(grads)}
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), metrics

    return step


def step_scalars(recipe: Recipe, step: int, *, fresh_at: int = 0) -> dict[str, Array]:
    """What changes from step to step or stage to stage; the weight of a loss that has none is left out."""
    weights = {"routing": recipe.routing_weight, "foresight": recipe.foresight_weight}
    scalars = {name: jnp.float32(weight) for name, weight in weights.items() if weight}
    rate = learning_rate(recipe, step, fresh_at=fresh_at)
    return scalars | {"learning_rate": jnp.float32(rate), "seed": jnp.uint32(recipe.seed)}


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


def _goes_on(state: TrainState) -> bool:
    return True


def train(
    model: Decoder,
    recipe: Recipe,
    batches_of: Callable[[Phase, int, int], Iterable[Batch]],
    *,
    dtype: jnp.dtype,
    report: Callable[[dict[str, Any]], None],
    report_every: int = 50,
    resumed: TrainState | None = None,
    fresh_at: int = 0,
    goes_on: Callable[[TrainState], bool] = _goes_on,
) -> tuple[Decoder, TrainState]:
    """Runs all phases, or what is left of them.

    Args:
        model: float32 weights to start from; they stay as they are.
        batches_of: (phase, first step, number of steps) -> that many batches of ``tokens [batch, seq_len + 1]`` and
            ``loss_weights [batch, seq_len]``.
        dtype: of activations and gradients; parameters and the optimiser stay float32.
        report: gets a dictionary of metrics of two neighbouring steps every ``report_every``.
        resumed: the state to go on from, in place of the model's weights; it is donated.
        fresh_at: see `learning_rate`.
        goes_on: asked after each step, with the state; False ends the run there.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    optimizer = make_optimizer(recipe)
    graphdef, state = init_state(model, optimizer)
    state = state if resumed is None else resumed
    train_step = make_train_step(graphdef, optimizer, dtype)
    done, end = int(state.step), 0
    for phase in recipe.phases:
        end += recipe.steps(phase)
        started, start_step = time.perf_counter(), done
        for batch in _on_device(batches_of(phase, done, end - done)) if done < end else ():
            mode = phase.mode_of(done)
            state, metrics = train_step(state, batch, step_scalars(recipe, done, fresh_at=fresh_at), mode=mode)
            done += 1
            # Two steps in a row, so that a phase of two modes shows both.
            if done % report_every <= 1 or done == recipe.total_steps:
                values = {name: float(value) for name, value in metrics.items()}
                if not np.isfinite(values["loss"]):
                    raise FloatingPointError(f"loss={values['loss']} at step {done}: lower peak_learning_rate")
                rate = (done - start_step) * recipe.batch_tokens / (time.perf_counter() - started)
                seen = done * recipe.batch_tokens
                report(
                    {"step": done, "tokens": seen, "seq_len": phase.seq_len, "mode": mode, "tokens_per_s": rate}
                    | values
                )
            if not goes_on(state):
                return nnx.merge(graphdef, state.params), state
    return nnx.merge(graphdef, state.params), state
