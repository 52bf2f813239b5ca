"""TensorBoard's event files, written without TensorFlow: scalars are all that training has to show.

A record is its length (8 bytes), a checksum of these, the protobuf message ``Event``, and a checksum of that. An
``Event`` has the fields wall_time (1, double), step (2, int64), file_version (3, string) and summary (5) with values
(1) of tag (1, string) and simple_value (2, float).
"""

import functools
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class EventFile:
    """A new event file in a folder, which TensorBoard shows together with those of earlier processes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stream = (folder / f"events.out.tfevents.{time.time_ns()}.sparda").open("xb")
        self._put(_field(3, _BYTES, b"brain.Event:2"))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds scalars of one step."""
        values = b"".join(
            _field(1, _BYTES, _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, struct.pack("<f", value)))
            for tag, value in scalars.items()
        )
        self._put(_field(2, _VARINT, _varint(step)) + _field(5, _BYTES, values))
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()

    def _put(self, event: bytes) -> None:
        event = _field(1, _FIXED64, struct.pack("<d", time.time())) + event
        length = struct.pack("<Q", len(event))
        self._stream.write(length + _checksum(length) + event + _checksum(event))


def _field(number: int, kind: int, value: bytes) -> bytes:
    key = _varint(number << 3 | kind)
    return key + (_varint(len(value)) if kind == _BYTES else b"") + value


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


@functools.cache
def _table() -> tuple[int, ...]:
    """CRC-32C of every byte."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked as TFRecord files have it."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)
