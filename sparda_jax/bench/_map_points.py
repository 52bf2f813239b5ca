"""The points of `bench map`: which of them a machine holds, and how many blocks a step misses at each."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import typer

from sparda_jax.bench._decode_cases import SPARE_SLOTS, WAYS, Case, check_misses
from sparda_jax.bench._overlap_rows import MISSING
from sparda_jax.bench.plot import finite
from sparda_jax.budget import Demand, plan_memory
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.cache.pinning import GIB
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.fit import auto_slots, check_fits, largest_batch
from sparda_jax.machine import Limits

PAPER = {
    "sparda": {4: 240.2, 8: 471.2, 16: 705.3, 32: 899.2, 64: 1000.1},
    "sparse": {4: 167.8, 8: 279.5, 16: 447.9, 32: 618.6, 64: 788.9},
    "infinigen": {4: 51.8, 8: 66.5, 16: 85.6, 32: 117.5},
}
"""Tokens per second by batch that the paper gives for `PAPER_SHAPE` at `PAPER_CONTEXT`, on one H100 of 80 GB."""
PAPER_SHAPE, PAPER_CONTEXT = "minicpm4.1-8b", 131072


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the map: a case, and what ``--slots`` calls its slots."""

    case: Case
    slots: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """What a mode misses in natural text by how many slots there are, as `bench overlap` measured it.

    Attributes:
        slots: slots over selected blocks, ascending.
        missing: the share of the selected blocks that a step misses with them.
    """

    slots: tuple[float, ...]
    missing: tuple[float, ...]

    @classmethod
    def read(cls, file: Path, mode: str) -> "Curve":
        """From a result file of `bench overlap`, all later layers together.

        Raises:
            typer.BadParameter: the file is none, or does not hold the mode.
        """
        try:
            rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
            found = {
                finite(row["settings"]["of_selected"]): 1 - finite(row["settings"]["hit_rate"])
                for row in rows
                if (row["name"], row["backend"], row["settings"]["layer"]) == (MISSING, mode, "all")
            }
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise typer.BadParameter(f"--hit-rates {file} is no result file of `bench overlap`: {error}") from None
        if not found:
            raise typer.BadParameter(f"--hit-rates {file} has no mode {mode}: give another file, or --slots least.")
        slots = tuple(sorted(found))
        return cls(slots=slots, missing=tuple(found[count] for count in slots))

    def at(self, slots: float) -> float:
        """The share that is missing; between two measured numbers of slots on a line, which is above the curve."""
        return float(np.interp(slots, self.slots, self.missing))


def demand_of(config: ModelConfig, way: str, context: int, batch: int, kept: KvHostDtype = KvHostDtype.AUTO) -> Demand:
    """What it takes in truth: with a pool for every layer, and room for prefill, as a server has.

    Raises:
        typer.BadParameter: no server can have such sequences.
    """
    mode, fetch = WAYS[way]
    try:
        return Demand(
            config=config,
            dtype=jnp.dtype(jnp.bfloat16),
            mode=mode,
            has_forecast=True,
            max_model_len=context,
            batch=batch,
            fetch=fetch,
            kv_host_dtype=kept,
        )
    except ConfigError as error:
        raise typer.BadParameter(f"--context {context} with --batch {batch}: {error}") from None


def check_slots(text: str) -> list[str]:
    """What ``--slots`` may be: ``least``, ``auto``, numbers, and multiples of ``least`` such as 2x.

    Raises:
        typer.BadParameter: it says something else.
    """
    kinds = text.split(",")
    for kind in kinds:
        if not re.fullmatch(r"least|auto|[1-9]\d*x?", kind):
            raise typer.BadParameter(
                f"--slots {kind!r}: give least, auto, a number, or a multiple of least such as 2x."
            )
    return kinds


def points(
    demand: Demand, way: str, kinds: Sequence[str], misses: float, curve: Curve | None, limits: Limits
) -> Iterator[Point | str]:
    """The points of a context and batch, or a sentence for each that there is not.

    With the least slots a step misses ``misses`` blocks, with more of them as many fewer as by the curve. Cases get
    arrays of one size, so that they share a program; but not with as many slots as fit, whose arrays would scatter the
    others' records over the whole device.
    """
    config, width = demand.config, demand.config.sparse.num_selected_blocks
    least, most = min(demand.max_blocks, demand.min_slots + SPARE_SLOTS), auto_slots(demand, limits)
    counts: dict[int, str] = {}
    for kind in kinds:
        count = {"least": least, "auto": most}.get(kind) or (least * int(kind[:-1]) if kind[-1] == "x" else int(kind))
        counts.setdefault(min(count, demand.max_blocks), kind)
    found = []
    for count, kind in counts.items():
        name = f"{way}, {demand.max_model_len} tokens, batch {demand.batch}, {count} slots ({kind})"
        if not demand.min_slots <= count:
            yield f"{name}: a step needs {demand.min_slots}"
            continue
        missing = misses
        if count == demand.max_blocks:
            missing = 0.0
        elif count > least and curve:
            # Texts so short that already the least slots hold all they ask for leave nothing to compare with.
            fewest = curve.at(least / width)
            missing = round(misses * curve.at(count / width) / fewest, 2) if fewest else 0.0
        case = Case(
            way=way,
            batch=demand.batch,
            context=demand.max_model_len,
            misses=missing,
            slots=count,
            kv_host_dtype=demand.kv_host_dtype,
        )
        try:
            plan = plan_memory(demand, count)
            # What this process may pin does not matter: it pins less.
            check_fits(plan, dataclasses.replace(limits, pinned=plan.pinned_limit * GIB))
            check_misses(case, config)
        except (ConfigError, typer.BadParameter) as error:
            yield f"{name}: {error}"
            continue
        found.append(Point(case=case, slots=kind))
    room = max((point.case.slots or 0 for point in found if point.case.slots != most), default=None)
    for point in found:
        alone = point.case.slots == most
        yield point if alone else dataclasses.replace(point, case=dataclasses.replace(point.case, room=room))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many sequences a machine holds with the least slots, and which memory ends it."""

    way: str
    context: int
    most: int
    ended_by: str


def capacity(demand: Demand, way: str, limits: Limits) -> Capacity:
    """Of one length."""
    most = functools.partial(largest_batch, demand)
    on_device, on_host = (
        most(dataclasses.replace(limits, host=())),
        most(dataclasses.replace(limits, device=None)),
    )
    ended_by = "device memory" if on_device <= on_host else "host memory"
    return Capacity(way=way, context=demand.max_model_len, most=min(on_device, on_host), ended_by=ended_by)
