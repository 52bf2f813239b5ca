"""Residency of one (lane, KV head) as a textbook tells it: a hand that walks slot by slot. Plain Python, slow."""


class Clock:
    """The slots of one lane and head: ``blocks[i]`` lies in slot i of the range, None if it is empty."""

    def __init__(self, count: int) -> None:
        self.blocks: list[int | None] = [None] * count
        self.bits = [0] * count
        self.hand = 0

    def step(self, wanted: list[int], query_block: int, written: int) -> tuple[list[int | None], list[tuple[int, int]]]:
        """Wants blocks. Returns their slots (None: found none), and the (block, slot) pairs to copy."""
        for i, block in enumerate(self.blocks):
            if block in wanted:
                self.bits[i] = 1
        slots: list[int | None] = []
        copies = []
        for block in wanted:
            if block in self.blocks:
                slots.append(self.blocks.index(block))
                continue
            victim = self._find_victim(wanted, written)
            slots.append(victim)
            if victim is not None:
                self.blocks[victim] = block
                self.bits[victim] = 1
                if block != query_block:
                    copies.append((block, victim))
        return slots, copies

    def _find_victim(self, wanted: list[int], written: int) -> int | None:
        """Walks from the hand until a slot may go; the hand stays put if two rounds show that none may."""
        start = self.hand
        for _ in range(2 * len(self.blocks)):
            i = self.hand
            self.hand = (i + 1) % len(self.blocks)
            block = self.blocks[i]
            if block is None:
                return i
            if block in wanted or block >= written:
                continue
            if self.bits[i] == 0:
                return i
            self.bits[i] = 0
        self.hand = start
        return None
