"""Records and pages: how a block's keys, values and compressed keys are laid out.

A **record** is one (layer, block, KV head): the block's K rows, then its V rows, contiguous. A **page** holds the
compressed keys that end in a block: window j is entry ``(j + 1) % 4`` of page ``(j + 1) // 4``. So both depend on
tokens up to the block's own end only, and every sequence with that prefix can share them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def to_records(
    k: Float[Array, "batch kv_heads capacity head_dim"],
    v: Float[Array, "batch kv_heads capacity head_dim"],
    block_size: int,
) -> Float[Array, "batch blocks kv_heads rows head_dim"]:
    """The records of contiguous keys and values; ``rows = 2 * block_size`` and ``capacity`` is whole blocks."""
    batch, kv_heads, capacity, head_dim = k.shape
    shape = (batch, kv_heads, capacity // block_size, block_size, head_dim)
    return jnp.swapaxes(jnp.concatenate([k.reshape(shape), v.reshape(shape)], axis=3), 1, 2)


def to_pages(
    compressed_k: Float[Array, "batch kv_heads windows head_dim"], windows_per_block: int
) -> Float[Array, "batch blocks kv_heads windows_per_block head_dim"]:
    """The pages of contiguous compressed keys; entry 0 of page 0 is no window and stays zero."""
    batch, kv_heads, windows, head_dim = compressed_k.shape
    entries = jnp.pad(compressed_k[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))
    entries = entries.reshape(batch, kv_heads, windows // windows_per_block, windows_per_block, head_dim)
    return jnp.swapaxes(entries, 1, 2)


def from_records(
    records: Float[Array, "batch blocks kv_heads rows head_dim"],
) -> tuple[Float[Array, "batch kv_heads capacity head_dim"], Float[Array, "batch kv_heads capacity head_dim"]]:
    """The contiguous keys and values of records: `to_records` undone."""
    batch, blocks, kv_heads, rows, head_dim = records.shape
    k, v = jnp.split(jnp.swapaxes(records, 1, 2), 2, axis=3)
    shape = (batch, kv_heads, blocks * rows // 2, head_dim)
    return k.reshape(shape), v.reshape(shape)


def from_pages(
    pages: Float[Array, "batch blocks kv_heads windows_per_block head_dim"],
) -> Float[Array, "batch kv_heads windows head_dim"]:
    """The contiguous compressed keys of pages: `to_pages` undone. The last window ends behind the pages and is zero."""
    batch, blocks, kv_heads, windows_per_block, head_dim = pages.shape
    entries = jnp.swapaxes(pages, 1, 2).reshape(batch, kv_heads, blocks * windows_per_block, head_dim)
    return jnp.pad(entries[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
