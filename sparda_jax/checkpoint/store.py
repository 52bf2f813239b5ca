"""The converted weights on disk, one orbax checkpoint per item (embeddings, each layer, head): one fits in memory."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flax import traverse_util
from orbax.checkpoint import v1 as ocp

from sparda_jax.checkpoint.errors import CheckpointError

WEIGHTS_FOLDER = "weights"


def _place(folder: Path, item: str) -> Path:
    """Absolute, as orbax demands of what it reads."""
    return folder.absolute() / WEIGHTS_FOLDER / item


def write_item(folder: Path, item: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes one item below ``folder``; the keys are the parameters' dotted paths."""
    context = ocp.Context()
    # Weights in bfloat16 shrink by a fifth at best, and every load would pay for the decompression.
    context.array.saving.use_compression = False
    with context:
        ocp.save(str(_place(folder, item)), traverse_util.unflatten_dict(dict(arrays), sep="."))


def read_item(folder: Path, item: str) -> dict[str, np.ndarray]:
    """Reads one item back into host memory.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        tree = ocp.load(str(_place(folder, item)))
        return {str(k): np.asarray(v) for k, v in traverse_util.flatten_dict(tree, sep=".").items()}
    except Exception as error:  # orbax and tensorstore raise many types; all mean the same here
        raise CheckpointError(f"{folder}: the item {item!r} cannot be read ({error}); convert again") from error
