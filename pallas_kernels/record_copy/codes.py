"""How a number becomes a byte of a packed record and back: int8 and fp8, with a scale per row.

All of it is 32-bit arithmetic that every backend has, on integers and on floats that are never subnormal, so that the
kernels need no conversion between types of different width. A byte stands in a word of 32 bits, see `packing`.
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_LARGEST = 3.4028235e38
_LEAST_PEAK = 2.0**-100
"""A row without a larger value counts as zeros: the inverse of its scale might not be finite."""


class Code(enum.StrEnum):
    """What a byte means."""

    INT8 = "int8"
    """-127 to 127."""
    FP8 = "fp8"
    """float8_e4m3fn, without its NaN."""

    @property
    def words(self) -> jnp.dtype:
        """The dtype of packed records, by which they are told apart: int8 lies in int32, fp8 in uint32."""
        return jnp.dtype(jnp.int32 if self is Code.INT8 else jnp.uint32)

    @property
    def peak(self) -> float:
        """The largest number that a byte can hold: what the largest value of a row becomes."""
        return 127.0 if self is Code.INT8 else 448.0

    @property
    def unit(self) -> float:
        """What the numbers of `decode` have to be multiplied with; a power of two, which is exact."""
        return 1.0 if self is Code.INT8 else 256.0


def code_of(dtype: jnp.dtype) -> Code | None:
    """The code of packed records of this dtype; None for records that are not packed."""
    return next((code for code in Code if code.words == dtype), None)


def magnitude(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The absolute value; infinity for what is not a number, so that a maximum finds it on every backend."""
    x = jnp.abs(x)
    return jnp.where(x <= _LARGEST, x, jnp.inf)


def scales(peak: Float[Array, "..."], code: Code) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """A row's scale, and what its values are multiplied with for `encode`.

    Args:
        peak: the largest `magnitude` of the row. Not finite: the scale is NaN, so that all of the row arrives as NaN.
    """
    usable = (peak >= _LEAST_PEAK) & (peak <= _LARGEST)
    scale = jnp.where(usable, peak * (1 / code.peak), jnp.where(peak <= _LARGEST, 0.0, jnp.nan))
    return scale, jnp.where(usable, code.peak / jnp.where(usable, peak, 1.0), 0.0)


def encode(x: Float[Array, "..."], inverse: Float[Array, "..."], code: Code) -> Int[Array, "..."]:
    """The bytes, 0 to 255, of float32 values, the nearest ones; of two equally near ones the even one.

    Args:
        x: the values.
        inverse: of `scales`, of the same shape. Where it is 0, so is the byte.
        code: what a byte means.
    """
    value = jnp.where(inverse > 0, x * inverse, 0.0)
    if code is Code.INT8:
        # At 1.5 * 2^23 neighbouring floats are 1 apart: the sum is rounded, and its lowest byte is the number.
        return _bits(value + 1.5 * 2.0**23) & 0xFF
    size, sign = jnp.abs(value), (_bits(value) >> 24) & 0x80
    bits = _bits(size)
    # Three bits of the mantissa stay, rounded; the exponent's bias is 7 in place of 127.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the numbers are 2^-9 apart, as floats are at 1.5 * 2^14.
    return jnp.where(size < 2.0**-6, _bits(size + 1.5 * 2.0**14) & 0xF, normal) | sign


def decode(words: Int[Array, "..."], byte: int, code: Code) -> Float[Array, "..."]:
    """What one byte of each word stands for, over `Code.unit`, in float32; exact.

    Args:
        words: int32.
        byte: which one, 0 the lowest.
        code: what it means.
    """
    if code is Code.INT8:
        # The bits of 2^23 + 128 + n, whose lowest byte is n with its sign turned.
        return _float(((words >> 8 * byte) & 0xFF) ^ 0x4B000080) - (2.0**23 + 128)
    # Exponent and mantissa to where a float has them, with a bias that makes 2^(e - 15) of it: 1/256 of the number.
    at = 20 - 8 * byte
    size = _float((((words << at) if at > 0 else (words >> -at)) & 0x07F00000) | (112 << 23))
    # Exponent 0 means 2^-6 * m / 8, and not 2^-7 * (1 + m / 8): twice that, less 2^-6.
    size = size + jnp.minimum(size - 2.0**-14, 0.0)
    return _float(_bits(size) | ((words << (24 - 8 * byte)) & -(2**31)))


def _bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Int[Array, "..."]) -> Float[Array, "..."]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
