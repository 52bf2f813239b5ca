"""Checkpoints answer as the library does; a server answers as its checkpoint does, over HTTP."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import uvicorn

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.checkpoint import load_model
from sparda_jax.eval import endpoint as endpoint_module
from sparda_jax.eval.endpoint import Endpoint, EndpointError
from sparda_jax.eval.prompting import Prompt, Prompter, Question
from sparda_jax.eval.ruler import make_prompts, tasks
from sparda_jax.eval.subjects import Checkpoint, _OneCapacity
from sparda_jax.library import SparDA
from sparda_jax.selection import Mode
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from tests.eval.support import bundled
from tests.serve.fakes import wait_until
from tests.serve.in_process import executor_of
from tests.serve.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def model() -> SparDA:
    return SparDA(load_model(BUNDLED_MODEL), bundled().tokenizer, mode=Mode.SPARSE, max_model_len=2048)


@pytest.mark.slow
def test_answers_are_the_librarys(model: SparDA) -> None:
    """Three prompts in batches of two, the second one filled up."""
    made = [
        make_prompts(name, tasks()[name], bundled(), length=length, seed=1, samples=count)
        for name, length, count in (("niah_single_1", 2048, 2), ("qa_1", 1800, 1))
    ]
    prompts = [prompt for of_task in made for prompt in of_task]
    subject = Checkpoint(model.runner.model, model.tokenizer, mode=Mode.SPARSE, max_model_len=2048, batch=2)
    found = subject.answers(prompts)
    for prompt, answer in zip(prompts, found, strict=True):
        (alone,) = model.generate([prompt.ids], max_new_tokens=prompt.new_tokens, return_stats=True)
        assert alone.stats is not None
        assert answer.text == alone.text
        assert answer.width == 24
        assert answer.prefill_read == alone.stats.prefill.read_fraction
    assert [prompt.question.references[0] in answer.text for prompt, answer in zip(prompts, found, strict=True)][
        :2
    ] == [
        True,
        True,
    ]


def test_one_capacity_is_the_longest_in_blocks(model: SparDA) -> None:
    runner = _OneCapacity(model.runner.model, mode=Mode.SPARSE, max_model_len=2000)
    assert runner.capacity_for(1) == runner.capacity_for(2000) == 2048


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SparDA:
    return SparDA.from_pretrained(write_checkpoint(tmp_path_factory.mktemp("tiny")), mode="sparse", max_model_len=640)


@pytest.fixture
def url(tiny: SparDA) -> Iterator[str]:
    """The real server in this process, on a port of its own."""
    engine = Engine(executor_of(tiny, max_active=2), eos_token_ids=tiny.config.eos_token_ids)
    engine.start()
    info = ServerInfo(model="tiny", mode="sparse", vocab_size=tiny.config.vocab_size, temperature=0.0)
    config = uvicorn.Config(create_app(engine, tiny.tokenizer, info), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, seconds=60)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
    engine.close()


def test_a_server_answers_as_its_checkpoint(url: str, tiny: SparDA) -> None:
    prompter = Prompter(tokenizer=tiny.tokenizer)
    # The tiny model repeats the last token, so the beginnings of the answers differ.
    asked = {" the": "hello", " q": "the grass " * 40, " 7": "fox?"}
    questions = [Question(text=text, prefix=prefix, references=("x",)) for prefix, text in asked.items()]
    prompts = [Prompt(ids=prompter.encode(question), question=question, new_tokens=6) for question in questions]
    endpoint = Endpoint(url + "/", prompter, chat=False, api_key=None, parallel=3)
    assert endpoint.model == "tiny"
    alone = Checkpoint(tiny.runner.model, tiny.tokenizer, mode=Mode.SPARSE, max_model_len=640, batch=3)
    expected = [answer.text for answer in alone.answers(prompts)]
    assert [answer.text for answer in endpoint.answers(prompts)] == expected
    assert len(set(expected)) > 1
    # A conversation has no place for the answer's first words.
    without = [
        Prompt(ids=tiny.tokenizer.encode_chat(prompter.messages(q)), question=q, new_tokens=6) for q in questions
    ]
    conversing = Endpoint(url, prompter, chat=True, api_key="key", parallel=1)
    assert [answer.text for answer in conversing.answers(prompts)] == [answer.text for answer in alone.answers(without)]
    too_long = Prompt(ids=[5] * 700, question=questions[0], new_tokens=6)
    with pytest.raises(EndpointError, match=r"/v1/completions answers 400: .*700"):
        endpoint.answers([too_long])


def test_an_answer_that_did_not_begin_is_empty(tiny: SparDA, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: dict[str, Any] = {"/v1/models": {"data": [{"id": "m"}]}}
    replies["/v1/chat/completions"] = {"choices": [{"message": {"content": None}}]}
    monkeypatch.setattr(Endpoint, "_ask", lambda self, path, body=None: replies[path])
    endpoint = Endpoint("http://x", Prompter(tokenizer=tiny.tokenizer), chat=True, api_key=None, parallel=1)
    prompt = Prompt(ids=[1], question=Question(text="q", prefix="", references=("none",)), new_tokens=1)
    assert [answer.text for answer in endpoint.answers([prompt])] == [""]


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 99\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
    ],
)
def test_what_speaks_no_http_or_stops_is_named(tiny: SparDA, reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as client:
                client.recv(65536)
                client.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EndpointError, match=f"{address}/v1/models (can't be read: .|answers 500)"):
            Endpoint(address, Prompter(tokenizer=tiny.tokenizer), chat=False, api_key=None, parallel=1)
        thread.join()


def test_a_server_that_says_nothing_is_not_waited_for_forever(tiny: SparDA, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the system accepts, nobody answers
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(EndpointError, match=f"{address}/v1/models can't be read: timed out"):
            Endpoint(address, Prompter(tokenizer=tiny.tokenizer), chat=False, api_key=None, parallel=1)


@pytest.mark.parametrize("url", ["http://[::", "http://127.0.0.1:80 x", "http://a\nb"])
def test_what_is_no_address_is_named(tiny: SparDA, url: str) -> None:
    with pytest.raises(EndpointError, match="can't be read"):
        Endpoint(url, Prompter(tokenizer=tiny.tokenizer), chat=False, api_key=None, parallel=1)


def test_what_is_no_such_server_is_named(tiny: SparDA) -> None:
    prompter = Prompter(tokenizer=tiny.tokenizer)

    class Odd(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": []}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Odd) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(EndpointError, match="lists no model"):
            Endpoint(address, prompter, chat=False, api_key=None, parallel=1)
        thread.join()
    with pytest.raises(EndpointError, match=r"can't be read"):
        Endpoint(address, prompter, chat=False, api_key=None, parallel=1)
    with pytest.raises(EndpointError, match=r"url=file:///x is no HTTP address"):
        Endpoint("file:///x", prompter, chat=False, api_key=None, parallel=1)
