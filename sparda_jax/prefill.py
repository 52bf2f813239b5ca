"""A prefill chunk on a GPU: blocks are selected as bits, and only selected ones are attended to.

Nothing as large as chunk times cache exists, so neither memory nor time depend on how long the cache may get.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from sparda_jax.cache import LayerCache
from sparda_jax.config import SparseConfig
from sparda_jax.decode_plan import Backends
from sparda_jax.pallas_kernels.backend import Backend, choose_backend
from sparda_jax.pallas_kernels.block_selection import (
    Scorer,
    bits_to_ids,
    choose_blocks,
    mask_to_bits,
    select_blocks_prefill,
)
from sparda_jax.pallas_kernels.block_selection.prefill import SCORE_BYTES
from sparda_jax.pallas_kernels.block_sparse_attention import block_sparse_attention_prefill

Choose = Callable[
    [Int[Array, "batch q_len"], UInt32[Array, "batch kv_heads q_len words"]],
    UInt32[Array, "batch kv_heads q_len words"],
]
"""For benchmarks: what is attended to in place of a selection, from the tokens' positions and the selection."""


def by_bits(backends: Backends) -> bool:
    """Whether chunks are computed so: where attention has a kernel."""
    return choose_backend(backends.block_sparse_attention, "block_sparse_attention") is not Backend.REFERENCE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """The tokens of a chunk: which they are, and how they attend.

    Attributes:
        start: position of each sequence's first token.
        num_new: how many of its tokens are real.
        sparse: False: the sequence attends to everything.
        config: widths of the selection.
        backends: of the kernels.
        choose: changes what is attended to.
    """

    start: Int[Array, "batch"]
    num_new: Int[Array, "batch"]
    sparse: Bool[Array, "batch"]
    config: SparseConfig
    backends: Backends
    choose: Choose | None = None

    def select(
        self, scorer: Scorer, queries: Float[Array, "batch q_len kv_heads group head_dim"], cache: LayerCache
    ) -> UInt32[Array, "batch kv_heads q_len words"]:
        """The blocks of every token, whether its sequence is sparse or not."""
        bits = select_blocks_prefill(
            queries,
            cache.compressed_k,
            self.start,
            self.num_new,
            scorer=scorer,
            init_blocks=self.config.init_blocks,
            local_blocks=self.config.local_blocks,
            num_selected=self.config.num_selected_blocks,
            backend=self.backends.block_selection,
        )
        if self.choose is None:
            return bits
        return self.choose(self.start[:, None] + jnp.arange(queries.shape[1]), bits)

    def newest(
        self, query_block: Int[Array, "batch q_len"], blocks: int, kv_heads: int
    ) -> UInt32[Array, "batch kv_heads q_len words"]:
        """The first ``init_blocks`` of every token and the newest, together as many as it may select."""
        ids, own = jnp.arange(blocks), query_block[..., None]
        recent = self.config.num_selected_blocks - self.config.init_blocks
        mask = (ids <= own) & ((ids < self.config.init_blocks) | (ids > own - recent))
        mask &= jnp.arange(query_block.shape[1])[:, None] < self.num_new[:, None, None]
        bits = mask_to_bits(mask)
        return jnp.broadcast_to(bits[:, None], (bits.shape[0], kv_heads, *bits.shape[1:]))

    def best(
        self,
        scores: Callable[[Int[Array, "batch rows"]], Float[Array, "batch kv_heads rows blocks"]],
        *,
        q_len: int,
        row_bytes: int,
    ) -> UInt32[Array, "batch kv_heads q_len words"]:
        """The blocks of every token by scores that need no keys.

        Args:
            scores: of the tokens at these positions, float32.
            q_len: tokens of the chunk, padding included.
            row_bytes: of one token's scores in all sequences; they are made for a part of the chunk at a time.
        """
        token = jnp.arange(q_len)
        positions = self.start[:, None] + token
        own = jnp.where(token < self.num_new[:, None], positions // self.config.block_size, -1)

        def part(rows: slice) -> UInt32[Array, "batch kv_heads rows words"]:
            found = scores(positions[:, rows])
            past = jnp.arange(found.shape[3]) <= own[:, None, rows, None]
            return choose_blocks(
                jnp.where(past, found, -jnp.inf),
                jnp.zeros_like(own[:, rows]),
                own[:, rows],
                init_blocks=self.config.init_blocks,
                local_blocks=self.config.local_blocks,
                num_selected=self.config.num_selected_blocks,
                backend=self.backends.block_selection,
            )

        step = max(1, SCORE_BYTES // row_bytes)
        return jnp.concatenate([part(slice(first, first + step)) for first in range(0, q_len, step)], axis=2)

    def attend(
        self,
        q: Float[Array, "batch q_len heads head_dim"],
        cache: LayerCache,
        bits: UInt32[Array, "batch kv_heads q_len words"] | None,
    ) -> Float[Array, "batch q_len heads head_dim"]:
        """Attention over the selected blocks, or over all where there is no selection or a sequence is dense."""
        batch, kv_heads, capacity, _ = cache.k.shape
        words = -(-capacity // (self.config.block_size * 32))
        every = jnp.full((batch, kv_heads, q.shape[1], words), 2**32 - 1, jnp.uint32)
        return block_sparse_attention_prefill(
            q,
            cache.k,
            cache.v,
            every if bits is None else jnp.where(self.sparse[:, None, None, None], bits, every),
            self.start,
            self.start + self.num_new,
            block_size=self.config.block_size,
            backend=self.backends.block_sparse_attention,
        )

    def ids(
        self, bits: UInt32[Array, "batch kv_heads q_len words"], blocks: int
    ) -> Int[Array, "batch kv_heads q_len k"]:
        """The selection as a trace has it."""
        return bits_to_ids(bits, min(self.config.num_selected_blocks, blocks))


def count_bits(bits: UInt32[Array, "batch kv_heads q_len words"]) -> Int[Array, "batch"]:
    """(token, KV head, block) triples that were selected."""
    return jnp.sum(lax.population_count(bits), axis=(1, 2, 3), dtype=jnp.int32)
