"""``python -m sparda_jax.bench map``: decode at every batch, context and number of slots that a machine holds."""

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from rich.console import Console

from sparda_jax.bench._decode_cases import METHOD as DECODE_METHOD
from sparda_jax.bench._decode_cases import PROFILED_STEPS, WAYS, Case, floors, weights_floor
from sparda_jax.bench._decode_steps import Measured, Program, compile_step, measure
from sparda_jax.bench._map_parts import step_time
from sparda_jax.bench._map_plot import MAP
from sparda_jax.bench._map_points import (
    PAPER,
    PAPER_CONTEXT,
    PAPER_SHAPE,
    Curve,
    Point,
    capacity,
    check_slots,
    demand_of,
    points,
)
from sparda_jax.bench._options import at_least, check_writable, geometry, one_of, whole_numbers
from sparda_jax.bench._report import Row, print_rows, write_json
from sparda_jax.bench._step_profile import ProfileError, read_profile
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.cache.pinning import GIB, PINNED_LIMIT_VARIABLE, pinned_bytes
from sparda_jax.config import ModelConfig
from sparda_jax.fit import gib
from sparda_jax.machine import Limits, read_limits
from sparda_jax.model import Decoder
from sparda_jax.shapes import SHAPES

console = Console(soft_wrap=True)
METHOD = (
    f"{DECODE_METHOD} tpot_ms: of a step, so of a token in each sequence. A point is left out where a server of this "
    "size, with a host pool for every layer and room for prefill, would not fit the machine; the benchmark itself "
    "makes the given number of pools, which layers share. least: the slots that a step needs, and 32; auto: as many "
    "as the planner finds. Misses: with the least slots as set, with more of them that number times what "
    "`bench overlap` measured in natural text for so many slots (over selected blocks), over what it measured for the "
    "least ones; between its points on a line; none with a slot for every block. parts_ms: of one step out of "
    f"{PROFILED_STEPS} in a profile, each moment counted for the first in this order that runs then. limit: link if a "
    "copy runs in nine tenths of the step, else the largest of products (weights), attention and selection (records "
    "and keys), other kernels and idle time (launches), and waiting for copies (link). paper_tokens_per_s: published, "
    "one H100, at misses that it does not give."
)
_WAYS = [name for name in WAYS if name != "dense"]
_COMPILERS = 8
"""Threads that compile steps of a batch whose products are tuned already."""


def map_(
    shape: Annotated[str, typer.Option(help=f"Model geometry: {', '.join(SHAPES)}.")] = PAPER_SHAPE,
    way: Annotated[str, typer.Option(help=f"Ways to decode, separated by '/': {'/'.join(_WAYS)}.")] = "sparda",
    context: Annotated[str, typer.Option(help="Tokens of each sequence, comma-separated.")] = "32768,65536,131072",
    batch: Annotated[str, typer.Option(help="Numbers of sequences, comma-separated.")] = "1,4,8,16,32,64",
    slots: Annotated[
        str,
        typer.Option(
            help="HBM slots of a lane per layer and KV head, comma-separated: least, multiples of it, numbers, auto "
            "(as many as fit)."
        ),
    ] = "least,2x,auto",
    misses: Annotated[
        float, typer.Option(help="Missing blocks per KV head, layer and step with the least slots.")
    ] = 10,
    hit_rates: Annotated[
        Path, typer.Option(help="What `bench overlap` measured: how misses fall with more slots.")
    ] = Path("docs/results/hit-rates.json"),
    host_gib: Annotated[
        float | None, typer.Option(help="Host memory, in GiB, that the points have to fit; this machine's if left out.")
    ] = None,
    kv_host_dtype: Annotated[
        str, typer.Option(help=f"What the host keeps of keys and values: {', '.join(KvHostDtype)}.")
    ] = "auto",
    pools: Annotated[int, typer.Option(help="Different host pools that the layers read; making one takes time.")] = 2,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the model has, for a quick look.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here, row by row.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Time decode at every batch, context and number of slots: what each point reaches, and what limits it."""
    check_writable(json_out)
    config = geometry(shape, layers)
    ways = [one_of("--way", name, _WAYS) for name in way.split("/")]
    contexts, batches = whole_numbers("--context", context), whole_numbers("--batch", batch)
    kinds = check_slots(slots)
    if not 0 <= misses < math.inf:
        raise typer.BadParameter(f"--misses {misses:g}: it must be a finite number, at least 0.")
    if host_gib is not None and not 0 < host_gib < math.inf:
        raise typer.BadParameter(f"--host-gib {host_gib:g}: it must be a finite number above 0.")
    at_least("--pools", pools, 1)
    kept = KvHostDtype(one_of("--kv-host-dtype", kv_host_dtype, list(KvHostDtype)))
    curves = {name: None if kinds == ["least"] else Curve.read(hit_rates, WAYS[name][0].value) for name in ways}
    if jax.default_backend() != "gpu":
        raise typer.BadParameter("the benchmark needs an NVIDIA GPU, and JAX sees none here: run it on a GPU machine.")
    limits = read_limits(host_bytes=None if host_gib is None else int(host_gib * GIB))
    asked = [
        point
        for name in ways
        for tokens in contexts
        for size in batches
        for point in points(demand_of(config, name, tokens, size, kept), name, kinds, misses, curves[name], limits)
    ]
    left_out = [point for point in asked if isinstance(point, str)]
    for sentence in left_out:
        console.print(f"left out: {sentence}", markup=False)
    found = [
        dataclasses.replace(point, case=dataclasses.replace(point.case, pools=min(pools, config.num_layers)))
        for point in asked
        if isinstance(point, Point)
    ]
    _check_pools(found, config, limits)
    details = {
        "picture": MAP,
        "host_memory": gib(limits.host_bound.bytes) if limits.host_bound else None,
        "device_memory": gib(limits.device.bytes) if limits.device else None,
        "capacity": [
            dataclasses.asdict(capacity(demand_of(config, name, tokens, 1, kept), name, limits))
            for name in ways
            for tokens in contexts
        ],
        "left_out": left_out,
    }
    rows: list[Row] = []
    model = Decoder(config, has_forecast=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for row in measured(model, found, published=shape == PAPER_SHAPE and layers is None):
        rows.append(row)
        console.print(f"{row.name} {row.settings}: {row.value:.4g} tokens/s", markup=False)
        if json_out:
            what = "decode over the offload cache by batch, context and slots"
            write_json(json_out, rows, what=what, method=METHOD, commit=commit, details=details)
    print_rows(rows, console)
    for entry in details["capacity"]:
        console.print("{way}, {context} tokens: {most} sequences fit, then {ended_by} ends".format(**entry))


def _check_pools(found: Sequence[Point], config: ModelConfig, limits: Limits) -> None:
    """Refuses more pools than JAX may pin.

    Raises:
        typer.BadParameter: it may not pin those of the largest point.
    """
    for point in found:
        case = point.case
        size = demand_of(config, case.way, case.context, case.batch, case.kv_host_dtype)
        array = size.num_blocks * size.block_bytes // config.num_layers
        if pinned_bytes(array, case.pools, limits.pinned) is None:
            raise typer.BadParameter(
                f"--pools {case.pools}: JAX may pin {gib(limits.pinned)}, too little for so many of {gib(array)}: give "
                f"fewer, or set {PINNED_LIMIT_VARIABLE} before the start."
            )


def measured(model: Decoder, found: Sequence[Point], *, published: bool) -> Iterator[Row]:
    """A row for each point, batch by batch, so that a run which is cut short has whole batches.

    Of a batch the largest pools come first: smaller ones then lie in memory that is pinned already.
    """
    for size in sorted({point.case.batch for point in found}):
        points = [point for point in found if point.case.batch == size]
        programs = compile_all(model, [point.case for point in points])
        left = [_program_of(point.case, model.config) for point in points]
        for point in sorted(points, key=lambda point: point.case.context, reverse=True):
            key = _program_of(point.case, model.config)
            with tempfile.TemporaryDirectory() as folder:
                result = measure(model, point.case, profile=Path(folder), program=programs[key].result())
                yield _row(model.config, point, result, Path(folder), published=published)
            left.remove(key)
            if key not in left:  # the device's memory is for those that are to come
                del programs[key]


def compile_all(model: Decoder, cases: Sequence[Case]) -> dict[tuple[Any, ...], Future[Program]]:
    """The programs of one batch's cases, before anything is timed.

    XLA tunes the products of a batch when it meets them first, by the clock, so the first step compiles while nothing
    else runs; the others need processors only. Tracing holds Python's lock, so that threads save but a part of it.
    """
    began = time.perf_counter()
    programs: dict[tuple[Any, ...], Future[Program]] = {}
    with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
        for case in cases:
            key = _program_of(case, model.config)
            if key in programs:
                continue
            programs[key] = pool.submit(compile_step, model, case, profiled=True)
            if len(programs) == 1:
                programs[key].result()
    seconds = time.perf_counter() - began
    console.print(f"batch {cases[0].batch}: {len(programs)} programs compiled in {seconds:.0f} s")
    return programs


def _program_of(case: Case, config: ModelConfig) -> tuple[Any, ...]:
    """What cases of one program have in common."""
    return case.way, case.context, case.shape(config), case.sets_misses


def _row(config: ModelConfig, point: Point, result: Measured, profile: Path, *, published: bool) -> Row:
    case = point.case
    hbm, copies = floors(config, dataclasses.replace(case, misses=result.misses))
    settings = result.settings()
    if case.slots_per_lane(config) == case.blocks(config):
        settings |= {"exposed_wait_ms": None}  # nothing is fetched: it would be noise
    paper = PAPER.get(case.way, {}).get(case.batch) if published and case.context == PAPER_CONTEXT else None
    try:
        time_of = step_time(read_profile(profile).steps)
        parts = {name: round(part, 3) for name, part in dataclasses.asdict(time_of).items()}
        limit = time_of.limit
    except ProfileError as error:
        console.print(f"no parts of the step: {error}", markup=False)
        parts, limit = None, None
    return Row(
        name=case.way,
        backend="auto",
        settings={
            "batch": case.batch,
            "context": case.context,
            "slots_are": point.slots,
            "slots": case.slots_per_lane(config),
            "layers": config.num_layers,
            "pools": case.pools,
            "kv_host_dtype": case.kv_host_dtype.value,
            "tpot_ms": settings.pop("ms"),
            "floor_weights_ms": round(1e3 * weights_floor(config), 3),
            "floor_hbm_ms": round(1e3 * hbm, 3),
            "floor_copy_ms": round(1e3 * copies, 3),
            "x_floor": round(result.seconds / max(hbm, copies), 3),
            "limit": limit,
            "parts_ms": parts,
            "paper_tokens_per_s": paper,
        }
        | settings,
        value=case.batch / result.seconds,
        unit="tokens/s",
        floor=case.batch / max(hbm, copies),
    )
