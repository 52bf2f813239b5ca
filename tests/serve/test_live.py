"""What only a live connection shows: disconnects, a full queue, health and metrics over HTTP."""

import re
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from sparda_jax.serve import handler
from tests.serve.fakes import FakeRunner, Served, serve, wait_until

LONG = {"prompt": "anything", "max_tokens": 5000, "ignore_eos": True}


@pytest.fixture
def served() -> Iterator[Served]:
    runner = FakeRunner(max_model_len=10_000, num_blocks=10_000 // 64 + 1)  # one that may fill the context
    runner.step_seconds = 0.005
    with serve(runner, max_active=1, max_queue=1) as server:
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        yield server


def running(served: Served) -> int:
    return served.engine.stats().running


def test_a_streaming_client_that_leaves_frees_its_place(served: Served) -> None:
    with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert running(served) == 1
    wait_until(lambda: running(served) == 0)
    steps = len(served.runner.log)
    assert steps < 1000
    text = httpx.post(f"{served.url}/v1/completions", json={"prompt": "hello"}).json()["choices"][0]["text"]
    assert text == "hello there"


def test_a_waiting_client_that_leaves_frees_its_place(served: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=LONG, timeout=httpx.Timeout(30, read=0.5))
    wait_until(lambda: running(served) == 0)
    assert len(served.runner.log) < 1000
    assert 'sparda_requests_total{endpoint="completions",status="499"} 1.0' in httpx.get(f"{served.url}/metrics").text


def test_a_silent_stream_is_kept_alive(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments while the prompt is prefilled, which OpenAI's client passes over; the answer is whole."""
    monkeypatch.setattr(handler, "KEEP_ALIVE_SECONDS", 0.05)
    served.runner.hold = threading.Event()
    body = {"prompt": "hello", "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(6)] == [": keep-alive", ""] * 3
        served.runner.hold.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    monkeypatch.setattr(handler, "KEEP_ALIVE_SECONDS", 0.001)  # and between the tokens, none of which is lost
    served.runner.hold = threading.Event()
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        threading.Timer(0.1, served.runner.hold.set).start()
        chunks = client.completions.create(model="tiny", prompt="hello", stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "hello there"


def prompt_tokens(served: Served) -> float:
    found = re.search(r"^sparda_prompt_tokens_total (\S+)$", httpx.get(f"{served.url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_full_queue_is_429_for_all_answers_of_a_request(served: Served) -> None:
    served.runner.hold = threading.Event()
    with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG | {"stream": True}):
        wait_until(lambda: running(served) == 1)
        before = prompt_tokens(served)
        full = httpx.post(f"{served.url}/v1/completions", json={"prompt": "hello", "n": 2})
        assert prompt_tokens(served) == before > 0  # of those that were taken in
        assert full.status_code == 429
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert full.headers["retry-after"] == "1"
        assert served.engine.stats().waiting == 0  # the half that had a place has given it up
    served.runner.hold.set()
    wait_until(lambda: running(served) == 0)


def test_health_over_http(served: Served) -> None:
    healthy = httpx.get(f"{served.url}/health")
    assert (healthy.status_code, healthy.json()["status"]) == (200, "ready")
    served.engine.close()
    ill = httpx.get(f"{served.url}/health")
    assert ill.status_code == 503
    assert ill.json()["detail"]
    refused = httpx.post(f"{served.url}/v1/completions", json={"prompt": "hello"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "unavailable"


def test_metrics_count_what_happened(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "hello"}).json()
    httpx.post(f"{served.url}/v1/completions", json={"prompt": 5})
    text = httpx.get(f"{served.url}/metrics").text
    values = dict(re.findall(r"^(sparda_\S+) (\S+)$", text, re.MULTILINE))
    assert float(values["sparda_prompt_tokens_total"]) == answer["usage"]["prompt_tokens"]
    assert float(values["sparda_generated_tokens_total"]) == answer["usage"]["completion_tokens"]
    assert values['sparda_requests_total{endpoint="completions",status="200"}'] == "1.0"
    assert values['sparda_requests_total{endpoint="completions",status="400"}'] == "1.0"
    assert values["sparda_time_to_first_token_seconds_count"] == "1.0"
    assert float(values["sparda_time_per_output_token_seconds_sum"]) >= 0.005
    assert values["sparda_sequences_running"] == values["sparda_sequences_queued"] == "0.0"
