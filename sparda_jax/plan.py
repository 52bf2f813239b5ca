"""``python -m sparda_jax.plan --model PATH``: what decoding takes of device and host memory, and the most that fits."""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

from sparda_jax.budget import Demand, MemoryPlan, plan_memory
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.cache.pinning import GIB, PINNED_LIMIT_VARIABLE
from sparda_jax.checkpoint import CheckpointError, open_weights
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.fit import (
    DEVICE_SPARE,
    HOST_RESERVE,
    auto_slots,
    check_fits,
    gib,
    host_needed,
    largest_batch,
    largest_length,
    settle_fetch,
    usable_device,
)
from sparda_jax.machine import Limits, locked_memory_limit, read_limits
from sparda_jax.selection import Mode
from sparda_jax.shapes import SHAPES

app = typer.Typer(add_completion=False, rich_markup_mode=None)

PlannedMode = Literal["dense", "sparse", "sparda", "sparda-decode-only", "infinigen", "random"]
_WEIGHT_FILES = ("manifest.json", "*.safetensors", "*.bin", "*.pt", "*.pth")


def _read_model(path: Path | None, shape: str | None, forecast: Path | None) -> tuple[ModelConfig, bool]:
    """The configuration, and whether there is a Forecast. A folder may hold ``config.json`` and no weights yet."""
    if (path is None) == (shape is None):
        raise ConfigError("there must be one model: give either --model PATH or --shape NAME")
    if path is None:
        if shape not in SHAPES:
            raise ConfigError(f"--shape {shape} is not known: use one of {', '.join(SHAPES)}")
        return SHAPES[shape], forecast is not None
    if any(any(path.glob(name)) for name in _WEIGHT_FILES):
        weights = open_weights(path, forecast=forecast)
        return weights.config, weights.forecast is not None
    return ModelConfig.from_pretrained(path), forecast is not None


def _print(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _device_rows(plan: MemoryPlan, limits: Limits) -> Iterator[tuple[str, str]]:
    demand, shape = plan.demand, plan.shape
    layers = demand.config.num_layers
    yield "weights", gib(plan.weights)
    yield f"slots of layer 0: all {shape.max_blocks} blocks of a lane", gib(plan.first_layer)
    yield f"slots of the other {layers - 1} layers: {shape.slots_per_lane} blocks of a lane", gib(plan.slots)
    yield f"compressed keys of {shape.num_blocks} blocks", gib(plan.pages)
    if plan.partial_keys:
        yield f"InfiniGen's partial keys of {shape.num_blocks} blocks", gib(plan.partial_keys)
    yield "tables", gib(plan.tables)
    yield f"prefill staging: one sequence of {demand.max_model_len} tokens, and short ones", gib(plan.staging)
    yield "temporary arrays (estimated)", gib(plan.workspace)
    yield "needed", gib(plan.device)
    if limits.device is None:
        yield "no accelerator is seen here: give --device-gib", "unknown"
    else:
        name = f"there is: {1 - DEVICE_SPARE:.0%} of {gib(limits.device.bytes)} ({limits.device.source})"
        yield name, gib(usable_device(limits) or 0)


def _host_rows(plan: MemoryPlan, limits: Limits) -> Iterator[tuple[str, str]]:
    demand = plan.demand
    whole = demand.num_blocks // demand.max_blocks
    packed = "" if demand.kv_host_dtype is KvHostDtype.AUTO else f", in {demand.kv_host_dtype.value}"
    yield f"pinned pool: {demand.num_blocks} blocks (whole sequences: {whole}){packed}", gib(plan.host_pool)
    yield "pinned besides: JAX's transfers and rounding", gib(host_needed(plan) - HOST_RESERVE - plan.host_pool)
    yield "the process itself", gib(HOST_RESERVE)
    yield "needed", gib(host_needed(plan))
    for bound in limits.host:
        name = "there is" if bound is limits.host_bound else "not the bound"
        yield f"{name}: {bound.source}", gib(bound.bytes)
    locked = locked_memory_limit()
    name = "not a bound: locked memory (ulimit -l), which the CUDA driver does not ask for"
    yield name, "unlimited" if locked is None else gib(locked)


def _most_rows(plan: MemoryPlan, limits: Limits, slots: int | None) -> Iterator[tuple[str, str]]:
    demand = plan.demand
    least = demand.least_slots if slots is None else slots
    batch, length = largest_batch(demand, limits, slots), largest_length(demand, limits, slots)
    yield f"sequences of {demand.max_model_len} tokens, {least} slots a lane", str(batch)
    yield f"tokens of a sequence at batch {demand.batch}, {least} slots a lane", str(length)
    if limits.device is not None and not demand.streams:
        found = auto_slots(demand, limits)
        everything = ": everything, nothing is fetched" if found == demand.max_blocks else ""
        yield f"slots a lane at batch {demand.batch} and {demand.max_model_len} tokens{everything}", str(found)


def _streaming(plan: MemoryPlan) -> str:
    """What a demand of every block does where that many slots do not fit."""
    demand = plan.demand
    return (
        f"Slots for all {demand.max_blocks} blocks of a lane do not fit: fetch={demand.decode_plan.fetch.value}, each "
        f"step brings {gib(plan.host_pool - plan.pool_array)} from the host, layer by layer, through two buffers of "
        f"{gib(demand.stream_buffer)} among the temporary arrays."
    )


def _environment(plan: MemoryPlan, limits: Limits) -> str:
    """What to set before the start, since JAX reads it only once."""
    now, best = plan.pinned(limits.pinned), plan.pinned(plan.pinned_limit * GIB) or 0
    setting = f"{PINNED_LIMIT_VARIABLE}={plan.pinned_limit}"
    if now is None:
        return f"Set {setting} before the start: JAX may pin {gib(limits.pinned)} now, which is too little."
    if now > best:
        return f"Set {setting} before the start, or JAX pins {gib(now)} in place of {gib(best)}."
    return f"JAX may pin {gib(limits.pinned)}, which is enough: {PINNED_LIMIT_VARIABLE} can stay as it is."


# Far beyond any machine, and what the tables are made of is still counted in no time.
_MOST_GIB, _MOST_TOKENS, _MOST_BATCH = 1 << 40, 1 << 30, 1 << 20


def _bytes(amount: float | None) -> int | None:
    return None if amount is None else int(amount * GIB)


@app.command()
def plan(
    model: Annotated[Path | None, typer.Option(help="Hugging Face or converted folder; config.json suffices.")] = None,
    shape: Annotated[str | None, typer.Option(help=f"In place of --model: {', '.join(SHAPES)}.")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(max=_MOST_TOKENS, help="Longest sequence in tokens; the model's own limit if left out."),
    ] = None,
    batch: Annotated[int, typer.Option(max=_MOST_BATCH, help="Sequences that decode together.")] = 1,
    mode: Annotated[PlannedMode, typer.Option(help="How the blocks that a token reads are chosen.")] = "sparda",
    forecast: Annotated[Path | None, typer.Option(help="Forecast file, in place of the checkpoint's own.")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of weights, keys and values.")] = "bfloat16",
    slots: Annotated[
        int | None,
        typer.Option(help="Blocks in device memory per lane, layer and KV head; as many as fit if left out."),
    ] = None,
    host_pool_gib: Annotated[
        float | None,
        typer.Option(min=0, max=_MOST_GIB, help="Size of the pinned pool; all lanes at full length if left out."),
    ] = None,
    kv_host_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        typer.Option(help="Keys and values on the host; int8 and fp8 (a scale per row) take half of bfloat16's bytes."),
    ] = "auto",
    device_gib: Annotated[
        float | None, typer.Option(min=0, max=_MOST_GIB, help="Device memory for JAX; this machine's if left out.")
    ] = None,
    host_gib: Annotated[
        float | None, typer.Option(min=0, max=_MOST_GIB, help="Host memory; this machine's if left out.")
    ] = None,
) -> None:
    """Say what decoding with host-offloaded keys and values takes of device and host memory; allocate nothing."""
    if device_gib is not None:
        jax.config.update("jax_platforms", "cpu")  # another device is meant, so this machine's is left alone
    console = Console(highlight=False, markup=False)
    try:
        config, has_forecast = _read_model(model, shape, forecast)
        demand = Demand(
            config=config,
            dtype=jnp.dtype(dtype),
            mode=Mode(mode),
            # A mode that needs a Forecast will get one.
            has_forecast=has_forecast or Mode(mode).needs_forecast,
            max_model_len=config.max_position_embeddings if max_model_len is None else max_model_len,
            batch=batch,
            host_pool=_bytes(host_pool_gib),
            kv_host_dtype=KvHostDtype(kv_host_dtype),
        )
        limits = read_limits(_bytes(device_gib), _bytes(host_gib))
        demand = settle_fetch(demand, limits, slots)
        made = plan_memory(demand, auto_slots(demand, limits) if slots is None else slots)
        _print(console, "Device memory", _device_rows(made, limits))
        if demand.streams:
            console.print(_streaming(made), end="\n\n")
        _print(console, "Host memory", _host_rows(made, limits))
        _print(console, "The most that fits", _most_rows(made, limits, slots))
        console.print(_environment(made, limits))
        check_fits(made, dataclasses.replace(limits, pinned=made.pinned_limit * GIB))
    except (CheckpointError, ConfigError, OSError) as error:
        typer.echo("\n".join(f"error: {line}" for line in str(error).splitlines()), err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    # What the device has is read without taking it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    app()
