"""The command line of ``python -m sparda_jax.plan``, and the figures that README takes from it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.budget import Demand, plan_memory
from sparda_jax.cache.pinning import GIB, PINNED_LIMIT_VARIABLE
from sparda_jax.checkpoint.conversion import convert_checkpoint
from sparda_jax.cli import app as command_line
from sparda_jax.fit import auto_slots, gib, largest_batch
from sparda_jax.machine import Bound, Limits
from sparda_jax.plan import app
from sparda_jax.selection import Mode
from sparda_jax.shapes import SHAPES
from tests.checkpoint.checkpoints import base_shapes, config, random_tensors, write_hf

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[1]
LARGE = ("--shape", "minicpm4.1-8b", "--max-model-len", 131072)


def run(*arguments: object, code: int = 0) -> str:
    env = {"COLUMNS": "200", "TERM": "dumb", PINNED_LIMIT_VARIABLE: None}
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)
    assert result.exit_code == code, result.output
    return result.output


def rows(output: str) -> dict[str, str]:
    """Name -> amount of each line of the tables."""
    return dict(re.findall(r"^(\S.*?) {2,}(\S.*?)\s*$", output, re.MULTILINE))


def test_parts_are_those_of_the_library() -> None:
    output = run(*LARGE, "--batch", 16, "--device-gib", 80, "--host-gib", 128)
    demand = Demand(
        config=SHAPES["minicpm4.1-8b"],
        dtype=jnp.dtype(jnp.bfloat16),
        mode=Mode.SPARDA,
        has_forecast=True,
        max_model_len=131072,
        batch=16,
    )
    limits = Limits(
        device=Bound(bytes=80 * GIB, source="--device-gib"), host=(Bound(bytes=128 * GIB, source="--host-gib"),)
    )
    slots = auto_slots(demand, limits)
    plan = plan_memory(demand, slots)
    table = rows(output)
    assert table["weights"] == gib(plan.weights)
    assert table["slots of layer 0: all 2048 blocks of a lane"] == gib(plan.first_layer)
    assert table[f"slots of the other 31 layers: {slots} blocks of a lane"] == gib(plan.slots)
    assert table["compressed keys of 32768 blocks"] == gib(plan.pages)
    assert table["prefill staging: one sequence of 131072 tokens, and short ones"] == gib(plan.staging)
    assert table["temporary arrays (estimated)"] == gib(plan.workspace)
    assert table["pinned pool: 32768 blocks (whole sequences: 16)"] == gib(plan.host_pool)
    assert table["there is: 95% of 80.00 GiB (--device-gib)"] == "76.00 GiB"
    assert table["there is: --host-gib"] == "128.00 GiB"
    assert table["sequences of 131072 tokens, 160 slots a lane"] == str(largest_batch(demand, limits))
    assert table["slots a lane at batch 16 and 131072 tokens"] == str(slots)
    assert "partial keys" not in output
    needed = [amount for name, amount in re.findall(r"^(needed) +(.*?) *$", output, re.MULTILINE)]
    assert needed == [gib(plan.device), "70.00 GiB"]
    assert f"Set {PINNED_LIMIT_VARIABLE}=66 before the start" in output


def test_what_does_not_fit_is_shown_and_refused() -> None:
    output = run(*LARGE, "--batch", 64, "--mode", "infinigen", "--device-gib", 80, "--host-gib", 128, code=1)
    assert rows(output)["InfiniGen's partial keys of 131072 blocks"] == "31.06 GiB"
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1] for line in errors] == [" device memory", " host memory"]
    assert all(re.search(r"use .*--batch \d+", line) for line in errors)


def test_dense_streams_whole_layers_where_its_slots_do_not_fit() -> None:
    dense = (*LARGE, "--batch", 16, "--mode", "dense", "--host-gib", 128, "--device-gib")
    output = run(*dense, 80)
    said = "Slots for all 2048 blocks of a lane do not fit: fetch=stream, each step brings 62.00 GiB from the host"
    assert said in output
    assert "through two buffers of 2.00 GiB" in output
    assert "slots of the other 31 layers: 3 blocks of a lane" in output
    assert int(rows(output)["sequences of 131072 tokens, 3 slots a lane"]) > 16
    resident = run(*dense, 139)
    assert "stream" not in resident
    assert "slots of the other 31 layers: 2048 blocks of a lane" in resident
    refused = run(*dense, 80, "--slots", 2048, code=1)
    assert "stream" not in refused
    assert "error: device memory" in refused


def test_given_slots_and_pool() -> None:
    output = run(*LARGE, "--batch", 4, "--slots", 256, "--host-pool-gib", 8, "--device-gib", 80)
    assert "slots of the other 31 layers: 256 blocks of a lane" in output
    assert "pinned pool: 4096 blocks (whole sequences: 2)" in output
    assert rows(output)["sequences of 131072 tokens, 256 slots a lane"] == "2"
    assert "which is enough" in output


def test_a_loose_limit_on_pinning_is_told() -> None:
    assert f"Set {PINNED_LIMIT_VARIABLE}=54 before the start, or JAX pins 64.00 GiB in place of 54.00 GiB." in run(
        *LARGE, "--batch", 12, "--device-gib", 80, "--host-gib", 128
    )


def test_host_limits_are_read_and_the_bound_is_marked() -> None:
    output = run("--model", BUNDLED_MODEL, "--mode", "sparse")
    assert len(re.findall(r"^there is: ", output, re.MULTILINE)) == 1
    assert "MemAvailable of this host" in output
    assert "not a bound: locked memory (ulimit -l)" in output
    assert "no accelerator is seen here: give --device-gib" in output


def test_checkpoints_with_and_without_weights(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", random_tensors(base_shapes()), config(), shards=2)
    converted = tmp_path / "converted"
    convert_checkpoint(source, converted, forecast=DATA / "torch_trainer.pt")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(config()))
    weights = {
        folder.name: rows(run("--model", folder, "--mode", "sparse", "--max-model-len", 640, "--device-gib", 1))[
            "weights"
        ]
        for folder in (source, converted, bare)
    }
    assert weights["source"] == weights["bare"] != weights["converted"]
    # A mode that needs a Forecast is planned with one.
    sparda = rows(run("--model", bare, "--max-model-len", 640, "--device-gib", 1))["weights"]
    assert sparda == weights["converted"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there must be one model: give either --model PATH or --shape NAME"),
        (("--model", BUNDLED_MODEL, "--shape", "minicpm4.1-8b"), "there must be one model"),
        (("--shape", "minicpm9"), "--shape minicpm9 is not known: use one of minicpm4.1-8b"),
        (("--model", "nowhere"), "nowhere holds no config.json"),
        (("--shape", "minicpm4.1-8b", "--batch", 0), "--batch 0 is not allowed"),
        (("--shape", "minicpm4.1-8b", "--slots", 100), "--slots 100 cannot hold the 128 blocks"),
    ],
)
def test_errors_are_sentences(arguments: tuple[object, ...], message: str) -> None:
    assert f"error: {message}" in run(*arguments, code=1)


def test_nothing_is_allocated() -> None:
    before = len(jax.live_arrays())
    run(*LARGE, "--batch", 24, "--device-gib", 139, "--host-gib", 256)
    assert len(jax.live_arrays()) == before


def test_as_a_module_and_as_a_command() -> None:
    command = [sys.executable, "-m", "sparda_jax.plan", "--model", str(BUNDLED_MODEL), "--device-gib", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert "The most that fits" in done.stdout
    listed = CliRunner().invoke(command_line, ["--help"]).output
    assert re.search(r"\bplan\b.*memory", listed)


def test_figures_in_readme() -> None:
    """README's table, row by row, made again with the command."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("### What fits") :]
    table = re.findall(
        r"^\| (\d+) GiB \| (\d+) GiB \| ([\d ]+) \| (\d+) \| (\d+) \| (\d+|all) \|$", section, re.MULTILINE
    )
    assert len(table) >= 4
    for device, host, tokens, most, batch, slots in table:
        length = int(tokens.replace(" ", ""))
        output = run(
            *LARGE[:2], "--max-model-len", length, "--batch", batch, "--device-gib", device, "--host-gib", host
        )
        shown = rows(output)
        assert shown[f"sequences of {length} tokens, 160 slots a lane"] == most
        found = next(amount for name, amount in shown.items() if name.startswith(f"slots a lane at batch {batch}"))
        assert found == (str(length // 64) if slots == "all" else slots)


@pytest.mark.parametrize("option", ["--device-gib", "--host-gib", "--host-pool-gib", "--batch", "--max-model-len"])
def test_absurd_numbers_are_refused_by_name(option: str) -> None:
    whole = option in ("--batch", "--max-model-len")
    for value in (10**25,) if whole else ("inf", "nan", "1e308"):
        output = run("--shape", "minicpm4.1-8b", "--device-gib", 80, option, value, code=2)
        assert option in output.splitlines()[-1]


def test_numbers_beyond_any_machine_are_still_added_up() -> None:
    small = ("--model", BUNDLED_MODEL, "--device-gib", 80, "--host-gib", 128)
    assert "error: device memory" in run(*small, "--batch", 1 << 20, code=1)
    assert "error: host memory" in run(*small, "--max-model-len", 1 << 30, code=1)
    assert "slots of the other 5 layers: 256 blocks" in run(*small, "--device-gib", 1 << 40, "--host-gib", 1 << 40)


def test_packed_records_are_named_and_take_half() -> None:
    output = run(*LARGE, "--batch", 16, "--device-gib", 80, "--host-gib", 128, "--kv-host-dtype", "fp8")
    table = rows(output)
    assert table["pinned pool: 32768 blocks (whole sequences: 16), in fp8"] == "33.00 GiB"
    plain = rows(run(*LARGE, "--batch", 16, "--device-gib", 80, "--host-gib", 128))
    fits = "sequences of 131072 tokens, 160 slots a lane"
    assert int(table[fits]) > int(plain[fits])
    refused = run(*LARGE, "--mode", "dense", "--batch", 16, "--device-gib", 80, "--kv-host-dtype", "int8", code=1)
    assert "error: --kv-host-dtype int8 packs the records on the host" in refused
