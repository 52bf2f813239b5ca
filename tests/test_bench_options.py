"""Options that no benchmark can run with are told in a sentence, before weights are made or a GPU is missed."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench.__main__ import app
from sparda_jax.serve.bench.__main__ import app as engine_app

TABLE = {
    "prefill --shape nix": "--shape 'nix': give one of minicpm4.1-8b",
    "prefill --modes sparda,foo": "--modes 'foo': give one of dense, sparse",
    "prefill --modes infinigen": "--modes 'infinigen': give one of",
    "prefill --lengths 1k": "--lengths '1k': give whole numbers, separated by commas",
    "prefill --lengths -64": "--lengths -64: it must be at least 1",
    "prefill --lengths 64,1000": "--lengths 64,1000: the longest must be a multiple of 64",
    "prefill --dense-lengths 1000": "--dense-lengths 1000: the longest must be a multiple of 64",
    "prefill --batch 0": "--batch 0: it must be at least 1",
    "prefill --chunk 0": "--chunk 0: it must be at least 1",
    "prefill --lengths 2048": "--chunk 4096: with --parts it must not exceed the longest prompt, 2048",
    "prefill --overlap 120": "--overlap '120': give numbers from 0 to 100, or natural",
    "prefill --overlap nan": "--overlap 'nan': give numbers from 0 to 100, or natural",
    "prefill --overlap half": "--overlap 'half': give numbers from 0 to 100, or natural",
    "prefill --layers 1": "--layers 1: give 2 to 32",
    "prefill --layers 1 --no-parts": "needs an NVIDIA GPU",
    "prefill --json /dev/null/rows.json": "--json /dev/null/rows.json can't be written: File exists",
    "prefill --json /": "--json / can't be written: give a file in a folder that can",
    "decode --shape nix": "--shape 'nix': give one of minicpm4.1-8b",
    "decode --way fast": "--way 'fast': give one of sparda",
    "decode --batch 0": "--batch 0: it must be at least 1",
    "decode --misses few": "--misses 'few': give whole numbers",
    "decode --slots many": "--slots 'many': give a positive whole number, auto or least",
    "decode --kv-host-dtype int4": "--kv-host-dtype 'int4': give one of auto, int8, fp8",
    "decode --way dense --kv-host-dtype int8": "--kv-host-dtype int8 packs the records on the host",
    "host-dtype --mode fast": "--mode 'fast': give one of dense",
    "host-dtype --prompts 0": "--prompts 0: it must be at least 1",
    "host-dtype --data /nowhere": "--data /nowhere: no eval.npy there",
    "decode --layers 99": "--layers 99: give 1 to 32",
    "engine --shape nix": "--shape 'nix': give one of minicpm4.1-8b",
    "engine --layers 0": "--layers 0: give 1 to 32",
    "engine --model /nowhere": "/nowhere is no folder",
    "engine --mode infinigen": "--mode 'infinigen': give one of",
    "engine --batch 0": "--batch 0: it must be at least 1",
    "engine --answer 9": "--answer 9: it must be at least 10",
    "engine --steps 0": "--steps 0: it must be at least 1",
    "engine --hit -1": "--hit -1: it must be at least 0",
    "engine --slots 0": "--slots '0': give a positive whole number, auto or least",
    "engine --long x": "--long 'x': give whole numbers",
    "engine --context 2048": "--context 2048: it must be at least 2049",
    "engine --json /dev/null/rows.json": "--json /dev/null/rows.json can't be written: File exists",
    f"engine --model {BUNDLED_MODEL} --short 9 --answer 200 --context 327": "--context 327: it must be at least 328",
    f"engine --model {BUNDLED_MODEL} --slots 1 --context 2048 --short 9": "slots",
}


@pytest.mark.parametrize("command", TABLE)
def test_what_can_not_be_run_is_told(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    # `bench engine` passes its arguments on by way of sys.argv.
    done = CliRunner().invoke(engine_app if name == "engine" else app, [name, *options], env={"COLUMNS": "300"})
    assert done.exit_code == 2, done.output
    assert TABLE[command] in done.output
    assert not [*tmp_path.iterdir()]


def test_benchmarks_of_the_device_need_no_library_of_the_server() -> None:
    """On a machine that has only what the model needs, all but the load generator run."""
    blocked = ("fastapi", "uvicorn", "starlette", "prometheus_client", "httpx2")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import sparda_jax.bench.__main__ as m; m.app()"
    subprocess.run([sys.executable, "-c", code, "decode", "--help"], check=True, stdout=subprocess.DEVNULL)
