"""The training step: its attention is the serving one, its losses are what they say, and it learns."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.cache import KVCache
from sparda_jax.config import ModelConfig
from sparda_jax.forward import forward
from sparda_jax.model import Decoder, Projections
from sparda_jax.pretrain.attention import foresee_blocks, score_blocks
from sparda_jax.pretrain.batches import Batch, LossWeights
from sparda_jax.pretrain.recipe import ADAPTATION, FORESIGHT, PRETRAINING, REFINEMENT, Phase, Recipe, hf_config
from sparda_jax.pretrain.routing import RoutingTeacher, foresight_loss, routing_loss, sample_queries
from sparda_jax.pretrain.trainer import forward_logits, loss_and_metrics, train
from sparda_jax.selection import Mode, group_heads

LENGTH = 1024


@pytest.fixture(scope="module")
def model() -> Decoder:
    """The bundled geometry made small: 6 of 16 blocks are selected, so that selection bites."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    description: dict[str, Any] = {**hf_config(128, 1, [2]), **small}
    description["sparse_config"] = description["sparse_config"] | {"window_size": 64, "topk": 5}
    config = ModelConfig.from_hf(description)
    return Decoder(config, has_forecast=True, dtype=jnp.float32, rngs=nnx.Rngs(3))


@pytest.mark.parametrize("mode", [Mode.DENSE, Mode.SPARSE, Mode.SPARDA])
def test_training_computes_what_serving_computes(model: Decoder, mode: Mode) -> None:
    tokens = jax.random.randint(jax.random.key(0), (1, LENGTH), 0, 128)
    found = jax.jit(forward_logits, static_argnums=2)(model, tokens, mode)
    cache = KVCache.empty(model.config, 1, LENGTH, jnp.float32)
    x, _, trace = forward(model, cache, tokens, jnp.array([LENGTH]), jnp.array([True]), mode=mode, decode=False)
    np.testing.assert_allclose(found, model.logits(x), atol=2e-5)
    assert bool((trace.blocks_read < trace.blocks_visible).all()) == (mode is not Mode.DENSE)


def _projections(config: ModelConfig, q: jax.Array, k: jax.Array) -> Projections:
    return Projections(normed=q, q=q, k=k, v=k, q_future=None, q_curr=None)


def _routing(config: ModelConfig, q: jax.Array, k: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
    projections = _projections(config, q, k)
    return routing_loss(config, projections, RoutingTeacher.of(config, projections, positions, valid))


@pytest.mark.parametrize("foresees", [False, True])
def test_the_losses_are_the_divergence_over_free_blocks(model: Decoder, foresees: bool) -> None:
    """Against the formula of the module's docstring, in float64 and by loops."""
    config, sparse = model.config, model.config.sparse
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(1, LENGTH, config.num_heads, config.head_dim)) * 2, jnp.float32)
    k = jnp.asarray(rng.normal(size=(1, LENGTH, config.num_kv_heads, config.head_dim)), jnp.float32)
    positions = jnp.array([[700, 1023, 100]])
    valid = jnp.array([[True, True, False]])
    grouped = group_heads(q, config)
    if foresees:
        forecast = jnp.asarray(rng.normal(size=k.shape), jnp.float32)
        projections = _projections(config, q, k)
        teacher = RoutingTeacher.of(config, projections, positions, valid)
        found = float(foresight_loss(config, forecast, projections, teacher))
        scores = foresee_blocks(config, forecast[:, positions[0]], k, positions)
        scores = jnp.exp(scores / config.head_dim**0.5)
    else:
        found = float(_routing(config, q, k, positions, valid))
        scores = score_blocks(config, grouped[:, positions[0]], k, positions)
    total = 0.0
    for i, r in enumerate((700, 1023)):
        free = range(sparse.init_blocks, r // sparse.block_size - sparse.local_blocks)
        for head in range(config.num_kv_heads):
            logits = np.asarray(k[0, : r + 1, head], np.float64) @ np.asarray(grouped[0, r, head], np.float64).T
            weights = np.exp(logits / config.head_dim**0.5)
            attention = (weights / weights.sum(0)).mean(1)
            a = np.array([attention[64 * b : 64 * b + 64].sum() for b in free])
            p = np.asarray(scores[0, head, i], np.float64)[list(free)]
            a_rest, p_rest = a / a.sum(), p / p.sum()
            total += a.sum() * (a_rest * np.log(a_rest / p_rest)).sum()
    assert found == pytest.approx(total / (2 * config.num_kv_heads), rel=1e-3)
    assert found > 0.01


def test_routing_loss_teaches_the_score_of_the_attended_block(model: Decoder) -> None:
    """A query attends to one far block; a step against the gradient raises that block's score, not the others'."""
    config = model.config
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.normal(size=(1, LENGTH, config.num_heads, config.head_dim)), jnp.float32)
    k = jnp.asarray(rng.normal(size=(1, LENGTH, config.num_kv_heads, config.head_dim)) * 0.1, jnp.float32)
    k = k.at[0, 5 * 64 + 20].set(q[0, 1000, :: config.group_size] * 4)
    q = q.at[0, 1000].set(jnp.repeat(q[0, 1000, :: config.group_size], config.group_size, axis=0))
    at, valid = jnp.array([[1000]]), jnp.array([[True]])
    gradient = jax.grad(lambda k: _routing(config, q, k, at, valid))(k)
    grouped = group_heads(q, config)[:, 1000:1001]
    before, after = (score_blocks(config, grouped, x, at)[0, :, 0, 1:13] for x in (k, k - 5 * gradient))
    changed = after / after.sum(-1, keepdims=True) - before / before.sum(-1, keepdims=True)
    assert (jnp.argmax(changed, axis=-1) == 4).all()
    assert (changed[:, 4] > 0).all()


def test_the_foresight_loss_changes_the_layer_before(model: Decoder) -> None:
    """Its gradient reaches the Forecast and what made the Forecast's input; selection itself passes none."""
    tokens = jax.random.randint(jax.random.key(4), (1, LENGTH + 1), 0, 128)
    batch = {"tokens": tokens, "loss_weights": jnp.zeros((1, LENGTH)).at[0, 900:].set(LossWeights().value)}
    graphdef, params = nnx.split(model)

    @jax.jit
    def gradients(params: nnx.State) -> nnx.State:
        def loss(params: nnx.State) -> jax.Array:
            metrics = loss_and_metrics(
                graphdef,
                params,
                batch,
                jax.random.key(5),
                mode=Mode.DENSE,
                routing_weight=None,
                foresight_weight=1.0,
                dtype=jnp.dtype(jnp.float32),
            )[1]
            return metrics["foresight_loss"]

        return jax.grad(loss)(params)

    layers = nnx.merge(graphdef, gradients(params)).layers
    config = model.config
    forecast = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    first, last = (layer.self_attn.qkvf_proj.kernel[...] for layer in layers)
    assert jnp.abs(first[:, forecast:]).max() > 0  # q_future and q_curr
    assert jnp.abs(last[:, forecast:]).max() == 0  # nothing reads it
    # The last layer is selected for by what the first one sees: its norm, and the embeddings.
    assert jnp.abs(layers[0].input_layernorm.weight[...]).max() > 0
    queries = config.num_heads * config.head_dim
    assert jnp.abs(last[:, :queries]).max() == 0  # the teacher's queries
    assert jnp.abs(last[:, queries : queries + config.num_kv_heads * config.head_dim]).max() > 0  # the keys


def test_sampled_queries_are_heavy_ones() -> None:
    weights = jnp.zeros((2, 200)).at[0, jnp.array([7, 90])].set(8.0).at[1].set(2.0)
    positions, valid = sample_queries(weights, 8.0, jax.random.key(0))
    assert valid.sum(axis=1).tolist() == [2, 0]
    assert sorted(positions[0][valid[0]].tolist()) == [7, 90]


def _copying(phase: Phase, start: int, steps: int) -> Iterator[Batch]:
    """Windows that repeat a short random text: easy to learn."""
    for step in range(start, start + steps):
        rng = np.random.default_rng(step)
        text = rng.integers(0, 8, (2, 16))
        tokens = np.tile(text, phase.seq_len // 16 + 1)[:, : phase.seq_len + 1].astype(np.int32)
        weights = np.full((2, phase.seq_len), LossWeights().text, np.float32)
        weights[:, -32:] = LossWeights().value
        yield Batch(tokens=tokens, loss_weights=weights)


def test_training_learns_in_both_kinds_of_steps_and_reports(model: Decoder) -> None:
    phases = (
        Phase(seq_len=256, tokens=24 * 512 / 1e6),
        Phase(seq_len=512, tokens=8 * 1024 / 1e6, modes=(Mode.SPARDA, Mode.SPARSE)),
    )
    recipe = Recipe(phases=phases[:1], batch_tokens=512, peak_learning_rate=1e-2, warmup_steps=4, routing_weight=0.1)
    lines: list[dict] = []
    _, state = train(model, recipe, _copying, dtype=jnp.float32, report=lines.append, report_every=8)
    assert [line["step"] for line in lines] == [1, 8, 9, 16, 17, 24]
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"]
    assert lines[-1]["tokens"] == 24 * 512
    assert int(state.step) == 24
    both: list[dict] = []
    recipe = dataclasses.replace(recipe, phases=phases[1:], batch_tokens=1024, foresight_weight=0.1)
    train(model, recipe, _copying, dtype=jnp.float32, report=both.append, report_every=4)
    assert {line["mode"] for line in both} == {Mode.SPARDA, Mode.SPARSE}
    assert all({"routing_loss", "foresight_loss"} <= line.keys() for line in both)


def test_a_loss_that_is_not_finite_ends_the_run(model: Decoder) -> None:
    graphdef, params = nnx.split(model)
    broken = nnx.merge(graphdef, jax.tree.map(lambda x: x * jnp.nan, params))
    recipe = Recipe(phases=(Phase(seq_len=256, tokens=512 / 1e6),), batch_tokens=512)
    with pytest.raises(FloatingPointError, match="peak_learning_rate"):
        train(broken, recipe, _copying, dtype=jnp.float32, report=lambda line: None)


def test_the_recipes_are_those_of_the_model_card() -> None:
    recipes = (PRETRAINING, ADAPTATION, REFINEMENT, FORESIGHT)
    assert [sum(phase.tokens for phase in recipe.phases) for recipe in recipes] == [580, 118, 314, 160]
    assert all(65536 % phase.seq_len == 0 for recipe in recipes for phase in recipe.phases)
    halved = PRETRAINING.scaled(0.5)
    assert halved.total_steps == pytest.approx(PRETRAINING.total_steps / 2, abs=4)
