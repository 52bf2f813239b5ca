"""The API key and CORS: who gets an answer, and that every error keeps its envelope and its headers."""

import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from sparda_jax.serve import launch
from sparda_jax.serve.__main__ import app as command
from sparda_jax.serve.access import Access
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.settings import Settings
from tests.serve.fakes import MODEL, TOKENIZER, FakeRunner, running_engine, serve
from tests.serve.test_bad_requests import call, error_of

KEY = "sk-a-secret-of-this-test"
ORIGIN = "https://page.example"
BEARER = {"Authorization": f"Bearer {KEY}"}
INFO = ServerInfo(model=MODEL, mode="sparse", vocab_size=TOKENIZER.vocab_size, temperature=0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(FakeRunner()) as running:
        yield running


@pytest.fixture
def app(engine: Engine) -> FastAPI:
    return create_app(engine, TOKENIZER, INFO, Access(api_key=KEY, cors_origins=(ORIGIN,)))


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY.upper()}",
        f"Bearer Bearer {KEY}",
        b"Bearer \xff\xfe",
    ],
)
def test_without_the_key_it_is_401(app: FastAPI, header: str | bytes | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1"),
        ("GET", "/v1/no/such/path"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ):
        response = call(app, method, path, headers=headers, content=b"not read")
        error = error_of(response, 401)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"


def test_with_the_key_and_on_open_paths(app: FastAPI) -> None:
    for scheme in ("Bearer", "bearer"):
        body = {"prompt": "hello"}
        answer = call(app, "POST", "/v1/completions", headers={"Authorization": f"{scheme} {KEY}"}, json=body)
        assert answer.json()["choices"][0]["text"] == "hello there"
    assert call(app, "POST", "/tokenize", headers=BEARER, json={"prompt": "a"}).status_code == 200
    for path in ("/health", "/metrics", "/version"):
        assert call(app, "GET", path).status_code == 200


def test_the_official_client_and_the_key() -> None:
    with serve(access=Access(api_key=KEY)) as served:
        url = f"{served.url}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as right:
            assert right.models.list().data[0].id == MODEL
        with openai.OpenAI(base_url=url, api_key="other", max_retries=0) as wrong:
            with pytest.raises(openai.AuthenticationError) as caught:
                wrong.models.list()
            assert caught.value.code == "invalid_api_key"


def test_the_key_is_never_logged(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    call(app, "GET", "/v1/models", headers=BEARER)
    call(app, "POST", "/v1/completions", headers=BEARER, content=b"{")
    call(app, "POST", "/v1/completions", headers={"Authorization": f"Bearer {KEY}x"}, content=b"{")
    assert KEY not in caplog.text
    assert KEY not in repr((app.user_middleware, Access(api_key=KEY)))


@pytest.mark.parametrize("given", [{"env": {"SPARDA_API_KEY": KEY}}, {"args": ["--api-key", KEY]}])
def test_the_key_from_the_environment_or_the_command_line(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(launch, "serve", lambda settings, console: seen.append(settings))
    result = CliRunner().invoke(command, [*given.get("args", []), "--cors-origin", ORIGIN], env=given.get("env"))
    assert result.exit_code == 0, result.output
    assert (seen[0].api_key, seen[0].cors_origins) == (KEY, (ORIGIN,))
    assert KEY not in CliRunner().invoke(command, ["--help"], env=given.get("env")).output


def test_pages_of_an_origin_can_read_answers_and_errors(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    before = call(
        app,
        "OPTIONS",
        "/v1/completions",
        headers=asked | {"Access-Control-Request-Headers": "authorization, x-stainless-os"},
    )
    assert before.status_code == 200  # a preflight carries no key
    assert before.headers["access-control-allow-origin"] == ORIGIN
    assert "x-stainless-os" in before.headers["access-control-allow-headers"]
    monkeypatch.setattr(TOKENIZER, "decode", None)  # an unforeseen error below
    for status, options in (
        (200, {"headers": BEARER, "json": {"prompt": "hello", "max_tokens": 1}}),
        (400, {"headers": BEARER, "json": {"prompt": 5}}),
        (401, {"headers": {}, "json": {"prompt": "hello"}}),
        (500, {"headers": BEARER, "json": {"prompt": [5], "echo": True}}),
    ):
        options["headers"] = options["headers"] | {"Origin": ORIGIN}
        response = call(app, "POST", "/v1/completions", **options)
        assert response.headers["access-control-allow-origin"] == ORIGIN
        if status != 200:
            error_of(response, status)


def test_other_pages_can_not(app: FastAPI, engine: Engine) -> None:
    headers = {"Origin": "https://other.example"}
    assert "access-control-allow-origin" not in call(app, "GET", "/health", headers=headers).headers
    closed = create_app(engine, TOKENIZER, INFO)
    assert "access-control-allow-origin" not in call(closed, "GET", "/health", headers={"Origin": ORIGIN}).headers
    asked = headers | {"Access-Control-Request-Method": "POST"}
    assert call(app, "OPTIONS", "/v1/completions", headers=asked).status_code == 400
