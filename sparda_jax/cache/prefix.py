"""The prefix cache: finished blocks are found again by their content, until their place is needed."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sparda_jax.cache.blocks import BlockAllocator
from sparda_jax.config import SparseConfig


def regime(block_index: int, is_sparse: bool, sparse: SparseConfig) -> int:
    """How the tokens of a block attend, as far as their keys and values can tell.

    Args:
        block_index: place of the block in its sequence.
        is_sparse: the request selects blocks; False: it is shorter than ``dense_len`` and reads them all.
        sparse: its ``num_selected_blocks`` is what a selection can hold.

    Returns:
        0: a selection holds every block up to this one, so both read the same; 1: reads all; 2: reads a selection.
    """
    if block_index < sparse.num_selected_blocks:
        return 0
    return 2 if is_sparse else 1


class KeyChain:
    """The content keys of the full blocks of one growing sequence.

    ``key[i] = H(key[i - 1] || regime of each token || tokens as little-endian int32)`` and ``key[-1] = H(salt)``, with
    16-byte BLAKE2b as H. So equal keys mean equal blocks after equal prefixes that were attended to alike. The regime
    is each token's own, since a request may reach ``dense_len`` in the middle of a block.

    Args:
        salt: names all else that keys and values depend on: the weights, the mode, the options of both.
        sparse: gives the size of a block, and what `regime` needs.

    Attributes:
        keys: one for each full block so far, in order.
    """

    def __init__(self, *, salt: bytes, sparse: SparseConfig):
        self.keys: list[bytes] = []
        self._sparse = sparse
        self._last = _hash(salt)
        self._tokens = bytearray()
        self._selects = bytearray()  # a 0 or 1 for each of these tokens

    def extend(self, tokens: Sequence[int] | Int[np.ndarray, "tokens"], is_sparse: bool) -> None:
        """Appends tokens that all attend to everything, or (``is_sparse``) all to a selection."""
        self._tokens += np.asarray(tokens, "<i4").tobytes()
        self._selects += bytes([bool(is_sparse)]) * len(tokens)
        self._add_keys()

    def append(self, token: int, is_sparse: bool) -> None:
        """The same for one token, as decode brings them: without the cost of an array."""
        self._tokens += token.to_bytes(4, "little", signed=True)
        self._selects.append(is_sparse)
        if len(self._selects) == self._sparse.block_size:
            self._add_keys()

    def _add_keys(self) -> None:
        size = self._sparse.block_size
        full = len(self._selects) // size * size
        for start in range(0, full, size):
            end = start + size
            byte = bytes(regime(len(self.keys), choice, self._sparse) for choice in (False, True))
            regimes = self._selects[start:end].translate(byte.ljust(256))
            self._last = _hash(self._last + regimes + self._tokens[4 * start : 4 * end])
            self.keys.append(self._last)
        del self._tokens[: 4 * full], self._selects[:full]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class PrefixBlocks(BlockAllocator):
    """An allocator whose published blocks stay findable after their last user, until `take` needs their place.

    A published block without users is **cached**. The one that was used least recently makes room first, and of one
    sequence the last block first: a tail can't be found without its head. A block with a user never makes room.

    Args:
        num_blocks: blocks of the pool.
    """

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out: those that hold nothing, and the cached ones."""
        return super().num_free + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Published blocks without users."""
        return len(self._cached)

    def publish(self, block: int, key: bytes) -> None:
        """A used block holds its final content from now on, in the host pool too, and can be found under ``key``.

        Sequences publish from their first block on. Where another block has the key already, that one stays.

        Raises:
            ValueError: the block is not in use, or was published under another key; nothing is changed.
        """
        self.check_used([block])
        if self._key_of.get(block, key) != key:
            raise ValueError(f"block {block} is published under another key: its content must not change while in use")
        self._key_of[block] = key
        self._block_of.setdefault(key, block)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known run of ``keys`` from the first on; each gets one more user."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._cached.pop(block, None)
            self._users[block] += 1
            found.append(block)
        return found

    def forget(self) -> None:
        """Empties all cached blocks; those with users stay published."""
        while self._cached:
            self._free.append(self._empty_oldest())

    def _next_free(self) -> int:
        return super()._next_free() if self._free else self._empty_oldest()

    def _empty_oldest(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def _last_user_left(self, block: int) -> None:
        key = self._key_of.get(block)
        if key is None:
            super()._last_user_left(block)
            return
        found = self._block_of.setdefault(key, block)
        if found == block:
            self._cached[block] = None
            return
        # Twins: two sequences computed this content. One is kept, and is as recent as this use, which its tail shares.
        del self._key_of[block]
        super()._last_user_left(block)
        if found in self._cached:
            self._cached.move_to_end(found)
