"""A text's selections by one forward pass, and what decode over few slots would have to fetch for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from sparda_jax.forward import forward
from sparda_jax.generate import Runner
from sparda_jax.pallas_kernels.backend import Backend
from sparda_jax.pallas_kernels.record_copy import unpack_plan
from sparda_jax.pallas_kernels.residency import Residency, empty_residency, plan_residency


@functools.partial(jax.jit, static_argnames=("graphdef", "mode", "max_len"), donate_argnames="cache")
def _chunk(graphdef, state, cache, tokens, num_new, *, mode, max_len):
    ways = {"mode": mode, "decode": False, "max_len": max_len}
    _, cache, trace = forward(nnx.merge(graphdef, state), cache, tokens, num_new, jnp.ones(1, bool), **ways)
    # Each layer has one, since the text is longer than all selected blocks.
    return cache, jnp.stack([ids for ids in trace.selected if ids is not None])[:, 0]


def selections(runner: Runner, tokens: Int[np.ndarray, "tokens"]) -> Int[np.ndarray, "layers kv_heads tokens selected"]:
    """The block ids of every token, ascending, -1 padded, as prefill selects them and decode would.

    Args:
        runner: the model, in a mode that selects the same way in prefill and decode.
        tokens: more than all selected blocks hold, and no more than its ``max_model_len``.

    Raises:
        ValueError: the text is too short or too long.
    """
    selected = runner.config.sparse.num_selected_blocks * runner.config.sparse.block_size
    if not selected < len(tokens) <= runner.max_model_len:
        raise ValueError(f"tokens={len(tokens)} must be more than {selected}, and at most {runner.max_model_len}")
    capacity = runner.capacity_for(len(tokens))
    graphdef, state = nnx.split(runner.model)
    cache, pieces, start = runner.new_cache(1, capacity), [], 0
    while start < len(tokens):
        chunk = runner.chunk_for(1, len(tokens) - start, capacity)
        piece = tokens[start : start + chunk]
        padded = np.zeros((1, chunk), np.int32)
        padded[0, : len(piece)] = piece
        num_new = jnp.array([len(piece)], jnp.int32)
        ways = {"mode": runner.mode, "max_len": runner.max_model_len}
        cache, selected = _chunk(graphdef, state, cache, jnp.asarray(padded), num_new, **ways)
        pieces.append(np.asarray(selected)[:, :, : len(piece)])
        start += chunk
    return np.concatenate(pieces, axis=2)


def replay(
    selected: Int[np.ndarray, "layers kv_heads tokens width"], slots: int, block_size: int
) -> Int[np.ndarray, "layers kv_heads tokens"]:
    """Records that each decode step would copy from the host, one step a token from the first on.

    Args:
        selected: block ids of consecutive tokens from position 0 on, ascending, -1 padded.
        slots: of each layer and KV head, at least ``width``. They are empty at the beginning. The policy is that of
            `plan_residency`, CLOCK; a token's own block takes a slot without a copy, and every other one is written
            back, as `DecodeLanes` does it.
        block_size: tokens of a block.

    Raises:
        ValueError: fewer slots than a step attends to.
    """
    tokens, width = selected.shape[2:]
    if slots < width:
        raise ValueError(f"slots={slots} must hold the {width} blocks of a step")
    wanted = jnp.asarray(selected.transpose(2, 0, 1, 3), jnp.int32)
    own = jnp.arange(tokens, dtype=jnp.int32) // block_size
    copies = _replay(wanted, own, slots=slots, blocks=-(-tokens // block_size))
    return np.asarray(copies).transpose(1, 2, 0)


@functools.partial(jax.jit, static_argnames=("slots", "blocks"))
def _replay(
    wanted: Int[Array, "tokens layers kv_heads width"], own: Int[Array, "tokens"], *, slots: int, blocks: int
) -> Int[Array, "tokens layers kv_heads"]:
    """Every layer is a lane of the same tables: lanes have ranges of slots of their own."""
    _, layers, kv_heads, _ = wanted.shape
    tables = empty_residency(
        base=jnp.arange(layers) * slots,
        count=jnp.full(layers, slots),
        kv_heads=kv_heads,
        max_blocks=blocks,
        num_slots=layers * slots,
    )
    block_table = jnp.zeros((layers, blocks), jnp.int32)  # which records are copied does not matter, only how many

    def step(tables: Residency, now: tuple[Array, Array]) -> tuple[Residency, Array]:
        tail = jnp.full(layers, now[1])
        tables, _, plan = plan_residency(tables, now[0], block_table, tail, tail, backend=Backend.REFERENCE)
        return tables, unpack_plan(plan, layers * kv_heads)[0].reshape(layers, kv_heads)

    return jax.lax.scan(step, tables, (wanted, own))[1]
