"""Every bad request is a 400 in OpenAI's envelope that names the field, before any work, and the server goes on."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from sparda_jax.tokenizer import Tokenizer
from tests.serve.fakes import MODEL, TOKENIZER, FakeRunner, running_engine
from tests.serve.tiny_tokenizer import train_backend

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
RUNNER = FakeRunner()


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    with running_engine(RUNNER, max_active=2, max_queue=4) as engine:
        yield create_app(engine, TOKENIZER, ServerInfo(model=MODEL, mode="sparse", vocab_size=TOKENIZER.vocab_size))


def call(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


BOTH = [
    ("temperature", "hot"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_p", "1"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("seed", "x"),
    ("seed", 2**64),
    ("seed", 1.5),
    ("n", 0),
    ("n", 129),
    ("n", 7),  # more than can ever run and wait
    ("n", "2"),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2.5),
    ("max_tokens", "10"),
    ("max_tokens", True),
    ("max_tokens", 10**30),
    ("max_tokens", 200),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", "x" * 1001),
    ("stop", {"a": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids[1]", [5, "a"]),
    ("stop_token_ids[0]", [True]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [5, TOKENIZER.vocab_size]),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),  # without stream
    ("stream_options", 5),
    ("ignore_eos", "no"),
    ("return_stats", 1),
    ("model", 5),
    ("presence_penalty", 2.5),
    ("presence_penalty", "0"),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", True),
    ("repetition_penalty", 0),
    ("repetition_penalty", 101),
    ("repetition_penalty", [1.1]),
    ("min_p", 1.1),
    ("min_p", -0.1),
    ("min_p", False),
    ("min_tokens", -1),
    ("min_tokens", 1.5),
    ("min_tokens", True),
    ("min_tokens", 10**30),
    ("min_tokens", 200),
    ("logit_bias", []),
    ("logit_bias", 5),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {" 5": 1}),
    ("logit_bias", {"05": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": None}),
    ("logit_bias", {"5": 100.5}),
    ("logit_bias", {"5": float("nan")}),
    ("logit_bias", {str(TOKENIZER.vocab_size): 1}),
    ("logit_bias", {"\ud83d": 1}),
    ("logit_bias", {str(token): 1 for token in range(301)}),
    ("logprobs", "yes"),
    ("logprobs", 21),
    ("logprobs", 1.5),
    ("tools", [{"type": "function"}]),
    ("response_format", "json_object"),
    ("response_format.type", {"type": "xml"}),
    ("response_format.json_schema", {"type": "json_schema"}),
    ("response_format.json_schema", {"type": "text", "json_schema": {"name": "a", "schema": {}}}),
    ("response_format.json_schema.name", {"type": "json_schema", "json_schema": {"schema": {}}}),
    ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"name": "a"}}),
    *(
        ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
        for schema in (
            5,
            {"type": "nothing"},
            {"type": "object", "properties": 3},
            {"$ref": "#/$defs/missing"},
            {"type": "string", "pattern": "("},
            {"not": {"type": "string"}},
            {"type": "array", "uniqueItems": True},
            {"enum": ["\ud83d"]},
        )
    ),
    ("no_such_field", 1),
]
CHAT_ONLY = [
    ("messages", None),
    ("messages", []),
    ("messages", "hello"),
    ("messages", {"role": "user", "content": "hello"}),
    ("messages[0]", ["hello"]),
    ("messages[0].role", [{"content": "hello"}]),
    ("messages[0].role", [{"role": "robot", "content": "hello"}]),
    ("messages[0].role", [{"role": "tool", "content": "hello"}]),
    ("messages[1].role", [*MESSAGES, {"role": 5, "content": "hello"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": None}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[0].content", [{"role": "user", "content": ["hello"]}]),
    ("messages[0].content", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    ("messages[0].content", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages[0].content", [{"role": "user", "content": "\ud83d"}]),
    ("messages[0].name", [{"role": "user", "content": "a", "name": 5}]),
    ("messages[0].tool_calls", [{"role": "assistant", "content": "a", "tool_calls": []}]),
]
CHAT_FIELDS = [
    ("max_completion_tokens", 0),
    ("max_completion_tokens", 500),
    ("top_logprobs", 2),  # without logprobs
    ("top_logprobs", -1),
    ("top_logprobs", 21),
    ("top_logprobs", True),
    ("logprobs", 1),
    ("tool_choice", "required"),
    ("functions", [{}]),
    ("function_call", {"name": "f"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "x"}),
    ("reasoning_effort", "low"),
    ("verbosity", "low"),
    ("web_search_options", {}),
    ("chat_template_kwargs", 5),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"bos_token": "x"}),
    ("chat_template_kwargs", {"x": "\ud83d"}),
    ("chat_template_kwargs", {"x": json.loads("[" * 400 + "]" * 400)}),
    ("chat_template_kwargs", json.loads('{"x":' * 400 + "1" + "}" * 400)),
    ("prompt", "hello"),
]
TEXT_ONLY = [
    ("prompt", None),
    ("prompt", []),
    ("prompt", 5),
    ("prompt", [[]]),
    ("prompt", ["a", 5]),
    ("prompt", ["a", [5]]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", [[5, "a"]]),
    ("prompt", [-1]),
    ("prompt", [TOKENIZER.vocab_size]),
    ("prompt", [10**30]),
    ("prompt", "\ud83d"),
    ("prompt", ["a", "\ud83d"]),
    ("prompt", ["a"] * 7),  # more than can ever run and wait
    ("prompt", "hello " * 500),
    ("echo", "yes"),
    ("logprobs", True),
    ("logprobs", -1),
    ("top_logprobs", 2),
    ("best_of", 2),
    ("best_of", 0),
    ("suffix", "end"),
    ("messages", MESSAGES),
]


def cases() -> Iterator[Any]:
    for path, base in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "hello"})):
        for field, value in BOTH:
            yield pytest.param(
                path, base | {re.split(r"[\[.]", field)[0]: value}, field, id=f"{path}-{field}-{str(value)[:20]}"
            )
    for field, value in CHAT_ONLY:
        yield pytest.param(CHAT, {"messages": value}, field, id=f"{field}-{str(value)[:30]}")
    for field, value in CHAT_FIELDS:
        yield pytest.param(CHAT, {"messages": MESSAGES, field: value}, field, id=f"{field}-{str(value)[:20]}")
    for field, value in TEXT_ONLY:
        yield pytest.param(TEXT, {"prompt": "hello", field: value}, field, id=f"{field}-{str(value)[:20]}")


@pytest.mark.parametrize(("path", "body", "field"), list(cases()))
def test_bad_field_is_named(app: FastAPI, path: str, body: dict[str, Any], field: str) -> None:
    steps = len(RUNNER.log)
    error = error_of(call(app, "POST", path, content=json_of(body)))
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert field.split("[")[0].split(".")[0] in error["message"]
    assert len(RUNNER.log) == steps


def json_of(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "n", "seed", "presence_penalty"])
def test_numbers_that_are_none(app: FastAPI, field: str, number: str) -> None:
    body = f'{{"prompt": "hello", "{field}": {number}}}'.encode()
    assert error_of(call(app, "POST", TEXT, content=body))["param"] == field


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"null", b'"hello"', b"\xff\xfe", b"[" * 100_000, b'{"seed": ' + b"9" * 10_000 + b"}"],
)
def test_bodies_that_are_no_json_object(app: FastAPI, body: bytes) -> None:
    assert error_of(call(app, "POST", CHAT, content=body))["code"] == "invalid_json"


@pytest.mark.parametrize("name", ["\ud83d", "x" * 1_000_000])
def test_field_names_that_cannot_be_repeated(app: FastAPI, name: str) -> None:
    """Half of a surrogate pair can't be sent back, and a megabyte should not be."""
    for body in (
        {"prompt": "a", name: 1},
        {"prompt": "a", "stream": True, "stream_options": {name: 1}},
        {"prompt": "a", "model": name},
    ):
        response = call(app, "POST", TEXT, content=json_of(body))
        error_of(response, 404 if "model" in body else 400)
        assert len(response.content) < 10_000


@pytest.mark.parametrize("top_k", [2**31, 2**63, 10**30])
def test_a_top_k_beyond_any_vocabulary_is_none(top_k: int) -> None:
    state = SamplingState.of([SamplingParams(top_k=top_k)])
    assert state.top_k.tolist() == [2**31 - 1]


def test_what_cannot_fit_is_refused_before_it_is_tokenized(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenized(*args: object, **options: object) -> list[int]:
        raise AssertionError

    monkeypatch.setattr(TOKENIZER, "encode", tokenized)
    monkeypatch.setattr(TOKENIZER, "encode_chat", tokenized)
    text = "a" * (200 * TOKENIZER.longest_token + 1)
    half = {"role": "user", "content": text[: len(text) // 2 + 1]}
    for path, body in ((TEXT, {"prompt": [text]}), (CHAT, {"messages": [half, half]})):
        error = error_of(call(app, "POST", path, json=body))
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in body


def test_nested_stream_options(app: FastAPI) -> None:
    body = {"prompt": "hello", "stream": True, "stream_options": {"include_usage": "yes"}}
    assert error_of(call(app, "POST", TEXT, json=body))["param"] == "stream_options.include_usage"


def test_too_long_prompts_tell_the_numbers(app: FastAPI) -> None:
    ids = [70] * 200
    error = error_of(call(app, "POST", TEXT, json={"prompt": ids}))
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == "the prompt has 200 tokens; the context holds 200, answer included (--max-model-len)"
    error = error_of(call(app, "POST", TEXT, json={"prompt": ids[:150], "max_tokens": 60}))
    assert error["param"] == "max_tokens"
    assert "150 tokens" in error["message"]
    assert "at most 50 are left" in error["message"]


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (TEXT, {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        (CHAT, {"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
        (TEXT, {"min_tokens": 1, "stop_token_ids": list(range(33))}, "stop_token_ids"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_fields_that_do_not_go_together(app: FastAPI, path: str, more: dict[str, Any], field: str) -> None:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    assert error_of(call(app, "POST", path, json=base | more))["param"] == field


def test_both_limits_at_once(app: FastAPI) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 5}
    assert error_of(call(app, "POST", CHAT, json=body))["param"] == "max_tokens"


def test_the_templates_own_refusal_is_passed_on(app: FastAPI) -> None:
    bare = create_app_without_template()
    assert "no chat template" in error_of(call(bare, "POST", CHAT, json={"messages": MESSAGES}))["message"]


def create_app_without_template() -> FastAPI:
    engine = Engine(RUNNER, eos_token_ids=[])
    return create_app(engine, Tokenizer(train_backend(), {}), ServerInfo(model=MODEL, mode="sparse", vocab_size=9))


def test_unknown_paths_methods_and_models(app: FastAPI) -> None:
    assert error_of(call(app, "GET", "/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(call(app, "GET", CHAT), 405)
    assert error_of(call(app, "POST", TEXT, json={"prompt": "hello", "model": "other"}), 404)["param"] == "model"


def test_an_unforeseen_exception_is_500_in_the_envelope(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr(TOKENIZER, "encode", broken)
    assert error_of(call(app, "POST", TEXT, json={"prompt": "hello"}), 500)["type"] == "server_error"


def test_the_server_still_answers(app: FastAPI) -> None:
    """Last in this file: nothing above has harmed it."""
    response = call(app, "POST", TEXT, json={"prompt": "hello", "temperature": 0})
    assert response.json()["choices"][0]["text"] == "hello there"
    assert call(app, "GET", "/health").status_code == 200
    schema = call(app, "GET", "/openapi.json").json()
    assert "messages" in str(schema["paths"][CHAT]["post"]["requestBody"])
