"""MDS data sets (shards with an index, as the streaming library writes them): read in place, and written."""

from sparda_jax.train.mds.columns import ArrayPlace
from sparda_jax.train.mds.index import INDEX_FILE, ShardInfo, is_mds, read_index
from sparda_jax.train.mds.samples import IDS, INDICES, TEXT, bounds, check_bounds, has_indices, kind
from sparda_jax.train.mds.shard import Shard, open_shard
from sparda_jax.train.mds.writer import SHARD_BYTES, ShardWriter, write_index

__all__ = [
    "IDS",
    "INDEX_FILE",
    "INDICES",
    "SHARD_BYTES",
    "TEXT",
    "ArrayPlace",
    "Shard",
    "ShardInfo",
    "ShardWriter",
    "bounds",
    "check_bounds",
    "has_indices",
    "is_mds",
    "kind",
    "open_shard",
    "read_index",
    "write_index",
]
