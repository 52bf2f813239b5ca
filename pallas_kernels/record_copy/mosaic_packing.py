"""Packing and unpacking of a record in shared memory, by a warpgroup of the Mosaic copy.

A warp has whole rows (or two at once, of 64 channels), four neighbouring numbers a thread: neither reads nor writes
meet in a bank of shared memory, and a row's scale is one number for all threads that have the row.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparda_jax.pallas_kernels.record_copy.codes import Code, code_of, decode, encode, magnitude, scales

HEAD_DIMS = (64, 128)
"""Of records that are packed here: a warp's 32 times four numbers are whole rows."""


def change_between(source: jax.Array, destination: jax.Array) -> Callable[..., None] | None:
    """What is done with a record on its way between two arrays, as ``change(from_ref, to_ref)``; None: nothing."""
    if source.dtype == destination.dtype:
        return None
    if code := code_of(source.dtype):
        return functools.partial(unpack, code=code)
    code = code_of(destination.dtype)
    assert code is not None
    return functools.partial(pack, code=code)


def _layout(head_dim: int):
    if head_dim == 128:
        return plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4,))), (-3,), (-2,), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((8, 64), (2, 64), (4,))), (-5,), (-3, -2), -1)


def _scales_of(words_ref, first: int, rows: int):
    """Where the scales of rows ``first`` to ``first + rows / 4`` are."""
    head_dim = words_ref.shape[1]
    return words_ref.at[rows // 4 + first // head_dim, pl.ds(first % head_dim, rows // 4)]


def unpack(words_ref, record_ref, code: Code) -> None:
    """Writes the record [rows, head_dim] of packed words."""
    rows, head_dim = record_ref.shape
    quarter, layout = rows // 4, _layout(head_dim)
    words = plgpu.load(words_ref.at[pl.ds(0, quarter)], layout=layout, optimized=False)
    words = lax.bitcast_convert_type(words, jnp.int32)
    for byte in range(4):
        own = plgpu.load(_scales_of(words_ref, byte * quarter, rows), layout=layout.reduce(1), optimized=False)
        scale = lax.bitcast_convert_type(own, jnp.float32) * code.unit
        numbers = decode(words, byte, code) * lax.broadcast_in_dim(scale, (quarter, head_dim), [0])
        record_ref[pl.ds(byte * quarter, quarter)] = numbers.astype(record_ref.dtype)


def pack(record_ref, words_ref, code: Code) -> None:
    """Writes the packed words of a record."""
    rows, head_dim = record_ref.shape
    quarter, layout = rows // 4, _layout(head_dim)
    words: jax.Array | None = None
    for byte in range(4):
        x = plgpu.load(record_ref.at[pl.ds(byte * quarter, quarter)], layout=layout, optimized=False)
        x = x.astype(jnp.float32)
        scale, inverse = scales(jnp.max(magnitude(x), axis=1), code)
        _scales_of(words_ref, byte * quarter, rows)[...] = lax.bitcast_convert_type(scale, words_ref.dtype)
        own = encode(x, lax.broadcast_in_dim(inverse, (quarter, head_dim), [0]), code) << (8 * byte)
        words = own if words is None else words | own
    assert words is not None
    words_ref[pl.ds(0, quarter)] = lax.bitcast_convert_type(words, words_ref.dtype)
