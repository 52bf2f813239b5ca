"""What a training run is, checked before anything is read."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from sparda_jax.config import ModelConfig
from sparda_jax.train.divergence import Objective
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.forecast import Start
from sparda_jax.train.packing import shortest_document


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _not_negative(value: float) -> bool:
    return math.isfinite(value) and value >= 0


_ALLOWED: dict[str, tuple[Callable[[float], bool], str]] = {
    "seq_len": (_positive, "it must be positive"),
    "batch_size": (_positive, "it must be at least 1"),
    "micro_batch_size": (_positive, "it must be at least 1"),
    "steps": (_positive, "it must be at least 1"),
    "learning_rate": (_positive, "it must be positive"),
    "final_learning_rate": (_not_negative, "it must not be negative"),
    "warmup_steps": (_not_negative, "it must not be negative"),
    "weight_decay": (_not_negative, "it must not be negative"),
    "max_grad_norm": (_not_negative, "it must not be negative; 0 switches clipping off"),
    "seed": (_not_negative, "it must not be negative"),
    "save_every": (_positive, "it must be at least 1"),
    "keep": (_positive, "it must be at least 1"),
    "validation_rows": (_not_negative, "it must not be negative"),
    "fsdp": (_positive, "it must be at least 1"),
    "sequence_shards": (_positive, "it must be at least 1"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
        seq_len: tokens of a row, a multiple of the block size.
        batch_size: rows of a step, over all devices.
        micro_batch_size: rows that go through the model together, over all devices; the gradients of a step's
            micro-batches are added, so it changes memory and time only.
        steps: optimiser steps.
        learning_rate, final_learning_rate: after the warm-up, and where the cosine ends at ``steps``.
        warmup_steps: linear from 0, at most a tenth of ``steps``.
        weight_decay: decoupled (AdamW).
        max_grad_norm: the gradient of all layers together is scaled down to this norm; 0: never.
        seed: of random weights and of the order of the rows.
        save_every: steps between two checkpoints, each after a validation.
        keep: newest checkpoints that are kept, besides the best one.
        validation_rows: documents that are set aside for validation, or read of a validation set, at most.
        start: what the weights are at first, without a Forecast to start from.
        objective: what the loss compares.
        fsdp: devices that share one copy of the base.
        sequence_shards: devices that share a row.
        layers: train only these, each on its own: a layer's gradient is clipped by its own norm, so its course depends
            on no other layer. None: all together.
    """

    seq_len: int
    batch_size: int = 32
    micro_batch_size: int = 1
    steps: int = 2000
    learning_rate: float = 5e-4
    final_learning_rate: float = 5e-5
    warmup_steps: int = 100
    weight_decay: float = 0.0
    max_grad_norm: float = 0.5
    seed: int = 42
    save_every: int = 100
    keep: int = 3
    validation_rows: int = 16
    start: Start = Start.QUERIES
    objective: Objective = Objective.PUBLISHED
    fsdp: int = 1
    sequence_shards: int = 1
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, (allowed, rule) in _ALLOWED.items():
            value = getattr(self, name)
            if not allowed(value):
                raise TrainingError(f"{name}={value}: {rule}")
        if self.batch_size % self.micro_batch_size:
            raise TrainingError(
                f"micro_batch_size={self.micro_batch_size} must divide batch_size={self.batch_size}: "
                "a step is a whole number of micro-batches"
            )
        if self.layers is not None and (not self.layers or len(set(self.layers)) < len(self.layers)):
            raise TrainingError(f"layers={self.layers}: name at least one, and each once")

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.batch_size // self.micro_batch_size

    def check_model(self, config: ModelConfig) -> None:
        """Refuses a row length that the model can't have, or in which there is nothing to choose.

        Raises:
            TrainingError: see above.
        """
        sparse = config.sparse
        forced = sparse.init_blocks + sparse.local_blocks + 1
        if sparse.num_selected_blocks <= forced:
            raise TrainingError(
                f"sparse_config.topk={sparse.topk} gives {sparse.num_selected_blocks} blocks, and {forced} are always "
                "selected: the Forecast would have nothing to choose"
            )
        block, shortest = sparse.block_size, shortest_document(sparse)
        pieces = 2 * self.sequence_shards if self.sequence_shards > 1 else 1
        if self.seq_len % (block * pieces):
            cut = f" times {pieces}, since sequence_shards={self.sequence_shards} devices share a row" * (pieces > 1)
            raise TrainingError(f"seq_len={self.seq_len} must be a multiple of the block size, {block}{cut}")
        if not shortest <= self.seq_len <= config.max_position_embeddings:
            raise TrainingError(
                f"seq_len={self.seq_len} must lie between {shortest} (below it every block is always selected) and the "
                f"model's max_position_embeddings={config.max_position_embeddings}"
            )
        unknown = [layer for layer in self.layers or () if not 0 <= layer < config.num_layers]
        if unknown:
            raise TrainingError(f"layers={unknown[0]}: the model has layers 0 to {config.num_layers - 1}")

    def check_devices(self, devices: int) -> None:
        """Refuses micro-batches that can't be shared out evenly.

        Args:
            devices: of all processes; `make_mesh` takes them.

        Raises:
            TrainingError: see above.
        """
        shares = devices // self.sequence_shards
        if self.micro_batch_size % shares:
            groups = "devices" if self.sequence_shards == 1 else f"groups of {self.sequence_shards} devices"
            raise TrainingError(
                f"micro_batch_size={self.micro_batch_size} can't be shared out evenly to {shares} {groups}; "
                f"use a multiple of {shares}"
            )

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it goes on with: all that shapes its course.

        ``steps`` may grow, and rows, weights and tokens may be shared out otherwise to fit another machine.
        """
        free = {"steps", "micro_batch_size", "save_every", "keep", "validation_rows", "fsdp", "sequence_shards"}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}
