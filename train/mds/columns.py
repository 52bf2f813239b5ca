"""The values of a sample's columns: how each encoding lays its bytes out."""

import dataclasses
import math

import numpy as np

_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
# The low two bits of the byte before a shape say how wide its numbers are.
_SHAPE_DTYPES = ("u1", "<u2", "<u4", "<u8")
_NUMBERS = frozenset(_DTYPES.values())


class ColumnError(ValueError):
    """Bytes that are no value of the encoding; the message says what is wrong, the caller where."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayPlace:
    """Where the numbers of an array stand.

    Attributes:
        offset: bytes from the beginning of the file.
        dtype: little-endian.
        shape: of the array.
    """

    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Numbers in all."""
        return math.prod(self.shape)


def is_array(encoding: str) -> bool:
    """Whether `array_place` finds values of this encoding."""
    return encoding.split(":")[0] == "ndarray"


def array_place(encoding: str, data: np.ndarray, begin: int, end: int) -> ArrayPlace:
    """Finds the array that the bytes ``begin .. end - 1`` of a file encode.

    The dtype stands in the encoding or in a byte of its own, the shape in the encoding or behind a byte that says how
    many axes there are and how wide the numbers: ``ndarray:uint32:4,2``, ``ndarray:uint32`` or ``ndarray``.

    Args:
        encoding: see above.
        data: the file, as uint8.

    Raises:
        ColumnError: the encoding does not exist, or the bytes don't fit it.
    """
    _, _, described = encoding.partition(":")
    dtype_name, _, shape_text = described.partition(":")
    place = begin
    if not dtype_name:
        _need(place + 1 <= end, "no dtype")
        code = int(data[place])
        _need(code in _DTYPES, f"dtype number {code}, which does not exist")
        dtype_name, place = _DTYPES[code], place + 1
    _need(dtype_name in _NUMBERS, f"encoding {encoding!r}, whose dtype does not exist")
    dtype = np.dtype(dtype_name).newbyteorder("<")
    if shape_text:
        axes_text = shape_text.split(",")
        _need(all(axis.isdecimal() for axis in axes_text), f"encoding {encoding!r}, whose shape is no list of numbers")
        shape = tuple(map(int, axes_text))
    else:
        _need(place + 1 <= end, "no shape")
        axes, width = divmod(int(data[place]), 4)
        numbers = np.dtype(_SHAPE_DTYPES[width])
        place += 1
        _need(place + axes * numbers.itemsize <= end, "a shape that is cut off")
        shape = tuple(np.frombuffer(data, numbers, axes, place).tolist())
        place += axes * numbers.itemsize
    found = ArrayPlace(offset=place, dtype=dtype, shape=shape)
    needed = found.count * dtype.itemsize
    _need(needed == end - place, f"{end - place} bytes for an array {shape} of {dtype_name}, which takes {needed}")
    return found


def decode(encoding: str, data: np.ndarray, begin: int, end: int) -> np.ndarray | str | bytes | int | float:
    """The value that the bytes ``begin .. end - 1`` of a file encode; an array is a view of them.

    Raises:
        ColumnError: see `array_place`; or an encoding that holds no text and no numbers, such as an image.
    """
    if is_array(encoding):
        place = array_place(encoding, data, begin, end)
        return np.frombuffer(data, place.dtype, place.count, place.offset).reshape(place.shape)
    content = data[begin:end].tobytes()
    if encoding == "bytes":
        return content
    if encoding == "str":
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ColumnError(f"a text that is not valid UTF-8 ({error})") from error
    name = "int64" if encoding == "int" else encoding
    _need(name in _NUMBERS, f"encoding {encoding!r}, which is not read here; use str, bytes, numbers or ndarray")
    dtype = np.dtype(name).newbyteorder("<")
    _need(len(content) == dtype.itemsize, f"{len(content)} bytes for a {name}")
    return np.frombuffer(content, dtype)[0].item()


def _need(true: bool, otherwise: str) -> None:
    if not true:
        raise ColumnError(otherwise)
