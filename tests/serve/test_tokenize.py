"""/tokenize, /detokenize and /version: the ids that a completion or a chat would begin with."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import sparda_jax
from sparda_jax.serve.api import ServerInfo, create_app
from tests.serve.fakes import MODEL, TOKENIZER, FakeRunner, running_engine
from tests.serve.test_bad_requests import error_of
from tests.serve.tiny_tokenizer import BOS

MESSAGES = [{"role": "user", "content": "what is the number?"}]


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    with running_engine(FakeRunner()) as engine:
        yield create_app(engine, TOKENIZER, ServerInfo(model=MODEL, mode="sparse", vocab_size=TOKENIZER.vocab_size))


def send(app: FastAPI, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    async def sent() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(sent())


@pytest.mark.parametrize("text", ["hello", "a🙂é 日本", "</s> in the text", ""])
def test_a_prompt(app: FastAPI, text: str) -> None:
    ids = TOKENIZER.encode(text)
    expected = {"tokens": ids, "count": len(ids), "max_model_len": 200, "token_strs": None}
    assert send(app, "/tokenize", {"prompt": text}).json() == expected
    bare = send(app, "/tokenize", {"model": MODEL, "prompt": text, "add_special_tokens": False}).json()
    assert [BOS, *bare["tokens"]] == ids
    assert send(app, "/detokenize", {"tokens": bare["tokens"]}).json() == {"prompt": text}
    spelled = send(app, "/tokenize", {"prompt": text, "return_token_strs": True}).json()["token_strs"]
    assert len(spelled) == len(ids)
    assert spelled[0] == "<s>"


def test_messages_give_what_a_chat_begins_with(app: FastAPI) -> None:
    tokens = send(app, "/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert tokens == TOKENIZER.encode_chat(MESSAGES)
    chat = send(app, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == len(tokens)
    without = {"messages": MESSAGES, "add_generation_prompt": False, "add_special_tokens": False}
    shorter = send(app, "/tokenize", without).json()["tokens"]
    assert shorter == TOKENIZER.encode_chat(MESSAGES, add_generation_prompt=False) != tokens


def test_more_tokens_than_the_context_holds_are_counted(app: FastAPI) -> None:
    assert send(app, "/tokenize", {"prompt": "hello " * 250}).json()["count"] > 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a" * (200 * TOKENIZER.longest_token + 1)}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "stream": True}, "stream"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [5, TOKENIZER.vocab_size]}, "tokens"),
    ],
)
def test_bad_fields_are_named(app: FastAPI, path: str, body: dict[str, Any], field: str) -> None:
    error = error_of(send(app, path, body))
    assert error["param"] == field
    assert field.split("[")[0] in error["message"] or error["code"] == "context_length_exceeded"


def test_another_model_is_404_and_requests_are_counted(app: FastAPI) -> None:
    assert error_of(send(app, "/tokenize", {"prompt": "a", "model": "other"}), 404)["param"] == "model"
    send(app, "/detokenize", {"tokens": []})
    metrics = send(app, "/metrics").text
    assert 'sparda_requests_total{endpoint="tokenize",status="404"} 1.0' in metrics
    assert 'sparda_requests_total{endpoint="detokenize",status="200"}' in metrics


def test_version(app: FastAPI) -> None:
    assert send(app, "/version").json() == {"version": sparda_jax.__version__}
