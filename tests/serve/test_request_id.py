"""X-Request-Id: on every answer, the client's own where it may be, and in the log line of an error."""

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI

from sparda_jax.serve.access import Access
from sparda_jax.serve.api import ServerInfo, create_app
from tests.serve.fakes import MODEL, TOKENIZER, FakeRunner, running_engine
from tests.serve.test_bad_requests import call

TEXT = "/v1/completions"
MADE = re.compile(r"req-[0-9a-f]{32}")
ORIGIN = {"Origin": "https://page.example"}


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    with running_engine(FakeRunner()) as engine:
        info = ServerInfo(model=MODEL, mode="sparse", vocab_size=TOKENIZER.vocab_size)
        yield create_app(engine, TOKENIZER, info, Access(api_key="key", cors_origins=tuple(ORIGIN.values())))


def ask(app: FastAPI, request_id: str | bytes | None, body: Any, **headers: str) -> Any:
    given: dict[str, Any] = {"Authorization": "Bearer key", **headers}
    if request_id is not None:
        given["X-Request-Id"] = request_id
    return call(app, "POST", TEXT, headers=given, json=body)


@pytest.mark.parametrize("given", ["a", "3f0c-7", "!~" * 64])
@pytest.mark.parametrize("body", [{"prompt": "hello", "max_tokens": 1}, {"prompt": 5}])
def test_the_clients_own_id_comes_back(app: FastAPI, given: str, body: Any) -> None:
    assert ask(app, given, body).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "two words", "a\tb", "ä".encode(), b"\x00", b"a\x7f"])
def test_else_one_is_made(app: FastAPI, given: str | bytes | None) -> None:
    ids = {ask(app, given, {"prompt": 5}).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(MADE.fullmatch(made) for made in ids)


def test_every_kind_of_answer_has_one(app: FastAPI) -> None:
    stream = {"prompt": "hello", "stream": True, "max_tokens": 1}
    assert MADE.fullmatch(ask(app, None, stream).headers["x-request-id"])
    for method, path, status in (
        ("GET", "/health", 200),
        ("GET", "/nothing", 404),
        ("GET", TEXT, 401),
        ("GET", "/tokenize", 401),
    ):
        response = call(app, method, path)
        assert response.status_code == status
        assert MADE.fullmatch(response.headers["x-request-id"])
    asked = ORIGIN | {"Access-Control-Request-Method": "POST"}
    assert "x-request-id" in call(app, "OPTIONS", TEXT, headers=asked).headers
    exposed = call(app, "GET", "/health", headers=ORIGIN).headers["access-control-expose-headers"]
    assert "X-Request-Id" in exposed


@pytest.mark.parametrize(
    ("status", "level", "body", "part"),
    [
        (400, logging.INFO, {"prompt": "a", "x\ny": 1}, r"x\\ny is not a field"),
        (401, logging.INFO, {"prompt": "a"}, "API key"),
        (500, logging.ERROR, {"prompt": "this fails"}, "a device said no"),
        (200, logging.ERROR, {"prompt": "this fails", "stream": True}, "a device said no"),
        (500, logging.ERROR, {"prompt": [5], "echo": True}, "its log says why"),
    ],
)
def test_an_errors_log_line_names_it(
    app: FastAPI,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    level: int,
    body: dict[str, Any],
    part: str,
) -> None:
    caplog.set_level(logging.INFO, "sparda_jax.serve.errors")
    if "echo" in body:
        monkeypatch.setattr(TOKENIZER, "decode", None)
    headers = {"Authorization": "Bearer other"} if status == 401 else {}
    assert ask(app, "id-of-this-one", body, **headers).status_code == status
    lines = [r for r in caplog.records if r.name == "sparda_jax.serve.errors"]
    assert all("id-of-this-one" in line.getMessage() for line in lines)
    last = lines[-1]
    assert last.levelno == level
    assert re.search(part, last.getMessage())
    assert "\n" not in last.getMessage()
