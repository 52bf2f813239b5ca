"""Bodies that are too large or too slow: refused in the envelope, and the connection and the server go on."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from sparda_jax.serve.access import Access
from sparda_jax.serve.api import ServerInfo, create_app
from tests.serve.fakes import MODEL, TOKENIZER, FakeRunner, Served, running_engine, serve
from tests.serve.test_bad_requests import call, error_of

TEXT = "/v1/completions"
MIB = 1 << 20
ORIGIN = {"Origin": "https://page.example"}
ACCESS = Access(api_key="key", cors_origins=tuple(ORIGIN.values()), max_body_mib=1, upload_seconds=0.1)
BEARER = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    with running_engine(FakeRunner()) as engine:
        yield create_app(engine, TOKENIZER, ServerInfo(model=MODEL, mode="sparse", vocab_size=9), ACCESS)


class Chunks:
    """A body in pieces, and how many of them have been asked for."""

    def __init__(self, chunks: list[bytes], wait: float = 0.0) -> None:
        self.chunks, self.wait, self.sent = chunks, wait, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.sent += 1
            yield chunk
            await asyncio.sleep(self.wait)


def body_of(size: int) -> bytes:
    return b'{"prompt": 5}'.ljust(size)


def refusal(app: FastAPI, status: int, **options: Any) -> dict[str, Any]:
    response = call(app, "POST", TEXT, **options)
    assert response.headers["access-control-allow-origin"] == ORIGIN["Origin"]
    assert response.headers["x-request-id"]
    return error_of(response, status)


@pytest.mark.parametrize("length", [str(MIB + 1), "9" * 5000])
def test_a_length_beyond_the_limit_is_refused_unread(app: FastAPI, length: str) -> None:
    chunks = Chunks([body_of(MIB), b" "])
    error = refusal(app, 413, headers=BEARER | ORIGIN | {"Content-Length": length}, content=chunks)
    assert error["code"] == "body_too_large"
    assert "larger than 1 MiB" in error["message"]
    assert "--max-body-mib" in error["message"]
    assert chunks.sent == 0


def test_a_stream_beyond_the_limit_is_left(app: FastAPI) -> None:
    chunks = Chunks([b" " * (MIB // 4)] * 20)
    assert refusal(app, 413, headers=BEARER | ORIGIN, content=chunks)["code"] == "body_too_large"
    assert chunks.sent == 5
    assert refusal(app, 413, headers=BEARER | ORIGIN | {"Content-Length": "1"}, content=Chunks(chunks.chunks))


def test_up_to_the_limit_it_is_read(app: FastAPI) -> None:
    for content in (body_of(MIB), Chunks([body_of(MIB // 2), b" " * (MIB // 2)])):
        assert refusal(app, 400, headers=BEARER | ORIGIN, content=content)["param"] == "prompt"


def test_without_the_key_nothing_is_read(app: FastAPI) -> None:
    chunks = Chunks([body_of(2 * MIB)])
    refusal(app, 401, headers=ORIGIN, content=chunks)
    assert chunks.sent == 0


def test_a_body_that_does_not_arrive_is_408(app: FastAPI) -> None:
    response = call(app, "POST", TEXT, headers=BEARER, content=Chunks([b"{", b"}"], wait=30))
    error = error_of(response, 408)
    assert (error["type"], error["code"]) == ("invalid_request_error", "upload_timeout")
    assert "0.1 s (--upload-seconds)" in error["message"]
    assert response.headers["connection"] == "close"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(access=Access(max_body_mib=1, upload_seconds=0.2)) as server:
        yield server


@pytest.mark.parametrize("chunked", [False, True])
def test_a_real_client_reads_the_refusal_and_goes_on(served: Served, chunked: bool) -> None:
    with httpx.Client(base_url=served.url) as client:
        large = b" " * (8 * MIB)
        pieces = (large[i : i + MIB // 2] for i in range(0, len(large), MIB // 2))
        error_of(client.post(TEXT, content=pieces if chunked else large), 413)
        assert client.post(TEXT, json={"prompt": "hello"}).json()["choices"][0]["text"] == "hello there"


def test_a_real_connection_that_stalls_is_answered_and_closed(served: Served) -> None:
    async def stalled() -> bytes:
        reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
        writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{{".encode())
        answer = await asyncio.wait_for(reader.read(), 10)  # up to the end of the connection
        writer.close()
        return answer

    assert asyncio.run(stalled()).startswith(b"HTTP/1.1 408 ")
