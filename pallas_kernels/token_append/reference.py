"""The definition of the token append in plain jnp."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def finish_window(
    pages: Float[Array, "num_blocks kv_heads windows_per_block head_dim"],
    slots: Float[Array, "slots rows head_dim"],
    k: Float[Array, "batch kv_heads head_dim"],
    slot_of_block: Int[Array, "batch kv_heads blocks"],
    block_table: Int[Array, "batch blocks"],
    position: Int[Array, "batch"],
    *,
    kernel_size: int,
    kernel_stride: int,
) -> Float[Array, "num_blocks kv_heads windows_per_block head_dim"]:
    """The pages with the mean of each window that ends at a new token; see `token_append.finish_window`."""
    batch, kv_heads = k.shape[:2]
    block_size, windows_per_block = slots.shape[1] // 2, pages.shape[2]
    lane, head = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[:, None]
    complete = (position >= kernel_size - 1) & ((position + 1) % kernel_stride == 0)
    earlier = jnp.maximum(position[:, None] - jnp.arange(kernel_size - 1, 0, -1), 0)[:, None]
    slot = slot_of_block[lane, head, earlier // block_size]
    rows = slots[slot, earlier % block_size]
    window = jnp.concatenate([rows, k[:, :, None]], axis=2)
    mean = jnp.mean(window.astype(jnp.float32), axis=2).astype(k.dtype)
    # Window j is entry (j + 1) % 4 of page (j + 1) // 4, and here j + 1 = (position + 1) / stride - 1.
    entry = (position + 1) // kernel_stride - 1
    page = block_table[jnp.arange(batch), jnp.maximum(entry, 0) // windows_per_block]
    page = jnp.where(complete, page, pages.shape[0])  # an index behind the end: the scatter drops it
    entry = (entry % windows_per_block)[:, None]
    return pages.at[page[:, None], jnp.arange(kv_heads), entry].set(mean, mode="drop")


def write_token(
    slots: Float[Array, "slots rows head_dim"],
    k: Float[Array, "batch kv_heads head_dim"],
    v: Float[Array, "batch kv_heads head_dim"],
    slot_of_block: Int[Array, "batch kv_heads blocks"],
    position: Int[Array, "batch"],
) -> Float[Array, "slots rows head_dim"]:
    """The slots with each new token's rows; see `token_append.write_token`."""
    batch, kv_heads = k.shape[:2]
    block_size = slots.shape[1] // 2
    lane, head = jnp.arange(batch)[:, None], jnp.arange(kv_heads)
    slot = slot_of_block[lane, head, jnp.maximum(position, 0)[:, None] // block_size]
    slot = jnp.where((position[:, None] >= 0) & (slot >= 0), slot, slots.shape[0])
    row = (position % block_size)[:, None]
    return slots.at[slot, row].set(k, mode="drop").at[slot, row + block_size].set(v, mode="drop")
