"""Profiles over HTTP: one at a time, bounded, behind the key, and what `bench step` says of a CPU's."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from sparda_jax.bench.__main__ import app as bench
from sparda_jax.decode_plan import GRAPHS_IN_PROFILES
from sparda_jax.library import SparDA
from sparda_jax.profiling import Profiler
from sparda_jax.serve.access import OPEN, Access
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from tests.serve.fakes import MODEL, TOKENIZER, FakeRunner, running_engine, wait_until
from tests.serve.in_process import executor_of
from tests.serve.test_bad_requests import call, error_of

INFO = ServerInfo(model=MODEL, mode="sparse", vocab_size=TOKENIZER.vocab_size, temperature=0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(FakeRunner()) as running:
        yield running


@pytest.fixture
def profiler(tmp_path: Path) -> Iterator[Profiler]:
    made = Profiler(tmp_path, max_seconds=60)
    yield made
    made.close()


def app_of(engine: Engine, profiler: Profiler | None, access: Access = OPEN) -> FastAPI:
    return create_app(engine, TOKENIZER, INFO, access, profiler=profiler)


def written(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.xplane.pb"))


def test_a_profile_from_start_to_stop(engine: Engine, profiler: Profiler, tmp_path: Path) -> None:
    app = app_of(engine, profiler)
    begun = call(app, "POST", "/start_profile")
    assert begun.status_code == 200
    folder = Path(begun.json()["profile"])
    assert (folder.parent, begun.json()["max_seconds"]) == (tmp_path, 60)
    error = error_of(call(app, "POST", "/start_profile"), 409)
    assert error["message"] == f"a profile is running already, into {folder}; stop it first"
    # The server goes on beside it.
    assert call(app, "POST", "/v1/completions", json={"prompt": "hello"}).status_code == 200
    ended = call(app, "POST", "/stop_profile")
    assert (ended.status_code, ended.json()) == (200, begun.json())
    assert len(written(folder)) == 1
    error = error_of(call(app, "POST", "/stop_profile"), 409)
    assert "no profile is running; one ends by itself after 60 seconds" in error["message"]
    other = Path(call(app, "POST", "/start_profile").json()["profile"])
    assert other != folder
    call(app, "POST", "/stop_profile")
    drawn = CliRunner().invoke(bench, ["step", str(folder), "--out", str(tmp_path / "step")])
    said = " ".join(drawn.output.replace("│", " ").split())
    assert (drawn.exit_code, "shows 0 GPUs at work (a CPU's profile has no lanes of a GPU)" in said) == (2, True), said


def test_a_forgotten_profile_ends_by_itself(engine: Engine, tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, max_seconds=0.3)
    app = app_of(engine, profiler)
    first = Path(call(app, "POST", "/start_profile").json()["profile"])
    wait_until(lambda: bool(written(first)))
    wait_until(lambda: call(app, "POST", "/stop_profile").status_code == 409)
    # What was to end the first one, and comes late, does not end another one.
    profiler.max_seconds = 60
    profiler.start()
    profiler._end(first)
    assert len(written(profiler.stop())) == 1
    profiler.close()
    assert len(written(tmp_path)) == 2


def test_one_that_runs_is_written_at_the_end(profiler: Profiler) -> None:
    folder = profiler.start()
    profiler.close()
    assert len(written(folder)) == 1


def test_a_profile_that_something_else_runs_is_told(engine: Engine, profiler: Profiler, tmp_path: Path) -> None:
    app = app_of(engine, profiler)
    with jax.profiler.trace(tmp_path / "other"):
        error = error_of(call(app, "POST", "/start_profile"), 409)
    assert error["message"].startswith("no profile was started: ")
    assert call(app, "POST", "/start_profile").status_code == 200


def test_a_profile_that_cannot_be_written_is_500_and_over(
    engine: Engine, profiler: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_of(engine, profiler)
    call(app, "POST", "/start_profile")
    stop = jax.profiler.stop_trace

    def full() -> None:
        stop()
        raise OSError("no space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    error = error_of(call(app, "POST", "/stop_profile"), 500)
    assert "could not be written" in error["message"]
    assert "no space left on device" in error["message"]
    monkeypatch.undo()
    assert call(app, "POST", "/start_profile").status_code == 200


def test_after_a_folder_that_was_taken_away_profiles_go_on(engine: Engine, tmp_path: Path) -> None:
    """JAX keeps a profile that it could not write, and with it the only place for one."""
    folder = tmp_path / "profiles"
    profiler = Profiler(folder, max_seconds=60)
    app = app_of(engine, profiler)
    path = Path(call(app, "POST", "/start_profile").json()["profile"])
    path.rmdir()
    path.write_text("in the way")
    assert "could not be written" in error_of(call(app, "POST", "/stop_profile"), 500)["message"]
    assert call(app, "POST", "/start_profile").status_code == 409
    path.unlink()
    again = Path(call(app, "POST", "/start_profile").json()["profile"])
    assert call(app, "POST", "/stop_profile").status_code == 200
    assert len(written(again)) == 1
    # A folder that can't be written is told at the start, and not when a profile is lost.
    shutil.rmtree(folder)
    folder.write_text("in the way")
    error = error_of(call(app, "POST", "/start_profile"), 500)
    assert f"no profile was started: {folder} can't be written" in error["message"]


def test_profiles_need_the_key_and_the_option(engine: Engine, profiler: Profiler, tmp_path: Path) -> None:
    guarded = app_of(engine, profiler, Access(api_key="secret"))
    for path in ("/start_profile", "/stop_profile"):
        assert error_of(call(guarded, "POST", path), 401)["code"] == "invalid_api_key"
        error_of(call(app_of(engine, None), "POST", path), 404)
        error_of(call(app_of(engine, profiler), "GET", path), 405)
    assert not written(tmp_path)
    headers = {"Authorization": "Bearer secret"}
    assert call(guarded, "POST", "/start_profile", headers=headers).status_code == 200


def test_steps_of_a_server_with_profiles_show_their_graph(checkpoint: Path, tmp_path: Path) -> None:
    model = SparDA.from_pretrained(checkpoint, max_model_len=256)
    for profile, shown in ((None, False), (tmp_path, True)):
        plan = executor_of(model, profile=profile, max_active=1).lanes.plan
        assert (GRAPHS_IN_PROFILES in plan.compiler_options) == plan.profiled == shown
