"""Log lines, in a process of their own: logging is set up for the whole process."""

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = r"""
import logging, socket, sys, threading, warnings
import httpx
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.logs import configure, start_console
from sparda_jax.serve.server import Server
from sparda_jax.serve.settings import Settings
from tests.serve.fakes import FakeRunner, TOKENIZER, running_engine, wait_until

log_format, access_log = sys.argv[1], sys.argv[2] == "access"
configure(log_format, access_log=access_log)
start_console(log_format).print("[bold]ready[/bold] after", "a while\nand more")
runner = FakeRunner(max_model_len=10_000)
runner.step_seconds = 0.005
with running_engine(runner) as engine, socket.create_server(("127.0.0.1", 0)) as listener:
    app = create_app(engine, TOKENIZER, ServerInfo(model="tiny", mode="sparse", vocab_size=TOKENIZER.vocab_size))
    server = Server(app, engine, Settings())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started)
    with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
        client.get("/version?secret=1", headers={"X-Request-Id": "first"})
        client.get("/a%0Ab", headers={"X-Request-Id": "second"})
        body = {"prompt": "long", "max_tokens": 5000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "third"}) as response:
            next(response.iter_lines())
        wait_until(lambda: engine.stats().running == 0)
        TOKENIZER.decode = None
        client.post("/v1/completions", json={"prompt": [5], "echo": True}, headers={"X-Request-Id": "fourth"})
    server.should_exit = True
    thread.join()
logging.getLogger("uvicorn.error").warning("of %s", "uvicorn \ud800")
logging.getLogger("elsewhere").warning("of another package")
warnings.warn("of Python")
"""


def output(*arguments: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def one(lines: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = [line for line in lines if wanted.items() <= line.items()]
    return found


def test_json() -> None:
    stdout, stderr = ([json.loads(line) for line in text.splitlines()] for text in output("json", "access"))
    for line in (*stdout, *stderr):
        assert datetime.datetime.fromisoformat(line["time"]).tzinfo is datetime.UTC
        assert line["level"] in ("INFO", "WARNING", "ERROR")
    assert [line["message"] for line in stdout[:2]] == ["ready after a while", "and more"]
    access = "sparda_jax.serve.logs.access"
    first = one(stdout, logger=access, request_id="first")
    assert (first["method"], first["path"], first["status"], first["whole"]) == ("GET", "/version", 200, True)
    assert 0 < first["duration_ms"] < 5000
    second = one(stdout, logger=access, request_id="second")
    assert (second["path"], second["status"]) == ("/a%0Ab", 404)
    assert "404" in one(stderr, logger="sparda_jax.serve.errors", request_id="second")["message"]
    third = one(stdout, logger=access, request_id="third")
    assert (third["status"], third["whole"]) == (200, False)
    assert one(stdout, logger=access, request_id="fourth")["status"] == 500
    exception = one(stderr, request_id="fourth", message="request fourth failed")["exception"]
    assert exception.startswith("Traceback")
    assert exception.splitlines()[-1].startswith("TypeError")
    assert one(stderr, logger="uvicorn.error", message="of uvicorn \ud800")["level"] == "WARNING"
    assert "request_id" not in one(stderr, logger="elsewhere", message="of another package")
    assert "of Python" in one(stderr, logger="py.warnings")["message"]


@pytest.mark.parametrize("access_log", [True, False])
def test_text(access_log: bool) -> None:
    stdout, stderr = output("text", "access" if access_log else "")
    assert stdout.startswith("ready after a while\nand more\n")
    line = r'^INFO: +127\.0\.0\.1 "GET /version" 200 in [0-9.]+ ms, request first$'
    assert bool(re.search(line, stdout, re.MULTILINE)) == access_log
    assert bool(re.search(r'"GET /a%0Ab" 404 in .*request second$', stdout, re.MULTILINE)) == access_log
    assert bool(re.search(r"request third, cut short$", stdout, re.MULTILINE)) == access_log
    assert ("request second: GET" in stderr) == access_log
    assert "ERROR:    request fourth failed\nTraceback" in stderr
    assert "WARNING:  of another package" in stderr
