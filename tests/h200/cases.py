"""Every decode operation in the shapes that it meets, for compiling: nothing here is ever run."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sparda_jax.pallas_kernels.block_selection import Scorer, select_blocks_decode
from sparda_jax.pallas_kernels.record_copy import fetch_records, write_back_records
from sparda_jax.pallas_kernels.residency import empty_residency, plan_residency
from sparda_jax.pallas_kernels.sparse_attention import sparse_attention_decode
from sparda_jax.pallas_kernels.token_append import append_token
from tests.h200.harness import pinned_host

BLOCK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """What decides the kernels' shapes.

    Attributes:
        width: blocks selected.
        blocks: the longest sequence's.
    """

    batch: int
    group: int = 16
    head_dim: int = 128
    width: int = 96
    blocks: int = 2048
    kv_heads: int = 2

    @property
    def segments(self) -> int:
        return self.batch * self.kv_heads

    @property
    def record(self) -> tuple[int, int]:
        return 2 * BLOCK, self.head_dim

    def bf16(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)


# MiniCPM4.1-8B alone and in a batch at 128K, and a small model.
GEOMETRIES = {
    "8b-1": Geometry(batch=1),
    "8b-16": Geometry(batch=16),
    "small-4": Geometry(batch=4, group=8, head_dim=64, width=32, blocks=192),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on one geometry.

    Attributes:
        call: takes ``args`` and the keyword ``backend``.
        donated: which of the arguments, if any, is updated in place.
        temporaries: bytes of intermediate results that it may need.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int | None = None
    temporaries: int = 1024


def select_forecast(g: Geometry) -> Case:
    # Two float32 scores a page; rows may be padded, to 2048 pages and a margin.
    padded = -(-g.blocks // 2048) * 2048 + 64
    return _select(g, Scorer.FORECAST, group=1, temporaries=2 * 4 * g.segments * padded + 1024)


def select_infllm(g: Geometry) -> Case:
    # Each head's weight of each compressed key, and what belongs to tiles.
    logits = 4 * g.segments * g.group * 4 * g.blocks
    return _select(g, Scorer.INFLLM, group=g.group, temporaries=2 * logits)


def _select(g: Geometry, scorer: Scorer, *, group: int, temporaries: int) -> Case:
    return Case(
        call=partial(select_blocks_decode, scorer=scorer, init_blocks=1, local_blocks=g.width // 3, width=g.width),
        args=(
            g.bf16(g.batch, g.kv_heads, group, g.head_dim),
            g.bf16(g.batch * g.blocks, g.kv_heads, 4, g.head_dim),
            g.int32(g.batch, g.blocks),
            *[g.int32(g.batch)] * 3,
        ),
        temporaries=temporaries,
    )


def plan(g: Geometry) -> Case:
    count = g.width + 32
    state = empty_residency(
        base=jnp.arange(g.batch) * count,
        count=jnp.full(g.batch, count),
        kv_heads=g.kv_heads,
        max_blocks=g.blocks,
        num_slots=g.batch * count,
    )
    wanted = g.int32(g.batch, g.kv_heads, g.width)
    return Case(
        call=plan_residency,
        args=(state, wanted, g.int32(g.batch, g.blocks), g.int32(g.batch), g.int32(g.batch)),
        donated=0,
    )


def attention(g: Geometry) -> Case:
    heads = (g.batch, g.kv_heads, g.group, g.head_dim)
    slots = g.bf16(g.segments * 128, *g.record)
    # At most one float32 partial result, with its peak and total, for every two listed records.
    parts = g.segments * g.width // 2
    return Case(
        call=sparse_attention_decode,
        args=(g.bf16(*heads), slots, g.int32(g.batch, g.kv_heads, g.width), g.int32(g.batch)),
        temporaries=parts * 16 * (g.head_dim + 2) * 4,
    )


def fetch(g: Geometry) -> Case:
    plan, pool, slots = _copied(g)
    return Case(call=partial(fetch_records, segments=g.segments), args=(plan, pool, slots), donated=2)


def write_back(g: Geometry) -> Case:
    plan, pool, slots = _copied(g)
    return Case(call=partial(write_back_records, segments=g.segments), args=(plan, slots, pool), donated=2)


def append(g: Geometry) -> Case:
    """Slots and pages as one argument, since both are updated in place."""
    cache = (g.bf16(g.segments * 128, *g.record), g.bf16(g.batch * g.blocks, g.kv_heads, 4, g.head_dim))
    row = g.bf16(g.batch, g.kv_heads, g.head_dim)
    tables = (g.int32(g.batch, g.kv_heads, g.blocks), g.int32(g.batch, g.blocks), g.int32(g.batch))

    def call(cache: tuple[jax.Array, jax.Array], *rest: jax.Array, backend: str) -> tuple[jax.Array, jax.Array]:
        return append_token(*cache, *rest, kernel_size=32, kernel_stride=16, backend=backend)

    return Case(call=call, args=(cache, row, row, *tables), donated=0)


def _copied(g: Geometry) -> tuple[jax.ShapeDtypeStruct, jax.Array, jax.ShapeDtypeStruct]:
    plan = g.int32(g.segments * (1 + 2 * g.width))
    return plan, pinned_host((256, *g.record), jnp.bfloat16), g.bf16(g.segments * 128, *g.record)


OPERATIONS = {
    "select_forecast": select_forecast,
    "select_infllm": select_infllm,
    "plan": plan,
    "attention": attention,
    "fetch": fetch,
    "write_back": write_back,
}
TRITON_OPERATIONS = {"append": append}
"""Those without a kernel of their own for Hopper."""
