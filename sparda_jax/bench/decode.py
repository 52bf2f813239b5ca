"""``python -m sparda_jax.bench decode``: whole decode steps over the offload cache, at a set number of misses."""

import dataclasses
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from rich.console import Console

from sparda_jax.bench._decode_cases import CONTEXT, METHOD, WAYS, Case, floors
from sparda_jax.bench._decode_steps import measure
from sparda_jax.bench._options import at_least, check_writable, geometry, one_of, slots_of, whole_numbers
from sparda_jax.bench._report import Row, print_rows, write_json
from sparda_jax.budget import Demand
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.decode_plan import check_streaming
from sparda_jax.fit import auto_slots
from sparda_jax.machine import read_limits
from sparda_jax.model import Decoder
from sparda_jax.shapes import SHAPES

console = Console(soft_wrap=True)

# Tokens per second by (batch, missing blocks) at 128K: the published code on an H200, the better of its runs.
REFERENCE = {
    "sparda": {(4, 10): 170, (4, 20): 194, (16, 10): 819, (16, 20): 774},
    "sparse": {(4, 10): 135, (4, 20): 162, (16, 10): 484, (16, 20): 468},
}
TARGET = {
    "sparda": {(4, 10): 850, (16, 10): 2150, (16, 0): 2400, (24, 2): 2400, (24, 0): 2600},
    "sparse": {(16, 10): 1100},
}


def _slots(text: str, config: ModelConfig, case: Case) -> int | None:
    """What ``--slots`` says for a case."""
    if text != "auto":
        return slots_of(text)
    demand = Demand(
        config=config,
        dtype=jnp.dtype(jnp.bfloat16),
        mode=case.plan.mode,
        has_forecast=True,
        max_model_len=case.context,
        batch=case.batch,
        kv_host_dtype=case.kv_host_dtype,
    )
    return auto_slots(demand, read_limits())


def decode(
    shape: Annotated[str, typer.Option(help=f"Model geometry: {', '.join(SHAPES)}.")] = "minicpm4.1-8b",
    way: Annotated[str, typer.Option(help=f"Ways to decode, separated by '/': {'/'.join(WAYS)}.")] = "sparda/sparse",
    batch: Annotated[str, typer.Option(help="Numbers of sequences, comma-separated.")] = "4,16",
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = CONTEXT,
    misses: Annotated[
        str, typer.Option(help="Missing blocks per KV head, layer and step, comma-separated; or: natural.")
    ] = "10",
    slots: Annotated[
        str, typer.Option(help="HBM slots of a lane per layer and KV head; auto: as many as fit; least: few to spare.")
    ] = "least",
    kv_host_dtype: Annotated[
        str, typer.Option(help=f"Records on the host: {', '.join(KvHostDtype)}.")
    ] = KvHostDtype.AUTO.value,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the model has, for a quick look.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Also write a JAX profile of each row's steps, into a folder each below this.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Time whole decode steps on this machine's GPU, beside floors, the reference's times and the targets."""
    check_writable(json_out)
    if profile:
        try:
            profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"--profile {profile} can't be made: {error.strerror}.") from None
    config = geometry(shape, layers)
    ways = [one_of("--way", name, WAYS) for name in way.split("/")]
    batches = whole_numbers("--batch", batch)
    counts = [None if text == "natural" else whole_numbers("--misses", text, 0)[0] for text in misses.split(",")]
    at_least("--context", context, 1)
    slots_of(slots)
    kept = KvHostDtype(one_of("--kv-host-dtype", kv_host_dtype, list(KvHostDtype)))
    try:
        for name in ways:
            check_streaming(WAYS[name][1], kept)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if jax.default_backend() != "gpu":
        raise typer.BadParameter("the benchmark needs an NVIDIA GPU, and JAX sees none here: run it on a GPU machine.")
    model = Decoder(config, has_forecast=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    whole = context == CONTEXT and layers is None
    rows: list[Row] = []
    for name in ways:
        for size in batches:
            for count in counts:
                case = Case(way=name, batch=size, context=context, misses=count, kv_host_dtype=kept)
                case = dataclasses.replace(case, slots=_slots(slots, config, case))
                if case.streams and rows and (rows[-1].name, rows[-1].settings["batch"]) == (name, size):
                    continue  # dense misses the same whatever is asked for
                missing = "natural" if count is None else f"{count} missing"
                measured = measure(model, case, profile=profile and profile / f"{name}, batch {size}, {missing}")
                hbm, copies = floors(config, dataclasses.replace(case, misses=measured.misses))
                key = (size, count or 0)
                compared = whole and kept is KvHostDtype.AUTO
                rows.append(
                    Row(
                        name=name,
                        backend="auto",
                        settings={
                            "batch": size,
                            "context": context,
                            "layers": config.num_layers,
                            "kv_host_dtype": kept.value,
                            "slots": case.shape(config).slots_per_lane,
                            "floor_hbm_ms": round(1e3 * hbm, 3),
                            "floor_copy_ms": round(1e3 * copies, 3),
                        }
                        | measured.settings(),
                        value=size / measured.seconds,
                        unit="tokens/s",
                        floor=size / max(hbm, copies),
                        reference=REFERENCE.get(name, {}).get(key) if compared else None,
                        # Those without misses are for slots sized automatically.
                        target=TARGET.get(name, {}).get(key) if compared and (count or slots == "auto") else None,
                    )
                )
                console.print(f"{name} {rows[-1].settings}: {rows[-1].value:.4g} tokens/s", markup=False)
                if json_out:
                    what = "decode steps over the offload cache"
                    write_json(json_out, rows, what=what, method=METHOD, commit=commit)
    print_rows(rows, console)
