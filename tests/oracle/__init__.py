"""A slow, obvious numpy model written from the specification: what the package's numbers are compared with."""

from tests.oracle import infinigen, rope
from tests.oracle.attention import attend, block_mask, block_sparse_attention, causal_mask, dense_attention
from tests.oracle.compress import RollingKeys, compress_keys, num_compressed
from tests.oracle.model import MODES, OracleResult, OracleState, Routing, SparseSettings, decode, decode_many, forward
from tests.oracle.numerics import EXACT, Numerics, linear, rms_norm, silu
from tests.oracle.select import (
    align_teacher,
    forecast_score,
    pool_blocks,
    select_blocks,
    stage1_score,
    visible_stage1,
)
from tests.oracle.toy import toy_config, toy_weights

__all__ = [
    "EXACT",
    "MODES",
    "Numerics",
    "OracleResult",
    "OracleState",
    "RollingKeys",
    "Routing",
    "SparseSettings",
    "align_teacher",
    "attend",
    "block_mask",
    "block_sparse_attention",
    "causal_mask",
    "compress_keys",
    "decode",
    "decode_many",
    "dense_attention",
    "forecast_score",
    "forward",
    "infinigen",
    "linear",
    "num_compressed",
    "pool_blocks",
    "rms_norm",
    "rope",
    "select_blocks",
    "silu",
    "stage1_score",
    "toy_config",
    "toy_weights",
    "visible_stage1",
]
