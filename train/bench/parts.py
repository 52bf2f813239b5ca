"""The parts of a micro-step of Forecast training: one layer, a part at a time."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from sparda_jax.bench._report import Row
from sparda_jax.selection import group_heads
from sparda_jax.train.attention import attend
from sparda_jax.train.flops import Flops
from sparda_jax.train.forward import ForwardPass, LayerSums, Rows
from sparda_jax.train.teacher import route_bits

RUNS = 3
METHOD = (
    f"parts: one layer (the second), median of {RUNS} calls, each waited for; times all layers it is the part's share "
    "of a micro-step. The student is what the loss takes besides the teacher: the Forecast and its gradient, the "
    "divergence and the metrics; the teacher's blocks are chosen with it."
)


def seconds(step: Callable[[Any], Any], state: Any) -> tuple[float, Any]:
    """Of one call, each on what the one before returned; and what the last one returned."""
    state = jax.block_until_ready(step(state))
    runs = []
    for _ in range(RUNS):
        began = time.perf_counter()
        state = jax.block_until_ready(step(state))
        runs.append(time.perf_counter() - began)
    return statistics.median(runs), state


def parts(
    forward: ForwardPass, weights: jax.Array, rows: Rows, flops: Flops, *, row: Callable[..., Row]
) -> Iterator[Row]:
    """A row for each part of the second layer, in ms of a whole micro-step; for a mesh of one device.

    Args:
        row: makes one from a name, seconds and operations.
    """
    config = forward.config
    layers = config.num_layers
    x = forward.embed(rows)
    spent, projected = seconds(lambda _: forward.project(1, x, rows), None)
    share = 1 / (1 + 2 * config.num_kv_heads / config.num_heads)
    heads = config.hidden_size * config.num_heads * config.head_dim
    tokens = x.shape[0] * x.shape[1]
    project = 2 * tokens * layers * heads / share
    yield row("base: norm, queries, keys, values", layers * spent, project)

    def learn(state: tuple[jax.Array, jax.Array, LayerSums]) -> Any:
        return forward.learn_layer(1, weights, rows, projected.normed, projected, *state[1:])

    zeros = forward.everywhere((jnp.zeros_like(weights), LayerSums.zeros(layers)))
    whole, (blocks, _, _) = seconds(learn, (None, *zeros))
    grouped = jax.jit(functools.partial(group_heads, config=config))(projected.q)
    teach = jax.jit(functools.partial(route_bits, sparse=config.sparse))
    teacher, _ = seconds(lambda _: teach(grouped, projected.k, rows.positions, rows.valid), None)
    yield row("teacher", layers * teacher, flops.teacher)
    yield row("student", layers * (whole - teacher), flops.student)

    attention = jax.jit(functools.partial(attend, block_size=config.sparse.block_size))
    attended, _ = seconds(lambda _: attention(grouped, projected.k, projected.v, blocks), None)
    yield row("base: attention", (layers - 1) * attended, flops.attention)
    advanced, _ = seconds(lambda y: forward.advance(1, y, projected, blocks), x)
    yield row("base: output and MLP", (layers - 1) * (advanced - attended), flops.products - project)
