"""The command: what it refuses before it serves, what it prints, and a whole life from start to SIGTERM."""

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jax.profiler import ProfileData
from rich.console import Console
from typer.testing import CliRunner

from sparda_jax import fit
from sparda_jax.config import ConfigError, ModelConfig, RopeConfig
from sparda_jax.fit import gib
from sparda_jax.machine import Bound, Limits
from sparda_jax.selection import Mode
from sparda_jax.serve import launch, memory
from sparda_jax.serve import report as reports
from sparda_jax.serve.__main__ import app
from sparda_jax.serve.launch import load
from sparda_jax.serve.memory import plan_server
from sparda_jax.serve.settings import SamplingDefaults, Settings
from sparda_jax.train.forecast import export, fresh_weights
from tests.serve.fakes import wait_until
from tests.serve.tiny_checkpoint import write_checkpoint
from tests.serve.tiny_tokenizer import BOS

ROOT = Path(__file__).parents[2]


def refusal(*arguments: str) -> str:
    # Setting up the log closes every handler of the process, and absl's closes the stream that pytest captures.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "configure", lambda *_, **__: None)
        result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/folder"], "--model /no/such/folder does not exist"),
        (["--max-model-len", "1"], "--max-model-len 1 is not allowed: it must be at least 2"),
        (["--port", "70000"], "--port 70000 is not allowed"),
        (["--max-active", "0"], "--max-active 0 is not allowed"),
        (["--max-queue", "-1"], "--max-queue -1 is not allowed"),
        (["--warm-up-len", "-1"], "--warm-up-len -1 is not allowed"),
        (["--drain-seconds", "nan"], "--drain-seconds nan is not allowed"),
        (["--stuck-seconds", "-1"], "--stuck-seconds -1.0 is not allowed"),
        (["--model-name", ""], "--model-name is not allowed"),
        (["--forecast", "/no/such/file"], "--forecast /no/such/file does not exist"),
        (["--mode", "fast"], "'fast'"),
        (["--host", "no host of this name"], "--host no host of this name is not an address"),
        (["--mode", "sparda"], "Forecast"),
        (["--long-context"], "rope_scaling.rope_type='default'"),
        (["--max-active", "4097"], "--max-active 4097 is not allowed: it must be from 1 to 4096"),
        (["--model", __file__], "is not one; give the folder of a checkpoint"),
        (["--host-pool-gib", "100000"], "memory: the pool takes 100,000.00 GiB"),
        (["--slots", "0"], "--slots 0 is not allowed"),
        (["--slots", "1"], "--slots 1 cannot hold the"),
        (["--host-pool-gib", "0"], "--host-pool-gib 0.0 is not allowed"),
        (["--host-pool-gib", "0.00001"], "holds 0 blocks, and a sequence of 1024 tokens has 16"),
        (["--copy-ctas", "0"], "--copy-ctas 0 is not allowed"),
        (["--sample-every", "1"], "--sample-every 1 is not allowed: it must be 0 (never) or at least 2"),
        (["--prefill-tokens", "0"], "--prefill-tokens 0 is not allowed"),
        (["--prefill-tokens", "100"], "--prefill-tokens 100 is not allowed: it must be a multiple of 64, a block"),
        (["--park-after", "0"], "--park-after 0 is not allowed"),
        (["--api-key", "two words"], "--api-key (not shown) is not allowed: it must be printable ASCII without spaces"),
        (["--cors-origin", "example.org"], "--cors-origin example.org is not allowed: it must be * or like https://"),
        (["--cors-origin", "*", "--cors-origin", "https://a.example/"], "--cors-origin https://a.example/ is not"),
        (["--max-body-mib", "0"], "--max-body-mib 0 is not allowed: it must be at least 1"),
        (["--upload-seconds", "0"], "--upload-seconds 0.0 is not allowed: it must be a finite number above 0"),
        (["--request-seconds", "0"], "--request-seconds 0.0 is not allowed"),
        (["--profile", __file__], f"--profile {__file__} can't be written; give a folder that can"),
        (["--profile-seconds", "inf"], "--profile-seconds inf is not allowed: it must be a finite number above 0"),
    ],
)
def test_bad_options_end_in_one_sentence(checkpoint: Path, arguments: list[str], message: str) -> None:
    if "--model" not in arguments:
        arguments = ["--model", str(checkpoint), *arguments]
    if "--port" not in arguments:
        arguments = [*arguments, "--port", "0"]
    assert message in refusal(*arguments)


def test_a_port_in_use_is_told_before_anything_is_loaded(checkpoint: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text = refusal("--model", str(checkpoint), "--port", str(port))
    assert text == f"error: --host 127.0.0.1 --port {port} can't be used: Address already in use; choose another --port"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("generation_config.json", '{"temperature": -1}', "temperature=-1 is out of range"),
        ("generation_config.json", '{"top_k": "many"}', "top_k='many' is out of range"),
        ("tokenizer.json", None, "holds no tokenizer.json"),
        ("config.json", None, "config.json"),
        ("model.safetensors", None, "safetensors"),
    ],
)
def test_broken_folders_end_in_one_sentence(
    checkpoint: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    assert message in refusal("--model", str(folder), "--port", "0")


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, vocab_size=300)
    text = refusal("--model", str(folder), "--port", "0")
    assert "the tokenizer has 320 ids, the model only 300" in text


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, (1.0, 1.0, 0)),
        ({}, (1.0, 1.0, 0)),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20}, (0.7, 0.9, 20)),
        ({"do_sample": False, "temperature": 0.7}, (0.0, 1.0, 0)),
        ({"do_sample": True, "top_p": 0.5}, (1.0, 0.5, 0)),
    ],
)
def test_sampling_defaults(tmp_path: Path, data: dict[str, Any] | None, expected: tuple[float, float, int]) -> None:
    if data is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(data))
    defaults = SamplingDefaults.from_pretrained(tmp_path)
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == expected


def test_report_says_what_will_run_and_why(checkpoint: Path) -> None:
    report = load(Settings(model=checkpoint, max_model_len=2000, max_active=2))
    console = Console(width=500, record=True, file=io.StringIO())
    report.print(console)
    lines = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in console.export_text().splitlines())
    assert lines["context limit"].startswith("2000 tokens, prompt and answer: --max-model-len")
    assert "1024" in lines["warning"]
    assert lines["mode"] == (
        "sparse: InfLLM-V2: a layer's own queries choose its blocks (the default: the checkpoint has no Forecast)"
    )
    assert lines["dense_len"].startswith("256: ")
    assert lines["selection"].startswith(
        "3 blocks of 64 tokens per token and KV head: 1 initial, 1 local and its own, 0"
    )
    assert lines["rope"] == "default, theta 10000"
    # 2 lanes of 32 blocks; 2 layers of 2 heads of 64 keys and values of 16 channels a block, in float32
    size = gib(2 * 32 * 2 * 2 * 128 * 16 * 4)
    assert lines["memory"].startswith(
        f"2 decode lanes (--max-active), each with slots for every block of a sequence (--slots): {size}; "
        f"host pool of 64 blocks (--host-pool-gib): {size}; prefill "
    )
    assert lines["end of answer"] == "1 </s>, 3 <|im_end|>"
    assert "do_sample=false" in lines["sampling"]
    vocab, hidden, inner, layers = 320, 64, 96, 2
    count = vocab * hidden + hidden + layers * (hidden * (64 + 64) + 64 * hidden + 3 * hidden * inner + 2 * hidden)
    assert report.num_parameters == count
    assert lines["parameters"] == f"{count / 1e6:.1f} M in float32, {gib(4 * count)}"
    command = reports.curl("http://127.0.0.1:1", report)
    assert command.startswith("curl http://127.0.0.1:1/v1/chat/completions")
    assert "no key (--api-key" in lines["access"]
    guarded = Settings(model=checkpoint, api_key="secret-key", cors_origins=("https://a.example",))
    assert "secret-key" not in repr(guarded)
    assert reports.access(guarded) == (
        "API key on /v1, /tokenize, /detokenize; web pages of https://a.example (--cors-origin)"
    )
    command = reports.curl("http://127.0.0.1:1", dataclasses.replace(report, settings=guarded))
    assert '-H "Authorization: Bearer $SPARDA_API_KEY"' in command
    default = load(Settings(model=checkpoint))
    assert "max_position_embeddings (--max-model-len lowers it)" in dict(default.lines())["context limit"]
    assert "warning" not in dict(default.lines())


@pytest.mark.parametrize("beside", [True, False])
def test_a_forecast_makes_sparda_the_default(checkpoint: Path, tmp_path: Path, beside: bool) -> None:
    folder = tmp_path / "with-forecast"
    shutil.copytree(checkpoint, folder)
    config = ModelConfig.from_pretrained(folder)
    file = folder / "forecast.safetensors" if beside else tmp_path / "trained.safetensors"
    export(file, fresh_weights(config, 0), config, step=1, base="tiny")
    given = None if beside else file
    default = load(Settings(model=folder, forecast=given))
    assert default.runner.mode is Mode.SPARDA
    assert dict(default.lines())["mode"].endswith("chooses the blocks (the default: the checkpoint has a Forecast)")
    chosen = load(Settings(model=folder, forecast=given, mode="sparse"))
    assert chosen.runner.mode is Mode.SPARSE
    assert dict(chosen.lines())["mode"].endswith("choose its blocks")


def longrope(trained: int, original: int) -> ModelConfig:
    rope = RopeConfig(
        rope_type="longrope",
        theta=10000.0,
        original_max_position_embeddings=original,
        short_factor=(1.0,) * 8,
        long_factor=(1.0, *(4.0,) * 7),
    )
    return ModelConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        max_position_embeddings=trained, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=BOS, rope=rope,
    )  # fmt: skip


def test_rope_line_names_the_factor_set_and_why() -> None:
    config = longrope(4096, 1024)
    assert "long factors 1 to 4 (limit 2048 > original length 1024), attention factor" in reports.rope(config, 2048)
    assert "short factors 1 to 1 (limit 1024 <= original length 1024)" in reports.rope(config, 1024)


def test_the_plan_takes_what_fits(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model=checkpoint)
    runner = load(settings).runner
    assert plan_server(runner, settings)[0].shape.lanes == 4
    assert plan_server(runner, dataclasses.replace(settings, max_active=7))[0].shape.lanes == 7
    few = plan_server(runner, dataclasses.replace(settings, slots=6, host_pool_gib=0.001))[0]
    assert (few.shape.slots_per_lane, few.shape.num_blocks) == (6, int(0.001 * 2**30) // (2 * 2 * 128 * 16 * 4))
    # Half of this holds the device's part of two lanes, not of three.
    two, three = (plan_server(runner, dataclasses.replace(settings, max_active=n, slots=16))[0] for n in (2, 3))
    weights = two.weights
    small = Limits(device=None, host=(Bound(bytes=two.device + three.device - 2 * weights, source="this test"),))
    monkeypatch.setattr(memory, "read_limits", lambda: small)
    monkeypatch.setattr(fit, "DEVICE_SPARE", 0.0)
    assert plan_server(runner, dataclasses.replace(settings, slots=16))[0].shape.lanes == 2
    with pytest.raises(ConfigError, match="--batch 2"):
        plan_server(runner, dataclasses.replace(settings, slots=16, max_active=3))


def test_what_is_advised_against_a_pool_too_large_helps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model=checkpoint, slots=16)
    runner = load(settings).runner
    pool = plan_server(runner, dataclasses.replace(settings, max_active=1))[0].host_pool
    monkeypatch.setattr(fit, "DEVICE_SPARE", -1000.0)  # whether the device's part fits is another question
    for lanes, host in ((900, 900), (60, 100), (9, 14)):
        small = Limits(device=None, host=(Bound(bytes=host * pool, source="this test"),))
        monkeypatch.setattr(memory, "read_limits", lambda small=small: small)
        with pytest.raises(ConfigError, match=r"host memory: the pool takes .* half of this test is") as refused:
            plan_server(runner, dataclasses.replace(settings, max_active=lanes))
        advice = re.search(r"--max-active (\d+)$", str(refused.value))
        assert advice is not None
        most = int(advice[1])
        plan_server(runner, dataclasses.replace(settings, max_active=most))
        with pytest.raises(ConfigError):
            plan_server(runner, dataclasses.replace(settings, max_active=most + 1))


@pytest.fixture
def process(checkpoint: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    arguments = ["--model", str(checkpoint), "--port", "0", "--max-model-len", "512", "--model-name", "small"]
    arguments += ["--profile", str(tmp_path / "profiles"), "--profile-seconds", "500"]
    running = subprocess.Popen(
        [sys.executable, "-m", "sparda_jax.serve", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield running
    running.kill()
    running.communicate()


def test_from_start_to_sigterm(process: subprocess.Popen[str], tmp_path: Path) -> None:
    assert process.stdout is not None
    printed: list[str] = []
    reader = threading.Thread(target=lambda: printed.extend(process.stdout or []))
    reader.start()
    wait_until(lambda: process.poll() is not None or any(line.startswith("curl ") for line in printed), seconds=300)
    output = "".join(printed)
    assert process.poll() is None, output
    assert "512 tokens, prompt and answer: --max-model-len" in output
    url = re.search(r"ready after .*: (http://127\.0\.0\.1:\d+)/v1 as small", output)
    assert url is not None, output
    assert httpx.get(f"{url[1]}/health").json()["status"] == "ready"
    assert httpx.get(f"{url[1]}/v1/models").json()["data"][0]["max_model_len"] == 512
    metrics = httpx.get(f"{url[1]}/stats").json()["metrics"]
    named = set(re.findall(r'(?:get|more|rate)\("([a-z_]+)"', httpx.get(url[1]).text))
    sampled = {"prefetch_recall", "wasted_copies_ratio", "exposed_wait_seconds"}
    assert sampled == named - {name.removeprefix("sparda_") for name in metrics}
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url[1]}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        profiles = [httpx.post(f"{url[1]}/{action}_profile", timeout=60) for action in ("start", "stop", "start")]
        assert [answer.status_code for answer in profiles] == [200, 200, 200]
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"  # what was in flight is finished
    assert process.wait(60) == 0
    reader.join(10)
    assert "Traceback" not in "".join(printed)
    first, same, last = (Path(answer.json()["profile"]) for answer in profiles)
    assert first == same != last
    assert {*(tmp_path / "profiles").iterdir()} == {first, last}
    # The one that was running is written at the end.
    for folder in (first, last):
        (written,) = folder.rglob("*.xplane.pb")
        assert "/host:CPU" in {plane.name for plane in ProfileData.from_file(str(written)).planes}
