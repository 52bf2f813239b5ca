"""``python -m sparda_jax.bench train``: micro-steps of Forecast training with random weights, and their parts."""

import functools
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from rich.console import Console

from sparda_jax.bench._options import at_least, check_writable, geometry, whole_numbers
from sparda_jax.bench._prefill_cases import FLOPS_PER_SECOND
from sparda_jax.bench._report import Row, print_rows, write_json
from sparda_jax.bench.prefill import random_model
from sparda_jax.cache.pinning import GIB
from sparda_jax.config import ModelConfig
from sparda_jax.fit import gib
from sparda_jax.model import abstract_decoder
from sparda_jax.shapes import SHAPES
from sparda_jax.train.bench.parts import METHOD as PARTS_METHOD
from sparda_jax.train.bench.parts import parts
from sparda_jax.train.config import TrainConfig
from sparda_jax.train.data import Batch
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.flops import Flops, peak_flops
from sparda_jax.train.forward import ForwardPass, LayerSums, Rows
from sparda_jax.train.mesh import make_mesh, row_shares
from sparda_jax.train.state import init_state, make_optimizer
from sparda_jax.train.trainer import update_state

console = Console(soft_wrap=True)
app = typer.Typer(add_completion=False, rich_markup_mode=None)
MFU, MEMORY = 0.35, 80.0
"""Aims on one H200 with the whole 8B shape at 65,536 tokens: share of the peak, and GB at most."""
METHOD = (
    "random weights and tokens, rows of one document; a step is one micro-step of one row for each group of devices "
    "that shares one (the base's forward pass, the loss and the gradient of all layers) and the optimiser's update; "
    "median, after one that compiles, of steps that are waited for. Operations are counted once (train/flops.py: the "
    "teacher's two products, attention over the chosen blocks only); MFU is their share of the data sheet's bf16 peak. "
    f"Floors: operations at {FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s a device, which large products reach. " + PARTS_METHOD
)


class MicroStep:
    """A step of training on a mesh."""

    def __init__(self, config: ModelConfig, forward: ForwardPass, seq_len: int):
        self.forward, self._config = forward, config
        shape = (row_shares(forward.mesh), seq_len)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)
        positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), shape)
        batch = Batch(tokens=tokens, positions=positions, segments=np.ones(shape, np.int32))
        self.rows: Rows = forward.on_devices(batch)
        self.flops = Flops.of(config, positions.ravel())
        self.tokens = tokens.size
        options = TrainConfig(seq_len=seq_len, batch_size=shape[0], micro_batch_size=shape[0])
        optimizer = make_optimizer(options)
        outputs = config.num_kv_heads * config.head_dim
        weights = jax.random.normal(jax.random.key(1), (config.num_layers, config.hidden_size, outputs)) / 64
        self.state = forward.everywhere(init_state(weights, optimizer))
        self._update = jax.jit(functools.partial(update_state, options, optimizer), donate_argnums=0)
        self.update_seconds = 0.0

    def __call__(self) -> tuple[float, float]:
        """Seconds of a step, and of its update alone."""
        forward, layers = self.forward, self._config.num_layers
        zeros = forward.everywhere((jnp.zeros_like(self.state.weights), LayerSums.zeros(layers)))
        jax.block_until_ready((zeros, self.state))
        began = time.perf_counter()
        gradient, sums = jax.block_until_ready(forward.learn(self.state.weights, self.rows, *zeros))
        learnt = time.perf_counter()
        self.state, norms = jax.block_until_ready(self._update(self.state, gradient, sums))
        ended = time.perf_counter()
        if not np.isfinite(jax.device_get(norms["grad_norm"])):
            raise TrainingError("the gradient is not finite")
        return ended - began, ended - learnt


def _check_device(config: ModelConfig, shape: str) -> None:
    """Refuses what would fill a computer without a GPU for hours.

    Raises:
        typer.BadParameter: there is no GPU, and the weights take more than a GiB.
    """
    like = abstract_decoder(config, has_forecast=False, dtype=jnp.dtype(jnp.bfloat16))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(like)))
    if jax.default_backend() != "gpu" and size > GIB:
        raise typer.BadParameter(
            f"--shape {shape}: the benchmark of {gib(size)} of weights needs an NVIDIA GPU, and JAX sees none here: "
            "run it on a GPU machine."
        )


@app.callback()
def main() -> None:
    """A command of ``python -m sparda_jax.bench``, which training's code can't be part of."""


@app.command()
def train(
    shape: Annotated[str, typer.Option(help=f"Model geometry: {', '.join(SHAPES)}.")] = "minicpm4.1-8b",
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.")] = 65536,
    devices: Annotated[
        str | None, typer.Option(help="Numbers of devices to train on, comma-separated. Without: all there are.")
    ] = None,
    fsdp: Annotated[int, typer.Option(help="Devices that share one copy of the base.")] = 1,
    sequence_shards: Annotated[int, typer.Option(help="Devices that share a row.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps to time, after one that compiles.")] = 3,
    part_times: Annotated[bool, typer.Option("--parts/--no-parts", help="On one device, also time the parts.")] = True,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the model has, for a quick look.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Time micro-steps of Forecast training and their parts on this machine's GPUs, beside floors and targets."""
    check_writable(json_out)
    config = geometry(shape, layers, least_layers=2)
    at_least("--steps", steps, 1)
    at_least("--fsdp", fsdp, 1)
    at_least("--sequence-shards", sequence_shards, 1)
    block = config.sparse.block_size * 2 * sequence_shards
    if seq_len % block or seq_len < block:
        raise typer.BadParameter(f"--seq-len {seq_len}: it must be a multiple of {block}.")
    counts = [jax.device_count()] if devices is None else whole_numbers("--devices", devices)
    if max(counts) > jax.device_count():
        raise typer.BadParameter(f"--devices {devices}: JAX sees {jax.device_count()}.")
    whole = layers is None and seq_len == 65536
    _check_device(config, shape)
    began = time.perf_counter()
    model = random_model(config, has_forecast=False)
    jax.block_until_ready(model.embed_tokens[...])
    console.print(f"weights after {time.perf_counter() - began:.0f} s")
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        value = row.error if row.value is None else f"{row.value:.5g} {row.unit}"
        console.print(f"[{time.perf_counter() - began:.0f} s] {row.name} {row.settings}: {value}", markup=False)
        if json_out:
            write_json(json_out, rows, what="training", method=METHOD, commit=commit)

    for count in counts:
        try:
            mesh = make_mesh(jax.devices()[:count], fsdp=fsdp, sequence=sequence_shards)
        except TrainingError as error:
            raise typer.BadParameter(f"--devices {count}: {error}.") from error
        step = MicroStep(config, ForwardPass(model, mesh), seq_len)
        settings: dict[str, Any] = {"devices": count, "seq_len": seq_len, "layers": config.num_layers}
        if fsdp > 1 or sequence_shards > 1:
            settings |= {"fsdp": fsdp, "sequence_shards": sequence_shards}
        for row in _measure(step, steps, count, settings, whole=whole):
            add(row)
        if part_times and count == 1:
            make = functools.partial(_part, settings, peak_flops(mesh.devices.ravel().tolist()))
            for row in parts(step.forward, step.state.weights, step.rows, step.flops, row=make):
                add(row)
        del step
    for row in _speedups(rows):
        add(row)
    print_rows(rows, console)


def _measure(step: MicroStep, steps: int, count: int, settings: dict[str, Any], *, whole: bool) -> list[Row]:
    compiling, _ = step()
    times = [step() for _ in range(steps)]
    spent, update = (statistics.median(values) for values in zip(*times, strict=True))
    rate, devices = step.flops.total / spent, step.forward.mesh.devices.ravel().tolist()
    peak = peak_flops(devices)
    found = {
        "mfu": None if peak is None else round(rate / peak, 4),
        "tokens_per_s": round(step.tokens / spent),
        "first_s": round(compiling, 1),
    }
    rows = [
        Row(
            name="micro-step",
            backend="auto",
            settings=settings | found,
            value=rate / 1e12,
            unit="TFLOP/s",
            floor=count * FLOPS_PER_SECOND / 1e12,
            target=MFU * peak / 1e12 if peak and whole and count == 1 else None,
        ),
        _part(settings, peak, "micro-step", spent, step.flops.total, count=count),
        Row(name="update", backend="auto", settings=settings, value=1e3 * update, unit="ms"),
    ]
    for device in devices:
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            rows.append(
                Row(
                    name="peak memory",
                    backend="auto",
                    settings=settings | {"device": device.id},
                    value=stats["peak_bytes_in_use"] / 1e9,
                    unit="GB",
                    target=MEMORY if whole else None,
                )
            )
    return rows


def _part(
    settings: dict[str, Any], peak: float | None, name: str, spent: float, flops: float, *, count: int = 1
) -> Row:
    rate = flops / spent
    return Row(
        name=name,
        backend="auto",
        settings=settings | {"tflops": round(rate / 1e12, 1), "mfu": None if peak is None else round(rate / peak, 4)},
        value=1e3 * spent,
        unit="ms",
        floor=1e3 * flops / FLOPS_PER_SECOND / count,
    )


def _speedups(rows: list[Row]) -> list[Row]:
    """How many times as fast as one device several are."""
    rates = {row.settings["devices"]: row for row in rows if row.unit == "TFLOP/s"}
    alone = rates.get(1)
    return [
        Row(
            name="speed-up",
            backend="auto",
            settings={"devices": count},
            value=row.value / alone.value,
            unit="devices' worth/s",
            floor=float(count),
            target=0.9 * count,
        )
        for count, row in rates.items()
        if count > 1 and alone is not None and alone.value and row.value
    ]


if __name__ == "__main__":
    app(prog_name="python -m sparda_jax.bench")
