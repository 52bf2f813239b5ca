"""Reading the golden files of tests/data/golden (its README.md says what they hold)."""

import functools
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.oracle.toy import toy_weights

FOLDER = Path(__file__).parent.parent / "data" / "golden"


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One file: its arrays, bf16 bit patterns already turned into float32, and its meta record."""

    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    @property
    def config(self) -> dict[str, Any]:
        """config.json of a whole-model file, with its `sparse_config`."""
        return self.meta["config"] | {"sparse_config": self.meta["sparse_config"]}


@functools.cache
def load_golden(name: str) -> Golden:
    """`name` is prefill_T1000, decode, or model_minicpm_hk1_{dense,sparse,sparda}_T1000; a missing file raises."""
    with np.load(FOLDER / f"golden_{name}.npz") as file:
        stored = {key: file[key] for key in file.files}
    meta = json.loads(str(stored.pop("meta")))
    arrays = {
        key: a.view(ml_dtypes.bfloat16).astype(np.float32) if a.dtype == np.uint16 else a for key, a in stored.items()
    }
    return Golden(arrays=arrays, meta=meta)


@functools.cache
def _all_weights() -> dict[str, np.ndarray]:
    # The three whole-model files share sizes and seed; only one of them has Forecast weights as well.
    golden = load_golden("model_minicpm_hk1_sparda_T1000")
    return toy_weights(golden.config, golden.meta["seed"])


def golden_weights(name: str) -> dict[str, np.ndarray]:
    """The bf16 weights behind a whole-model file, made by its recipe and checked against its checksums.

    Raises:
        ValueError: a tensor is not the one that the reference ran with.
    """
    checksums = load_golden(name).meta["crc32"]
    weights = {key: w for key, w in _all_weights().items() if key in checksums}
    wrong = sorted(
        key for key in checksums if key not in weights or zlib.crc32(weights[key].tobytes()) != checksums[key]
    )
    if wrong:
        raise ValueError(f"the recipe gives other weights than the reference had: {', '.join(wrong)}")
    return weights


def tie_rows(pooled: np.ndarray, total: int) -> np.ndarray:
    """bool [Hk, T]: rows of `pooled [Hk, T, blocks]` where the last place in the top-`total` goes to one of equals."""
    if pooled.shape[-1] <= total:
        return np.zeros(pooled.shape[:-1], bool)
    ordered = -np.sort(-pooled, axis=-1)
    return ordered[..., total - 1] == ordered[..., total]


def ids_to_mask(ids: np.ndarray, num_blocks: int) -> np.ndarray:
    """bool [..., num_blocks]: which blocks `ids [..., k]` name; -1 names none."""
    mask = np.zeros((*ids.shape[:-1], num_blocks + 1), bool)
    np.put_along_axis(mask, np.where(ids < 0, num_blocks, ids), True, axis=-1)
    return mask[..., :-1]


def allowed_by_ties(pooled: np.ndarray, ids: np.ndarray, query_block: np.ndarray, total: int) -> np.ndarray:
    """bool [Hk, T]: whether `ids` is one of the top-`total` choices that `pooled` permits, invalid ones removed.

    Every visible block (<= `query_block [T]`) above the boundary score must be there, none below it, and no block
    after the query. How many of the equals at the boundary are there is not looked at.
    """
    num_blocks = pooled.shape[-1]
    mask = ids_to_mask(ids, num_blocks)
    boundary = -np.sort(-pooled, axis=-1)[..., min(total, num_blocks) - 1, None]
    visible = np.arange(num_blocks) <= query_block[:, None]
    above = (pooled > boundary) & visible
    at_least = (pooled >= boundary) & visible
    return (mask | ~above).all(axis=-1) & (at_least | ~mask).all(axis=-1)
