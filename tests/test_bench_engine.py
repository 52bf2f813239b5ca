"""The engine's benchmark on a toy model: it measures what its rows say. The times themselves need a GPU."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.selection import Mode
from sparda_jax.serve.bench import rows, runs
from sparda_jax.serve.bench.subject import Load, Subject, make_subject
from tests.core.support import toy

LOAD = Load(
    batch=2, context=1024, answer=64, hit=640, short=100, longs=(1000,), computed=400, steps=8, block_size=64
)  # fmt: skip
NAMES = [
    ("decode", "bare lanes"),
    ("decode", "engine"),
    ("first token behind a prefix, idle", "engine"),
    ("first token behind a prefix, all lanes decode", "engine"),
    ("first token of a short prompt, alone", "engine"),
    ("first token of a short prompt, beside a long one", "engine"),
    ("forced parking", "engine"),
]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return make_subject(toy().decoder, Mode.SPARDA, LOAD, slots="least")


def test_rows_say_what_was_measured(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SAMPLES", 2)
    monkeypatch.setattr(runs, "ROUNDS", 3)
    monkeypatch.setattr(runs, "SETTLE_SECONDS", 0.0)
    said: list[str] = []
    found = list(rows.measure(subject, said.append, targets=True))
    assert [(row.name, row.backend) for row in found] == NAMES
    bare, engine, idle, busy, alone, beside, parked = found
    assert bare.value is not None
    assert engine.value is not None
    assert len(bare.settings["all"]) == len(engine.settings["all"]) == 3
    assert sorted(engine.settings["all"])[1] == round(engine.value), "the median"
    assert engine.target == rows.ENGINE_SHARE * bare.value
    assert engine.settings["of_bare"] == round(engine.value / bare.value, 3)
    assert bare.settings["steps"] == LOAD.steps <= engine.settings["steps"]
    assert bare.settings["ms"] == round(1e3 * LOAD.batch / bare.value, 3)
    record = 2 * 64 * 16 * 4
    for row in (idle, busy):
        assert (row.settings["hit"], row.target, len(row.settings["all_ms"])) == (640, None, 2)
        assert row.floor == pytest.approx(1e3 * 10 * 2 * 2 * record / 54e9)
    assert alone.value is not None
    assert beside.value is not None
    assert (beside.settings["computed"], beside.target) == (1000 - 576, 3 * alone.value)
    assert beside.settings["times_alone"] == round(beside.value / alone.value, 2)
    assert (parked.value, parked.target, parked.settings["requests"]) == (0, 0, 4)
    assert parked.settings["parks"] >= 4
    assert len(said) == 4
    # Nobody is left, but for the prefix.
    blocks = subject.executor.blocks
    assert blocks.num_free == blocks.num_blocks - LOAD.prefix // 64


def test_a_long_prompt_that_ends_too_early_is_an_error_of_its_row(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_short(*_: object, spread: float) -> list[float]:
        raise runs.TooShort("give a longer --long")

    monkeypatch.setattr(runs, "SAMPLES", 1)
    monkeypatch.setattr(runs, "ROUNDS", 1)
    monkeypatch.setattr(runs, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(runs, "beside_a_long_prompt", too_short)
    found = {row.name: row for row in rows.measure(subject, lambda _: None, targets=True)}
    beside = found["first token of a short prompt, beside a long one"]
    assert (beside.value, beside.error, beside.met) == (None, "give a longer --long", False)
    assert found["forced parking"].met


def test_answers_that_end_before_all_lanes_decode_are_an_error_of_their_row(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = iter([range(10), range(20, 30)])

    async def in_turn(_: object) -> list[float]:
        return [float(at) for at in next(arrivals)]

    monkeypatch.setattr(runs, "_arrivals", in_turn)
    with pytest.raises(runs.TooShort, match="give a longer --answer and more --steps"):
        runs.with_engine(subject, lambda engine: runs.engine_rate(engine, subject))

    async def too_short(*_: object) -> runs.Rate:
        raise runs.TooShort("give a longer --answer")

    monkeypatch.setattr(runs, "engine_rate", too_short)
    found = itertools.islice(rows.measure(subject, lambda _: None, targets=True), 2)
    assert [(row.name, row.backend, row.error) for row in found] == [
        ("decode", "bare lanes", None),
        ("decode", "engine", "give a longer --answer"),
    ]


def test_every_prompt_begins_with_the_prefix_and_is_its_own(subject: Subject) -> None:
    prompts = [subject.prompt(number) for number in range(4)]
    assert all(tuple(prompt[: LOAD.prefix]) == subject.prefix for prompt in prompts)
    assert all(LOAD.prefix < len(prompt) < LOAD.prefix + 64 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert max(map(len, prompts)) + LOAD.answer <= LOAD.context
    assert tuple(subject.prompt(1, hit=640)[:640]) == subject.prefix[:640]


def test_the_prefix_in_the_pool_is_a_cache_like_a_prefilled_one(subject: Subject) -> None:
    """Its compressed keys are the means of its keys, so that what selects by them sees what it would see."""
    executor = subject.executor
    shared = executor.start(subject.prompt(0), runs.SamplingParams(max_tokens=1))
    assert shared.hit == LOAD.prefix
    assert shared.prefill is not None
    layer = shared.prefill.take_cache().layers[1]
    keys, means = np.asarray(layer.k), np.asarray(layer.compressed_k)
    assert keys[..., : LOAD.prefix, :].std() == pytest.approx(1, abs=0.05)
    for window in (0, 7, (LOAD.prefix - 32) // 16):
        expected = keys[:, :, 16 * window : 16 * window + 32].mean(axis=2)
        np.testing.assert_allclose(means[:, :, window], expected, atol=1e-6)
    executor.release(shared)


def test_it_runs_without_the_libraries_of_the_http_server() -> None:
    """As on a machine that has only what the model needs."""
    blocked = ("fastapi", "uvicorn", "pydantic", "starlette", "prometheus_client")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import sparda_jax.serve.bench.__main__"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_command_measures_the_bundled_model(tmp_path: Path) -> None:
    options = (
        "--batch 2 --context 4096 --slots 40 --answer 128 --hit 2048 --short 256 --long 2400 --computed 1200 --steps 16"
    )
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "sparda_jax.bench", "engine", "--model", str(BUNDLED_MODEL), *options.split()]
    subprocess.run([*command, "--json", str(file)], check=True)
    record = json.loads(file.read_text())
    assert [(row["name"], row["backend"]) for row in record["rows"]] == NAMES
    assert record["command"].startswith("python -m sparda_jax.bench engine --model")
    assert record["rows"][-1]["value"] == 0
