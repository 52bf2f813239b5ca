"""The frozen base's pass: every layer's gradient on its own, documents on their own, padding without effect."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax.model import Decoder, Projections, rope_tables
from sparda_jax.pallas_kernels.block_selection import block_mask
from sparda_jax.pallas_kernels.sparse_attention import masked_attention
from sparda_jax.selection import group_heads
from sparda_jax.train._rows import check_packing
from sparda_jax.train.data import Batch
from sparda_jax.train.forecast import fresh_weights, predict
from sparda_jax.train.forward import ForwardPass, LayerSums
from sparda_jax.train.loss import Objective, forecast_loss
from sparda_jax.train.teacher import route
from tests.train.support import forward_pass, make_config, make_mesh, make_rows, random_corpus, tiny_model


def learn(forward: ForwardPass, weights: np.ndarray, batch: Batch) -> tuple[np.ndarray, LayerSums]:
    zeros = forward.everywhere((jnp.zeros_like(weights), LayerSums.zeros(len(weights))))
    gradient, sums = forward.learn(jnp.asarray(weights), forward.on_devices(batch), *zeros)
    return np.asarray(gradient), sums


def plain_losses(weights: jax.Array, batch: Batch, objective: Objective) -> jax.Array:
    """Sums of the loss by layer: one plain pass of the decoder that autodiff sees whole."""
    model = tiny_model()
    config, sparse = model.config, model.config.sparse
    positions, valid = jnp.asarray(batch.positions), jnp.asarray(batch.segments > 0)
    cos, sin = rope_tables(config, positions)
    losses, seen = [], None

    def attend(projections: Projections) -> jax.Array:
        nonlocal seen
        assert projections.normed is not None
        normed = projections.normed if seen is None else seen
        assert normed is not None
        student = predict(weights[len(losses)], normed, positions, config)
        q = group_heads(projections.q, config)
        parts = forecast_loss(student, q, projections.k, positions, valid, sparse, objective=objective)
        losses.append(parts.loss)
        seen = projections.normed
        ids = route(q, projections.k, positions, valid, sparse)
        length = positions.shape[1]
        allowed = jnp.repeat(block_mask(ids, length // sparse.block_size), sparse.block_size, axis=-1)
        allowed &= jnp.arange(length) <= jnp.arange(length)[:, None]
        k, v = (jnp.swapaxes(x, 1, 2) for x in (projections.k, projections.v))
        return masked_attention(q, k, v, allowed, jnp.ones(k.shape[:3], bool)).reshape(projections.q.shape)

    x = model.embed(jnp.asarray(batch.tokens))
    for layer in model.layers:
        x = layer(x, cos, sin, attend)
    return jnp.stack(losses)


@pytest.fixture(scope="module")
def batch() -> Batch:
    """A row of two documents, and a row of one and padding."""
    batch = make_rows(make_config(), tiny_model(), random_corpus((200, 250, 300))).batch(0)
    assert sorted(batch.segments.max(axis=1)) == [1, 2]
    return batch


def test_batches_are_packed_as_the_loss_wants_them(batch: Batch) -> None:
    check_packing(batch.positions, batch.segments > 0, tiny_model().config.sparse)


@pytest.mark.parametrize("objective", Objective)
def test_losses_and_gradients_are_those_of_one_plain_pass(batch: Batch, objective: Objective) -> None:
    weights = fresh_weights(tiny_model().config, 3)
    gradient, sums = learn(forward_pass(objective=objective), weights, batch)
    losses = plain_losses(jnp.asarray(weights), batch, objective)
    jacobian = jax.jacrev(plain_losses)(jnp.asarray(weights), batch, objective)
    np.testing.assert_allclose(sums.loss, losses, rtol=1e-5)
    assert (np.asarray(sums.pairs) == 2 * (batch.segments > 0).sum()).all()
    assert (np.asarray(sums.weight == sums.pairs) == (objective is not Objective.BLOCKS)).all()
    scale = np.abs(jacobian).max(axis=(2, 3))
    for layer in range(2):
        assert scale[layer, layer] > 1e-3
        # A layer's loss reaches its own entry and no other.
        assert scale[layer, 1 - layer] == 0
        np.testing.assert_allclose(gradient[layer], jacobian[layer, layer], rtol=0, atol=1e-5 * scale[layer, layer])


def test_measuring_gives_the_same_sums(batch: Batch) -> None:
    forward, weights = forward_pass(), fresh_weights(tiny_model().config, 3)
    _, sums = learn(forward, weights, batch)
    zeros = forward.everywhere(LayerSums.zeros(2))
    measured = forward.measure(jnp.asarray(weights), forward.on_devices(batch), zeros)
    assert (np.asarray(measured.quality.teacher_blocks) > 0).all()
    # Only validation compares with the selector and replays a cache.
    assert (np.asarray(measured.quality.selector_blocks) > 0).all()
    assert (np.asarray(measured.cache.hits) > 0).all()
    measured = dataclasses.replace(measured, quality=measured.quality.without_selector(), cache=sums.cache)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), measured, sums)


def test_a_document_gives_what_it_gives_alone(batch: Batch) -> None:
    """The documents of the batch, a row each, have the loss, the gradient and the recall of the packed rows."""
    forward, weights = forward_pass(), fresh_weights(tiny_model().config, 3)
    together, sums = learn(forward, weights, batch)
    documents = [(row, segment) for row in range(2) for segment in range(1, 1 + int(batch.segments[row].max()))]
    alone, alone_sums = np.zeros_like(together), LayerSums.zeros(2)
    for row, segment in documents:
        here = batch.segments[row] == segment
        single = Batch(**{name: np.zeros((2, 512), np.int32) for name in ("tokens", "positions", "segments")})
        single.tokens[0, : here.sum()] = batch.tokens[row, here]
        single.positions[0, : here.sum()] = np.arange(here.sum())
        single.segments[0, : here.sum()] = 1
        part, part_sums = learn(forward, weights, single)
        alone, alone_sums = alone + part, jax.tree.map(jnp.add, alone_sums, part_sums)
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5 * np.abs(together).max())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sums, alone_sums)


def test_what_padding_holds_does_not_matter(batch: Batch) -> None:
    weights = fresh_weights(tiny_model().config, 3)
    other = dataclasses.replace(batch, tokens=np.where(batch.segments == 0, 5, batch.tokens).astype(np.int32))
    found, expected = (learn(forward_pass(), weights, b) for b in (other, batch))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_forecast_that_the_base_carries_is_not_used(batch: Batch) -> None:
    """The same base with Forecast columns in its projections gives the same numbers."""
    base = tiny_model()
    carrying = Decoder(base.config, has_forecast=True, dtype=jnp.float32, rngs=nnx.Rngs(1))
    for source, target in zip(base.layers, carrying.layers, strict=True):
        columns = source.self_attn.qkvf_proj.kernel[...]
        whole = target.self_attn.qkvf_proj.kernel
        whole[...] = whole[...].at[:, : columns.shape[1]].set(columns)
        for name in ("input_layernorm", "post_attention_layernorm", "mlp"):
            setattr(target, name, getattr(source, name))
        target.self_attn.o_proj = source.self_attn.o_proj
    carrying.embed_tokens = base.embed_tokens
    weights = fresh_weights(base.config, 3)
    expected, expected_sums = learn(forward_pass(), weights, batch)
    found, sums = learn(ForwardPass(carrying, make_mesh()), weights, batch)
    np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_layers_share_their_programs() -> None:
    forward = ForwardPass(tiny_model(layers=3), make_mesh())
    batch = make_rows(make_config(), tiny_model(layers=3), random_corpus()).batch(0)
    learn(forward, fresh_weights(forward.config, 3), batch)
    programs = [forward._learn, *forward._project.values(), *forward._advance.values()]
    assert [program._cache_size() for program in programs] == [1, 1, 1]
