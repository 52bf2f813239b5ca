"""Other designs of the Forecast and its loss (docs/semantics.md section 11.9) against slow plain definitions."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.foresight import ForecastDesign
from sparda_jax.pallas_kernels.block_selection import bits_to_mask
from sparda_jax.selection import group_heads
from sparda_jax.train.activations import CachedForward
from sparda_jax.train.forecast import fresh_weights, predict, query_weights
from sparda_jax.train.forward import ForwardPass, LayerSums
from sparda_jax.train.loss import LossParts, Objective, Teacher, forecast_loss
from tests.train.loss_cases import SMALL, Document, drawn, packed
from tests.train.loss_oracle import Grid, Trace, _keys_of, _select, _softmax, trace
from tests.train.support import make_config, make_mesh, make_rows, tiny_model

LENGTH = 150


def coarse(document: Document, traced: Trace, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """[H, T, windows] of the teacher on the deployed grid, and the blocks [H, T, blocks] that it supervises."""
    scores, supervised = np.zeros_like(traced.aligned), np.zeros_like(traced.supervised)
    ends = grid.kernel_stride * np.arange(scores.shape[-1]) + grid.kernel_size - 1
    for head, query in np.ndindex(*scores.shape[:2]):
        for q in document.q[query, head]:
            logits = traced.compressed[head] @ q / np.sqrt(len(q))
            scores[head, query] += _softmax(logits, ends <= query)
        ids, forced = _select(scores[head, query], query, supervised.shape[-1], grid)
        supervised[head, query, [b for b in ids if b not in forced]] = True
    return scores, supervised


def plain_loss(
    student: jax.Array, traced: Trace, target: np.ndarray, supervised: np.ndarray, objective: Objective, grid: Grid
) -> jax.Array:
    """The mean divergence, pair by pair; ``student`` is [T, H, heads, D]."""
    total = jnp.zeros(())
    for head, query in np.ndindex(*target.shape[:2]):
        keys = _keys_of(supervised[head, query], target.shape[-1], grid)
        if not len(keys) or not target[head, query, keys].sum():
            continue
        begun = grid.kernel_stride * np.arange(target.shape[-1]) <= query
        logits = traced.compressed[head] @ student[query, head].T / np.sqrt(student.shape[-1])
        p = jax.nn.softmax(jnp.where(begun[:, None], logits, -1e30), axis=0).mean(axis=1)
        t = target[head, query] / target[head, query].sum()
        if objective is Objective.CHOSEN:
            t, p = t[keys] / t[keys].sum(), p[keys] / p[keys].sum()
        else:
            others = np.setdiff1d(np.arange(len(t)), keys)
            t, p = np.append(t[keys], t[others].sum()), jnp.append(p[keys], p[others].sum())
        total += jnp.sum(jnp.where(t > 0, t * (jnp.log(np.where(t > 0, t, 1)) - jnp.log(p)), 0))
    return total / target[..., 0].size


def with_heads(seed: int, heads: int) -> Document:
    """A document whose student has several heads for each KV head."""
    document = drawn(seed, LENGTH)
    student = np.random.default_rng(seed).normal(size=(LENGTH, 2 * heads, 8))
    return Document(student=student, q=document.q, k=document.k)


def ours(document: Document, objective: Objective, teacher: Teacher) -> tuple[float, np.ndarray, LossParts]:
    first = Document(student=document.k, q=document.q, k=document.k)
    arrays = packed([first]).arrays[1:]

    def loss(student: jax.Array) -> tuple[jax.Array, LossParts]:
        parts = forecast_loss(student, *arrays, SMALL, objective=objective, teacher=teacher, chunk=64, key_tile=64)
        return parts.loss / parts.weight, parts

    student = jnp.asarray(document.student[None], jnp.float32)
    (value, parts), gradient = jax.value_and_grad(loss, has_aux=True)(student)
    return float(value), np.asarray(gradient[0], np.float64), parts


@pytest.mark.parametrize(
    ("heads", "objective", "teacher"),
    [
        (1, Objective.CHOSEN, Teacher.FINE),
        (1, Objective.PUBLISHED, Teacher.COARSE),
        (3, Objective.PUBLISHED, Teacher.FINE),
    ],
)
def test_loss_and_gradient_are_those_of_the_definition(heads: int, objective: Objective, teacher: Teacher) -> None:
    document = with_heads(50 + heads, heads)
    traced = trace(document.student[:, ::heads], document.q, document.k, SMALL)
    target, supervised = traced.aligned, traced.supervised
    if teacher is Teacher.COARSE:
        target, supervised = coarse(document, traced, SMALL)
    with jax.enable_x64(True):
        student = jnp.asarray(document.student.reshape(LENGTH, 2, heads, 8))
        slow = jax.value_and_grad(plain_loss)(student, traced, target, supervised, objective, SMALL)
        expected, slope = float(slow[0]), np.asarray(slow[1]).reshape(LENGTH, -1, 8)
    value, gradient, parts = ours(document, objective, teacher)
    assert expected > 0.02
    np.testing.assert_allclose(value, expected, rtol=3e-6)
    assert np.linalg.norm(gradient - slope) < 5e-6 * np.linalg.norm(slope)
    # What the base attends to, and what quality compares with, stay those of the fine teacher.
    blocks = np.asarray(bits_to_mask(parts.blocks, supervised.shape[-1]))[0]
    for head, query in np.ndindex(2, LENGTH):
        assert np.flatnonzero(blocks[head, query]).tolist() == traced.selected[head][query]


def test_equal_heads_are_one_head() -> None:
    one = drawn(60, LENGTH)
    two = Document(student=np.repeat(one.student, 2, axis=1), q=one.q, k=one.k)
    value, gradient, parts = ours(one, Objective.BLOCKS, Teacher.FINE)
    doubled, slopes, both = ours(two, Objective.BLOCKS, Teacher.FINE)
    np.testing.assert_allclose(doubled, value, rtol=1e-6)
    np.testing.assert_allclose(slopes.reshape(LENGTH, 2, 2, 8).sum(axis=2), gradient, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(both.student_blocks, parts.student_blocks)


def test_heads_that_are_the_group_choose_as_the_selector() -> None:
    document = drawn(61, LENGTH)
    same = Document(student=document.q.reshape(LENGTH, -1, 8), q=document.q, k=document.k)
    _, _, parts = ours(same, Objective.PUBLISHED, Teacher.FINE)
    assert parts.quality.selector_hits == parts.quality.selector_blocks > 0


def test_what_does_not_fit_is_refused() -> None:
    document = drawn(62, LENGTH)
    with pytest.raises(ValueError, match="teacher=fine"):
        ours(document, Objective.BLOCKS, Teacher.COARSE)
    three = Document(student=document.k[:, [0, 1, 1]], q=document.q, k=document.k)
    with pytest.raises(ValueError, match="3 heads"):
        ours(three, Objective.PUBLISHED, Teacher.FINE)


def test_two_layers_ahead(tmp_path: Path) -> None:
    """Gradients of a joint pass, plainly from layer ``l - 2``; and from kept activations."""
    model, design = tiny_model(layers=4), ForecastDesign(heads_per_group=2, lookahead=2)
    config = model.config
    batch = make_rows(make_config(), model).batch(0)
    weights = jnp.asarray(fresh_weights(config, 5, design))
    assert weights.shape == (4, 32, 64)

    def learn(forward: ForwardPass) -> tuple[jax.Array, LayerSums]:
        zeros = forward.everywhere((jnp.zeros_like(weights), LayerSums.zeros(4)))
        return forward.learn(weights, forward.on_devices(batch), *zeros)

    forward = ForwardPass(model, make_mesh(), design=design)
    gradient, sums = learn(forward)
    kept_gradient, kept = learn(CachedForward(model, make_mesh(), tmp_path, (0, 1, 2, 3), design=design))
    np.testing.assert_array_equal(kept_gradient, gradient)
    np.testing.assert_array_equal(kept.loss, sums.loss)

    rows = forward.on_devices(batch)
    x, inputs = forward.embed(rows), []
    for layer, source in enumerate((0, 0, 0, 1)):
        projected = forward.project(layer, x, rows)
        inputs.append(projected.normed)

        def loss(weight: jax.Array, source: int = source, projected=projected) -> tuple[jax.Array, LossParts]:
            student = predict(weight, inputs[source], rows.positions, config)
            q = group_heads(projected.q, config)
            parts = forecast_loss(student, q, projected.k, rows.positions, rows.valid, config.sparse)
            return parts.loss, parts

        (value, parts), slope = jax.value_and_grad(loss, has_aux=True)(weights[layer])
        np.testing.assert_allclose(sums.loss[layer], value, rtol=1e-6)
        np.testing.assert_allclose(gradient[layer], slope, rtol=0, atol=1e-5 * np.abs(slope).max())
        if layer < 3:
            x = forward.advance(layer, x, projected, parts.blocks)


def test_starting_queries_of_several_heads_average_shares_of_the_group() -> None:
    model = tiny_model(layers=3)
    config = model.config
    one = query_weights(model)
    two = query_weights(model, ForecastDesign(heads_per_group=2)).reshape(3, 32, 2, 2, 16)
    np.testing.assert_allclose(two.mean(axis=3), one.reshape(3, 32, 2, 16), rtol=0, atol=1e-6)
    four = query_weights(model, ForecastDesign(heads_per_group=4)).reshape(3, 32, 2, 4, 16)
    np.testing.assert_array_equal(four[:, :, :, :2], two)  # a group has two queries, which come twice
    np.testing.assert_array_equal(four[:, :, :, 2:], two)
    far = query_weights(model, ForecastDesign(lookahead=2))
    np.testing.assert_array_equal(far[:2], one[:2])
    norms = [np.asarray(model.layers[layer].input_layernorm.weight[...]) for layer in (0, 1)]
    np.testing.assert_allclose(far[2], one[2] * (norms[1] / norms[0])[:, None], rtol=1e-6)
    assert config.group_size == 2
