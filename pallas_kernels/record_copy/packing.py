"""Packed records: a byte for each number and a scale for each row, so that a record takes half the bytes of bf16.

A packed record of rows R and head_dim D is ``[R / 4 + ceil(R / D), D]`` words of 32 bits, one contiguous piece that a
single copy moves: byte j of word (i, d) is number (i + j R / 4, d), and the R scales follow in float32, as they would
lie in a row of R words. With 128 rows of 128 that is 16 KiB and 512 bytes.

Words rather than bytes, since every backend shifts and masks 32 bits, while none takes float32 scales out of a row of
bytes; and quarters of the rows rather than neighbouring numbers, since a kernel then makes rows out of rows: a thread
has the same columns before and after, and one scale for all of them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from sparda_jax.pallas_kernels.record_copy.codes import Code, code_of, decode, encode, magnitude, scales


def packed_rows(rows: int, head_dim: int) -> int:
    """Rows of words of a packed record.

    Raises:
        ValueError: the rows can't be divided by 4.
    """
    if rows % 4:
        raise ValueError(f"rows={rows} can't be packed: give a multiple of 4.")
    return rows // 4 + -(-rows // head_dim)


def pack_records(
    records: Float[Array, "*batch rows head_dim"], code: Code
) -> Shaped[Array, "*batch packed_rows head_dim"]:
    """The packed records, in the dtype that tells their code. A row with a value that is not finite becomes NaN."""
    *batch, rows, head_dim = records.shape
    x = records.astype(jnp.float32)
    scale, inverse = scales(jnp.max(magnitude(x), axis=-1), code)
    quarters = encode(x, jnp.broadcast_to(inverse[..., None], x.shape), code).reshape(*batch, 4, rows // 4, head_dim)
    words = quarters[..., 0, :, :]
    for byte in range(1, 4):
        words = words | (quarters[..., byte, :, :] << 8 * byte)
    spare = (packed_rows(rows, head_dim) - rows // 4) * head_dim - rows
    tail = jnp.pad(jax.lax.bitcast_convert_type(scale, jnp.int32), [(0, 0)] * len(batch) + [(0, spare)])
    packed = jnp.concatenate([words, tail.reshape(*batch, -1, head_dim)], axis=-2)
    return jax.lax.bitcast_convert_type(packed, code.words)


def unpack_records(
    packed: Shaped[Array, "*batch packed_rows head_dim"], rows: int, dtype: jnp.dtype
) -> Float[Array, "*batch rows head_dim"]:
    """The records that `pack_records` was given, up to half a scale in each number (fp8: 1/16 of it, or 2^-10 scales).

    Args:
        packed: of a dtype of `Code.words`.
        rows: of a record.
        dtype: of the result.
    """
    batch = packed.shape[:-2]
    code = code_of(packed.dtype)
    if code is None:
        raise ValueError(f"packed records are {packed.dtype}: they must be int32 or uint32.")
    words = jax.lax.bitcast_convert_type(packed, jnp.int32)
    tail = words[..., rows // 4 :, :].reshape(*batch, -1)[..., :rows]
    scale = jax.lax.bitcast_convert_type(tail, jnp.float32) * code.unit
    quarters = [decode(words[..., : rows // 4, :], byte, code) for byte in range(4)]
    return (jnp.concatenate(quarters, axis=-2) * scale[..., None]).astype(dtype)
