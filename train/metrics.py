"""Sums of a step or of a validation as the numbers that are reported, layer by layer."""

import math
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from sparda_jax.train.forward import LayerSums

Record = dict[str, Any]
"""A line of ``metrics.jsonl``: plain JSON, None for a quotient without a denominator."""

# Name in the record -> quotient of two fields of `SelectionQuality` or `CacheHits`.
QUALITY = {
    "teacher_recall": ("teacher_hits", "teacher_blocks"),
    "selector_recall": ("selector_hits", "selector_blocks"),
    "student_mass": ("student_mass", "free_mass"),
    "selector_mass": ("selector_mass", "free_mass"),
    "teacher_mass": ("teacher_mass", "free_mass"),
    "hit_rate": ("hits", "chosen"),
    "hit_rate_of_twice": ("hits_of_twice", "chosen"),
}

STUDENT_QUALITY = ("teacher_recall", "student_mass", "teacher_mass")
"""What a training step measures; validation compares with the selector, too, and replays a cache."""


def describe(sums: LayerSums, quality: Collection[str] = tuple(QUALITY)) -> Record:
    """Loss and quality, those named, of every layer and on average.

    * ``loss``: divergence of the (query, KV head) pairs, averaged by their weights.
    * ``teacher_recall``, ``selector_recall``: share of the free blocks that the teacher, or InfLLM-V2 with the layer's
      own queries, chose and the Forecast chose as well; as many are chosen by each, so it is recall@k.
    * ``student_mass``, ``selector_mass``, ``teacher_mass``: share of the attention to free blocks that falls on those
      that the Forecast, InfLLM-V2 and the teacher chose.
    * ``hit_rate``, ``hit_rate_of_twice``: share of the Forecast's blocks, token after token, that a cache of as many
      slots as blocks are selected (96 with published settings), or of twice as many, would have held.
    """
    host: Any = jax.device_get(sums)
    record: Record = {"layer_loss": _quotients(host.loss, host.weight)}
    record["loss"] = _mean(record["layer_loss"])
    sums_of = vars(host.quality) | vars(host.cache)
    for name in quality:
        part, whole = QUALITY[name]
        record[f"layer_{name}"] = _quotients(sums_of[part], sums_of[whole])
        record[name] = _mean(record[f"layer_{name}"])
    return record


def _quotients(parts: np.ndarray, wholes: np.ndarray) -> list[float | None]:
    return [float(part) / float(whole) if whole else None for part, whole in zip(parts, wholes, strict=True)]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def not_finite(record: Record) -> list[str]:
    """Which numbers of a record are NaN or infinite, by name (and layer)."""
    found = []
    for name, value in record.items():
        for layer, number in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(number, float) and not math.isfinite(number):
                found.append(f"{name}[{layer}]" if isinstance(value, list) else name)
    return found
