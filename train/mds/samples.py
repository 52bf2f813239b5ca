"""What a data set holds for training: texts, or token ids with the bounds of their documents."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, Integer

from sparda_jax.train.errors import TrainingError
from sparda_jax.train.mds.columns import is_array
from sparda_jax.train.mds.index import ShardInfo
from sparda_jax.train.mds.shard import Shard

TEXT, IDS, INDICES = "text", "input_ids", "indices"


def kind(folder: Path, shards: Sequence[ShardInfo]) -> str:
    """`TEXT` or `IDS`: the column to read. Text comes first: it fits any tokenizer.

    Raises:
        TrainingError: some shard has neither; the message says what there is.
    """
    for name in (TEXT, IDS):
        if shards and all(_has(shard, name) for shard in shards):
            return name
    names = sorted({f"{column.name} ({column.encoding})" for shard in shards for column in shard.columns})
    raise TrainingError(f"{folder} needs a column {TEXT} (str) or {IDS} (ndarray); it has {', '.join(names) or 'none'}")


def _has(shard: ShardInfo, name: str) -> bool:
    column = shard.column(name)
    return column is not None and (column.encoding == "str" if name == TEXT else is_array(column.encoding))


def has_indices(shard: ShardInfo) -> bool:
    """Whether its samples say where their documents begin and end."""
    return shard.column(INDICES) is not None


def bounds(shard: Shard, sample: int, num_tokens: int) -> Int64[np.ndarray, "documents 2"]:
    """Begin and end of each document in a sample's ids, in order, empty ones left out; other tokens belong to none.

    Raises:
        TrainingError: they overlap, or reach beyond the ids.
    """
    indices = shard.value(sample, INDICES)
    found = check_bounds(indices, num_tokens) if isinstance(indices, np.ndarray) else None
    if found is None:
        raise TrainingError(
            f"{shard.place(sample)} has {num_tokens} tokens, which its {INDICES} do not divide: they must be pairs of "
            "begin and end, in order"
        )
    return found


def check_bounds(indices: Integer[np.ndarray, "..."], num_tokens: int) -> Int64[np.ndarray, "documents 2"] | None:
    """Pairs of begin and end as `bounds` gives them, or None if they are none."""
    if not np.issubdtype(indices.dtype, np.integer) or indices.size % 2:
        return None
    pairs = indices.astype(np.int64).reshape(-1, 2)
    edges = pairs.ravel()
    if len(edges) and (edges[0] < 0 or edges[-1] > num_tokens or (np.diff(edges) < 0).any()):
        return None
    return pairs[pairs[:, 1] > pairs[:, 0]]
