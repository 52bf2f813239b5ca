"""Sums of a step or of a validation as the numbers that are reported, layer by layer."""

import math
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from sparda_jax.train.forward import LayerSums

Record = dict[str, Any]
"""A line of ``metrics.jsonl``: plain JSON, None for a quotient without a denominator."""

# Name in the record -> quotient of two fields of `SelectionQuality`.
QUALITY = {
    "teacher_recall": ("teacher_hits", "teacher_blocks"),
    "selector_recall": ("selector_hits", "selector_blocks"),
    "student_mass": ("student_mass", "free_mass"),
    "selector_mass": ("selector_mass", "free_mass"),
    "teacher_mass": ("teacher_mass", "free_mass"),
}


STUDENT_QUALITY = tuple(name for name in QUALITY if not name.startswith("selector"))
"""What a training step measures; validation compares with the selector, too."""


def describe(sums: LayerSums, quality: Collection[str] = tuple(QUALITY)) -> Record:
    """Loss and quality, those named, of every layer and on average.

    * ``loss``: divergence of the (query, KV head) pairs, averaged by their weights.
    * ``teacher_recall``, ``selector_recall``: share of the free blocks that the teacher, or InfLLM-V2 with the layer's
      own queries, chose and the Forecast chose as well; as many are chosen by each, so it is recall@k.
    * ``student_mass``, ``selector_mass``, ``teacher_mass``: share of the attention to free blocks that falls on those
      that the Forecast, InfLLM-V2 and the teacher chose.
    """
    host: Any = jax.device_get(sums)
    record: Record = {"layer_loss": _quotients(host.loss, host.weight)}
    record["loss"] = _mean(record["layer_loss"])
    for name in quality:
        part, whole = QUALITY[name]
        record[f"layer_{name}"] = _quotients(getattr(host.quality, part), getattr(host.quality, whole))
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
