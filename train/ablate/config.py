"""What all rows of an ablation have in common."""

import dataclasses
from pathlib import Path
from typing import Any

from sparda_jax.train.config import TrainConfig
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.run import describe_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateConfig:
    """An ablation's base, data and sizes.

    Attributes:
        model: folder of the base. dtype of its weights, None for the default of `load_model`.
        data, validation: what `sparda_jax.train` takes; only for ablations that train.
        training: of each variant; None: nothing is trained.
        activations: folder of what the base computes for each row, which the variants share; then a layer's gradient is
            clipped by its own norm. None: the base runs for each variant anew.
        prompts_data: folder that ``sparda_jax.pretrain.prepare`` wrote, of which prompts are made.
        kinds, lengths, prompts, seed: of the questions; see `eval_prompts`.
        out: folder of what was trained and measured so far.
    """

    model: Path
    dtype: str | None = None
    data: tuple[Path, ...] = ()
    validation: tuple[Path, ...] = ()
    training: TrainConfig | None = None
    activations: Path | None = None
    prompts_data: Path
    kinds: tuple[str, ...] = ("single", "multikey")
    lengths: tuple[int, ...] = (4096, 8192)
    prompts: int = 100
    seed: int = 1
    out: Path

    def __post_init__(self) -> None:
        if self.prompts < 0:
            raise TrainingError(f"prompts={self.prompts}: it must not be negative")
        if self.prompts and not (self.kinds and self.lengths):
            raise TrainingError("kinds and lengths: name at least one of each, or ask for no prompts")
        if self.training is not None and (self.training.layers is None) != (self.activations is None):
            raise TrainingError("layers that train on their own need a folder for activations, and only they")

    def trained_with(self) -> dict[str, Any]:
        """What a variant's weights depend on besides the variant, as plain JSON."""
        training = {} if self.training is None else dataclasses.asdict(self.training)
        # The objective is the variant's; the others change no number.
        for name in ("objective", "micro_batch_size", "save_every", "keep", "fsdp", "sequence_shards"):
            training.pop(name, None)
        return {"model": describe_path(self.model), "dtype": self.dtype, **training}

    def asked(self) -> dict[str, Any]:
        """What answers depend on besides the case, as plain JSON."""
        return {"model": describe_path(self.model), "dtype": self.dtype, "prompts": self.prompts, "seed": self.seed}
