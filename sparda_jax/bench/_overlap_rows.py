"""What `bench overlap` measures of each text, and the rows that say it of all of them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num

from sparda_jax.bench._overlap_replay import replay
from sparda_jax.bench._overlap_sets import (
    GROUP,
    first_choice,
    forced,
    independent_unions,
    membership,
    shared,
    unions,
)
from sparda_jax.bench._report import Row
from sparda_jax.config import SparseConfig

DISTANCES = (1, 2, 4, 8, 16, 64, 256)
SCALES = (1, 1.5, 2, 4)
"""Slots over selected blocks; `slot_counts` adds a slot for every block."""
SHARED, UNION, MISSING = "shared free blocks", "union of neighbours", "missing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one text in one mode, at tokens that have a choice.

    Attributes:
        shared: by distance, the share of a token's free blocks that the token so far before it selected as well.
        chance: what `shared` would be for neighbours on average, if each token drew its free blocks at random.
        union: blocks that some of `GROUP` neighbouring tokens selected.
        independent: the same on average, if each token drew its free blocks at random.
        missing: by slots, the records that a decode step copies; of all layers but the first, which is resident.
    """

    shared: dict[int, Float[np.ndarray, "layers kv_heads pairs"]]
    chance: Float[np.ndarray, "tokens"]
    union: Int[np.ndarray, "layers kv_heads groups"]
    independent: Float[np.ndarray, "groups"]
    missing: dict[int, Int[np.ndarray, "later_layers kv_heads steps"]]


def slot_counts(sparse: SparseConfig, blocks: int) -> list[int]:
    """Slots of a layer and KV head to try, ascending."""
    return sorted({min(round(scale * sparse.num_selected_blocks), blocks) for scale in SCALES} | {blocks})


def measure(selected: Int[np.ndarray, "layers kv_heads tokens width"], sparse: SparseConfig) -> Measured:
    """Everything about one text's selections, see `_overlap_replay.selections`.

    The text has to reach further beyond `first_choice` than the largest distance, and some blocks have to be free.
    """
    tokens, first = selected.shape[2], first_choice(sparse)
    blocks = -(-tokens // sparse.block_size)
    positions = np.arange(first, tokens)
    fixed = forced(positions, blocks, sparse)
    num_fixed, visible = fixed.sum(axis=1), positions // sparse.block_size + 1

    def by_head(ids: Int[np.ndarray, "tokens width"]) -> tuple[list[np.ndarray], np.ndarray]:
        mask = membership(ids[first:], blocks)
        return [shared(mask, mask & ~fixed, distance) for distance in DISTANCES], unions(mask)

    found = [[by_head(ids) for ids in layer] for layer in selected]
    counts = slot_counts(sparse, blocks) if len(selected) > 1 else []
    return Measured(
        shared={
            distance: np.array([[shares[place] for shares, _ in layer] for layer in found])
            for place, distance in enumerate(DISTANCES)
        },
        chance=(sparse.num_selected_blocks - num_fixed) / (visible - num_fixed),
        union=np.array([[union for _, union in layer] for layer in found]),
        independent=independent_unions(positions, sparse),
        missing={slots: replay(selected[1:], slots, sparse.block_size)[:, :, first:] for slots in counts},
    )


def rows(mode: str, texts: Sequence[Measured], sparse: SparseConfig) -> Iterator[Row]:
    """Rows of one mode over the tokens of all texts: each layer's, and that of all layers."""
    one, width = texts[0], sparse.num_selected_blocks
    for distance in one.shared:
        for layer, each in _by_layer([text.shared[distance] for text in texts], first=0):
            yield _row(SHARED, mode, "share", {"distance": distance, "layer": layer}, each)
    for layer, each in _by_layer([text.union for text in texts], first=0):
        yield _row(UNION, mode, "blocks", {"tokens": GROUP, "layer": layer}, each)
    yield _row(UNION, mode, "blocks", {"tokens": GROUP, "layer": "at random"}, [text.independent for text in texts])
    yield _row(SHARED, mode, "share", {"distance": 1, "layer": "at random"}, [text.chance for text in texts])
    for slots in one.missing:
        for layer, each in _by_layer([text.missing[slots] for text in texts], first=1):
            rate = 1 - float(_joined(each).mean()) / width
            settings = {"slots": slots, "of_selected": round(slots / width, 2), "hit_rate": round(rate, 4)}
            yield _row(MISSING, mode, "blocks", settings | {"layer": layer}, each)


def _by_layer(
    texts: Sequence[Num[np.ndarray, "layers ..."]], first: int
) -> Iterator[tuple[int | str, list[Num[np.ndarray, "... values"]]]]:
    for layer in range(len(texts[0])):
        yield first + layer, [text[layer] for text in texts]
    yield "all", list(texts)


def _row(
    name: str, mode: str, unit: str, settings: dict[str, Any], texts: Sequence[Num[np.ndarray, "... values"]]
) -> Row:
    low, high = np.percentile(_joined(texts), (5, 95))
    late = _joined([text[..., 3 * text.shape[-1] // 4 :] for text in texts])
    settings = settings | {
        "p5": round(float(low), 4),
        "p95": round(float(high), 4),
        "last_quarter": round(float(late.mean()), 4),
        "texts": [round(float(text.mean()), 4) for text in texts],
    }
    return Row(name=name, backend=mode, settings=settings, value=round(float(_joined(texts).mean()), 4), unit=unit)


def _joined(texts: Sequence[Num[np.ndarray, "... values"]]) -> Num[np.ndarray, "all_values"]:
    return np.concatenate([text.ravel() for text in texts])
