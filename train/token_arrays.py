"""Arrays of tokens that are larger than memory, or lie in many files, and are read by parts."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import Int64, Integer, UInt8


class TokenArray(Protocol):
    """What a corpus needs of its tokens; a flat array of numpy, and its memory map, are such."""

    @property
    def size(self) -> int:
        """Tokens in all."""
        ...

    def __getitem__(self, part: slice, /) -> Integer[np.ndarray, " part"]:
        """Tokens ``part.start .. part.stop - 1``, all of one document."""
        ...


class FileTokens:
    """Documents that lie somewhere in files, read from there by memory maps.

    Args:
        files: where they are.
        dtypes: of numbers, by code.
        starts: document i has the tokens ``starts[i] .. starts[i + 1] - 1``.
        file_numbers, offsets, codes: of each document: its file, its first byte there, and its dtype in ``dtypes``.
    """

    def __init__(
        self,
        files: Sequence[Path],
        dtypes: Sequence[str],
        starts: Int64[np.ndarray, " documents_plus_one"],
        file_numbers: Integer[np.ndarray, " documents"],
        offsets: Int64[np.ndarray, " documents"],
        codes: UInt8[np.ndarray, " documents"],
    ) -> None:
        self._files, self._dtypes = files, [np.dtype(name) for name in dtypes]
        self._starts, self._file_numbers, self._offsets, self._codes = starts, file_numbers, offsets, codes
        self._maps: dict[int, np.ndarray] = {}

    @property
    def size(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, part: slice) -> Integer[np.ndarray, " part"]:
        document = int(np.searchsorted(self._starts, part.start, side="right")) - 1
        number, dtype = int(self._file_numbers[document]), self._dtypes[self._codes[document]]
        if number not in self._maps:
            self._maps[number] = np.memmap(self._files[number], np.uint8, "r").view(np.ndarray)
        first = int(self._offsets[document]) + (int(part.start) - int(self._starts[document])) * dtype.itemsize
        return np.frombuffer(self._maps[number], dtype, int(part.stop) - int(part.start), first)


class JoinedTokens:
    """Several arrays as one, in this order; a part lies in one of them."""

    def __init__(self, arrays: Sequence[TokenArray]) -> None:
        self._arrays = arrays
        self._starts = [0, *itertools.accumulate(array.size for array in arrays)]

    @property
    def size(self) -> int:
        return self._starts[-1]

    def __getitem__(self, part: slice) -> Integer[np.ndarray, " part"]:
        number = int(np.searchsorted(self._starts, part.start, side="right")) - 1
        start = self._starts[number]
        return self._arrays[number][part.start - start : part.stop - start]
