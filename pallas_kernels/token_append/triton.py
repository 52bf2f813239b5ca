"""The token append as one Triton-lowered kernel, one program for each (lane, KV head).

A program reads and writes slots and pages of its own lane alone, so nothing has to wait for another one, and it reads
the window before it writes the token.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from sparda_jax.pallas_kernels.backend import interpreting


def takes(k: jax.Array, kernel_size: int) -> bool:
    """Whether the kernel takes such keys: Triton knows powers of two only."""
    return all(size == pl.next_power_of_2(size) for size in (k.shape[2], kernel_size))


def finish_window(pages, slots, k, slot_of_block, block_table, position, *, kernel_size, kernel_stride):
    """See `sparda_jax.pallas_kernels.token_append.finish_window`."""
    body = functools.partial(_finish_body, kernel_size=kernel_size, kernel_stride=kernel_stride)
    return _call(body, (pages,), (slots, k, slot_of_block, block_table, position), k, "finish_window")[0]


def write_token(slots, k, v, slot_of_block, position):
    """See `sparda_jax.pallas_kernels.token_append.write_token`."""
    return _call(_write_body, (slots,), (k, v, slot_of_block, position), k, "write_token")[0]


def append_token(slots, pages, k, v, slot_of_block, block_table, position, after, *, kernel_size, kernel_stride):
    """See `sparda_jax.pallas_kernels.token_append.append_token`."""

    def body(_slots, _pages, k, v, slot_of_block, block_table, position, *rest):
        *_, slots, pages = rest
        _finish_body(
            _pages,
            slots,
            k,
            slot_of_block,
            block_table,
            position,
            pages,
            kernel_size=kernel_size,
            kernel_stride=kernel_stride,
        )
        _write_body(_slots, k, v, slot_of_block, position, slots)

    operands = (k, v, slot_of_block, block_table, position, *([] if after is None else [after]))
    return _call(body, (slots, pages), operands, k, "append_token")


def _call(body, updated, operands, k: jax.Array, name: str):
    """Runs a body over (lane, KV head), with ``updated`` as its first operands and, in place, its results."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        body,
        grid=k.shape[:2],
        in_specs=[anywhere] * (len(updated) + len(operands)),
        out_specs=[anywhere] * len(updated),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated],
        input_output_aliases={i: i for i in range(len(updated))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpreting(),
        name=name,
    )(*updated, *operands)


def _finish_body(_, slots, k, slot_of_block, block_table, position, pages, *, kernel_size, kernel_stride):
    lane, head = pl.program_id(0), pl.program_id(1)
    block_size, windows_per_block = slots.shape[1] // 2, pages.shape[2]
    position = position[lane]
    complete = (position >= kernel_size - 1) & ((position + 1) % kernel_stride == 0)
    row, channel = jnp.arange(kernel_size), jnp.arange(k.shape[2])
    is_new = row == kernel_size - 1
    earlier = jnp.maximum(position - kernel_size + 1 + row, 0)
    stored = complete & ~is_new
    slot = plgpu.load(slot_of_block.at[lane, head, earlier // block_size], mask=stored, other=0)
    place = slots.at[slot[:, None], (earlier % block_size)[:, None], channel[None, :]]
    rows = plgpu.load(place, mask=jnp.broadcast_to(stored[:, None], (kernel_size, k.shape[2])), other=0)
    window = jnp.where(is_new[:, None], k[lane, head, channel][None, :], rows).astype(jnp.float32)
    mean = (window.sum(axis=0) / kernel_size).astype(k.dtype)
    entry = jnp.maximum((position + 1) // kernel_stride - 1, 0)
    # Where nothing is stored, the index points behind the array: the interpreter would write the old value there.
    page = jnp.where(complete, block_table[lane, entry // windows_per_block], pages.shape[0])
    here = jnp.broadcast_to(complete, channel.shape)
    plgpu.store(pages.at[page, head, entry % windows_per_block, channel], mean, mask=here)


def _write_body(_, k, v, slot_of_block, position, slots):
    lane, head = pl.program_id(0), pl.program_id(1)
    block_size, channel = slots.shape[1] // 2, jnp.arange(k.shape[2])
    position = position[lane]
    stored = jnp.maximum(position, 0)
    slot = slot_of_block[lane, head, stored // block_size]
    here = (position >= 0) & (slot >= 0)
    slot, row = jnp.where(here, slot, slots.shape[0]), stored % block_size
    here = jnp.broadcast_to(here, channel.shape)
    plgpu.store(slots.at[slot, row, channel], k[lane, head, channel], mask=here)
    plgpu.store(slots.at[slot, row + block_size, channel], v[lane, head, channel], mask=here)
