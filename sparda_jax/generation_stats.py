"""What requests have read, by phase and layer."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class PhaseStats:
    """What one phase of a request read: (token, KV head, block) triples.

    Attributes:
        tokens: tokens processed.
        blocks_read: per layer, the triples attended to.
        blocks_visible: the triples that a dense layer would have read.
    """

    tokens: int
    blocks_read: list[int]
    blocks_visible: int

    @property
    def read_fraction(self) -> float:
        """Blocks read over blocks visible, all layers together; 1 for a phase without tokens."""
        visible = self.blocks_visible * len(self.blocks_read)
        return sum(self.blocks_read) / visible if visible else 1.0

    def add(self, tokens: int, read: np.ndarray, visible: int) -> None:
        self.tokens += tokens
        self.blocks_read = [a + int(b) for a, b in zip(self.blocks_read, read, strict=True)]
        self.blocks_visible += visible


@dataclasses.dataclass
class GenerationStats:
    """Blocks read and visible of one request, per layer; ``return_stats=True`` returns it."""

    mode: str
    prefill: PhaseStats
    decode: PhaseStats

    def to_dict(self) -> dict:
        phases = {"prefill": self.prefill, "decode": self.decode}
        return {"mode": self.mode} | {
            name: dataclasses.asdict(phase) | {"read_fraction": phase.read_fraction} for name, phase in phases.items()
        }
