"""Which blocks of the host pool are in use: a free list with reference counts, on the Python side."""

from collections.abc import Sequence


class BlockAllocator:
    """Hands out the physical blocks of the pool.

    A block names the same place in every layer's pool and pages. It is free again when its last user gives it back.

    Args:
        num_blocks: blocks of the pool.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} must be at least 1")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` free blocks, each with one user.

        Raises:
            MemoryError: there are not that many; none is taken.
        """
        if count > self.num_free:
            raise MemoryError(
                f"{count} blocks asked for, {self.num_free} of {self.num_blocks} in the host pool are free: "
                "finish a request first, or make num_blocks larger"
            )
        taken = [self._next_free() for _ in range(count)]
        for block in taken:
            self._users[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more user for each of these blocks.

        Raises:
            ValueError: a block is free; no count is changed.
        """
        self.check_used(blocks)
        for block in blocks:
            self._users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One user less for each of these blocks of one sequence, which are listed in its order.

        Raises:
            ValueError: a block is free already; no count is changed.
        """
        self.check_used(blocks)
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._last_user_left(block)

    def check_used(self, blocks: Sequence[int]) -> None:
        """Checks that every one of these blocks has a user, and is named once.

        Raises:
            ValueError: one has none, is not of this pool, or is named twice.
        """
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self._users[block]:
                raise ValueError(f"block {block} is not in use (the pool has {self.num_blocks} blocks)")
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {list(blocks)} name one twice")

    def _next_free(self) -> int:
        return self._free.pop()

    def _last_user_left(self, block: int) -> None:
        self._free.append(block)
