"""What prefill takes at least, and selections in which neighbouring tokens share as many blocks as wanted."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from sparda_jax.config import ModelConfig
from sparda_jax.pallas_kernels.block_selection import mask_to_bits
from sparda_jax.selection import Mode

FLOPS_PER_SECOND = 780e12
"""What large bf16 products reach on an H200 (989e12 by the data sheet)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of a prompt, both of a multiplication and addition counted.

    Attributes:
        products: maps with weights: all but the logits, of which a chunk needs one row.
        selection: scores of compressed keys; for InfLLM-V2 once, though it takes them twice.
        attention: scores and values of the blocks that are attended to.
    """

    products: float
    selection: float
    attention: float

    @property
    def seconds(self) -> float:
        """At the speed of large products."""
        return (self.products + self.selection + self.attention) / FLOPS_PER_SECOND


def work(config: ModelConfig, mode: Mode, begin: int, end: int) -> Work:
    """What the tokens from position ``begin`` up to ``end`` of one sequence take, all layers together."""
    sparse, rows = config.sparse, end - begin
    heads = 2 * config.num_heads + (3 if mode.needs_forecast else 2) * config.num_kv_heads
    weights = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    everything = _keys_up_to(end, end) - _keys_up_to(begin, end)
    selection, attended = 0.0, everything
    if mode is not Mode.DENSE:
        queries = config.num_kv_heads if mode is Mode.SPARDA else config.num_heads
        selection = 2 * queries * config.head_dim * everything / sparse.kernel_stride
        # Of its own block a token reads half, on average.
        most = sparse.block_size * (sparse.num_selected_blocks - 0.5)
        attended = _keys_up_to(end, most) - _keys_up_to(begin, most)
    return Work(
        products=config.num_layers * 2 * weights * rows,
        selection=config.num_layers * selection,
        attention=config.num_layers * 4 * config.num_heads * config.head_dim * attended,
    )


def _keys_up_to(end: int, most: float) -> float:
    """Keys that the first ``end`` tokens attend to, each to no more than ``most``."""
    first = min(end, most)
    return first * (first + 1) / 2 + (end - first) * most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """Selections in which a token shares ``percent`` of its free blocks with the token before; see `prefill.Choose`.

    The blocks that compete are cut into as many ranges as there are free places. A token takes a block of each, and
    changes it after as many tokens as that takes, one range after the other.
    """

    config: ModelConfig
    percent: float

    def __call__(
        self, positions: Int[Array, "batch q_len"], bits: UInt32[Array, "batch kv_heads q_len words"]
    ) -> UInt32[Array, "batch kv_heads q_len words"]:
        """The selection is replaced where there is a choice, and decides whether a token is one at all."""
        sparse = self.config.sparse
        free = sparse.num_selected_blocks - sparse.init_blocks - sparse.local_blocks - 1
        run = max(1, round(100 / (100 - self.percent))) if self.percent < 100 else 1 << 30
        own = positions[:, None, :, None] // sparse.block_size
        last = own - sparse.local_blocks
        width = jnp.maximum((last - sparse.init_blocks) // free, 1)
        place, head = jnp.arange(free), jnp.arange(bits.shape[1])[None, :, None, None]
        turn = (positions[:, None, :, None] + place * run // free) // run
        mixed = (turn * free + place).astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + (head * 40503).astype(jnp.uint32)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x846CA68B)
        block = sparse.init_blocks + place * width + ((mixed >> 12) % width.astype(jnp.uint32)).astype(jnp.int32)
        word = jnp.arange(bits.shape[3])
        bit = jnp.uint32(1) << (block % 32).astype(jnp.uint32)
        taken = jnp.sum(jnp.where(block[..., None] // 32 == word, bit[..., None], 0), axis=3, dtype=jnp.uint32)
        ids = jnp.arange(bits.shape[3] * 32)
        forced = (ids < sparse.init_blocks) | ((ids >= last) & (ids <= own))
        chosen = taken | mask_to_bits(forced)
        # Without a use of its result XLA would drop the selection. A token has the first block, padding has none.
        return jnp.where((own < sparse.num_selected_blocks) | (bits[..., :1] == 0), bits, chosen)
