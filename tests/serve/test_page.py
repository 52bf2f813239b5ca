"""The page at / and /stats: what is served, and that the numbers are those of /metrics."""

import base64
import hashlib
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from sparda_jax.serve.access import Access
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.page import PAGE, Placement
from tests.serve.fakes import MODEL, TOKENIZER, FakeRunner, running_engine
from tests.serve.test_bad_requests import call

INFO = ServerInfo(model=MODEL, mode="sparse", vocab_size=TOKENIZER.vocab_size, temperature=0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(FakeRunner(), max_queue=7) as running:
        yield running


@pytest.fixture
def app(engine: Engine) -> FastAPI:
    placement = Placement(device="a device", slots_per_lane=3, blocks_per_lane=5, kv_host_dtype="int8")
    return create_app(engine, TOKENIZER, INFO, Access(api_key="key"), placement)


def stats_of(app: FastAPI) -> dict[str, Any]:
    response = call(app, "GET", "/stats")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    return response.json()


def test_the_page_lets_only_its_own_code_run(app: FastAPI) -> None:
    response = call(app, "GET", "/")
    assert (response.status_code, response.text) == (200, PAGE)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        assert policy[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def test_the_page_asks_nobody_else_and_makes_no_html() -> None:
    assert re.findall(r"https?://|//[a-z]+\.", PAGE) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| on[a-z]+=| style=", PAGE) == []


def test_every_place_in_the_page_is_filled() -> None:
    """What fills them is compared with the metrics of a real server in test_launch.py."""
    assert set(re.findall(r'(?:show|grow|at|number)\("([a-z0-9-]+)"', PAGE)) == set(re.findall(r' id="(.*?)"', PAGE))


def test_stats_are_the_numbers_of_metrics(app: FastAPI) -> None:
    key = {"Authorization": "Bearer key"}
    for body in ({"prompt": "hello"}, {"prompt": "emoji", "n": 2}, {"prompt": 5}):
        call(app, "POST", "/v1/completions", headers=key, json=body)
    text = call(app, "GET", "/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert 'sparda_requests_total{endpoint="completions",status="400"}' in lines
    assert stats_of(app)["metrics"] == {name: float(value) for name, value in lines.items()}


def test_what_the_server_is(engine: Engine, app: FastAPI) -> None:
    began = time.time() - INFO.created
    found = stats_of(app)
    later = stats_of(app)
    assert later["time"] > found["time"]
    server = found["server"]
    assert began - 1 <= server["uptime_seconds"] <= time.time() - INFO.created + 1
    expected = {
        "model": MODEL, "mode": "sparse", "status": "ready", "detail": "", "lanes": 4, "max_queue": 7, "chat": True,
        "needs_key": True, "max_model_len": 200, "device": "a device", "slots_per_lane": 3, "blocks_per_lane": 5,
        "kv_host_dtype": "int8",
    }  # fmt: skip
    assert expected.items() <= server.items()
    assert "key" not in server
    open_to_all = stats_of(create_app(engine, TOKENIZER, INFO))["server"]
    assert (open_to_all["needs_key"], open_to_all["device"]) == (False, None)


def test_a_number_that_is_none_does_not_break_the_rest(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "cache_stats", lambda: {"odd": (math.nan, "Not a number."), "even": (2.0, "Two.")})
    metrics = stats_of(create_app(engine, TOKENIZER, INFO))["metrics"]
    assert (metrics["sparda_odd"], metrics["sparda_even"]) == (None, 2.0)
