"""What a micro-step has to compute, counted once however it is computed, and what a GPU could do in the time."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from sparda_jax.config import ModelConfig

# Dense bf16 by the data sheets, in FLOP/s: the first name that a device's kind contains.
_PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations, both of a multiplication and addition counted.

    Attributes:
        products: the base's maps with weights, up to the last layer's keys.
        attention: the base's scores and values of the blocks that it attends to.
        teacher: scores of every query head with every fine key twice: for the denominators and for the values.
        student: the Forecast's map, its scores of compressed keys, and the gradients of both.
    """

    products: float
    attention: float
    teacher: float
    student: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.teacher + self.student

    def __add__(self, other: Self) -> Self:
        values = (a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        return type(self)(**dict(zip((f.name for f in dataclasses.fields(self)), values, strict=True)))

    @classmethod
    def of(cls, config: ModelConfig, positions: Int[np.ndarray, "tokens"]) -> Self:
        """Of the forward pass and the loss over tokens at these positions of their documents."""
        sparse, tokens = config.sparse, positions.size
        heads, outputs = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        finished = config.num_layers - 1
        project = config.hidden_size * (heads + 2 * outputs)
        finish = config.hidden_size * (heads + 3 * config.intermediate_size)
        seen = np.sum(positions + 1.0)
        # Of its own block a token reads half, on average.
        attended = np.sum(np.minimum(positions + 1.0, sparse.block_size * (sparse.num_selected_blocks - 0.5)))
        windows = np.sum(positions // sparse.kernel_stride + 1.0)
        return cls(
            products=2.0 * tokens * (config.num_layers * project + finished * finish),
            attention=float(4 * finished * heads * attended),
            teacher=float(4 * config.num_layers * heads * seen),
            student=float(4 * config.num_layers * outputs * (config.hidden_size * tokens + windows)),
        )


def peak_flops(devices: Sequence[Any]) -> float | None:
    """What the devices do a second by their data sheets, all together; None for one that is not known."""
    peaks = [next((peak for name, peak in _PEAKS.items() if name in d.device_kind), None) for d in devices]
    return None if None in peaks else float(sum(peak for peak in peaks if peak))
