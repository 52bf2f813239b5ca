"""What operators are given: Dockerfile, systemd unit, generated reference, and pages that name only what there is."""

import http.server
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sparda_jax.serve import server
from sparda_jax.serve.errors import ApiError
from sparda_jax.serve.protocol import ChatRequest, CompletionRequest, parse_request
from sparda_jax.serve.settings import Settings
from tests.reference import COMMANDS, openapi, options, reference
from tests.test_project import LINKED, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = ROOT / "deploy" / "sparda.service"
PAGES = ("docs/operating.md", "docs/scaling-out.md", "docs/reference.md", "scripts/lm_eval/README.md")
STOP_SECONDS = Settings().drain_seconds + server._GRACE_SECONDS


def instructions(name: str) -> list[str]:
    """What follows each instruction of this name, continuation lines joined."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^\s*{name} +(.*)$", joined, re.MULTILINE)


def test_reference_is_what_the_code_says() -> None:
    written = (ROOT / "docs" / "reference.md").read_text()
    assert written == reference(), "docs/reference.md is out of date: run make reference"


def test_every_option_that_pages_name_exists() -> None:
    known = set().union(*(options(command) for command in COMMANDS))
    others = {"--stop-timeout", "--memory", "--init", "--gpus", "--build-arg", "--balance-abs-threshold", "--policy"}
    others |= {"--health-check-interval-secs", "--health-failure-threshold"}
    for page in PAGES[:2]:
        prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", prose))
        assert named <= known | others, page


def test_every_metric_that_pages_name_exists() -> None:
    code = "".join(file.read_text() for file in (ROOT / "serve").glob("*.py"))
    named = set(
        re.findall(r"sparda_([a-z_]+?)(?:_total|_bucket)?[\[{ `)]", (ROOT / "docs" / "operating.md").read_text())
    )
    named -= {"jax"}
    assert len(named) > 8
    missing = {name for name in named if not re.search(rf'"(?:sparda_)?{name}(?:_total)?"', code)}
    assert not missing


def test_links_of_pages_lead_somewhere() -> None:
    for page in PAGES:
        folder = (ROOT / page).parent
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
        assert not [target for target in targets if not (folder / target).exists()], page


def test_image_holds_what_a_checkout_needs() -> None:
    copied = dict(line.split() for line in instructions("COPY"))
    for folder in ("sparda_jax", *LINKED):
        assert copied.pop(folder) == f"./{folder}"
    assert copied.pop("LICENSE") == "./"
    assert copied == {"requirements/${LOCK}.lock": "/tmp/packages.lock"}
    assert all((ROOT / "sparda_jax" / name).readlink() == Path("..") / name for name in LINKED)
    assert instructions("ARG") == ["LOCK=cuda"]


def test_builder_is_sent_what_is_copied_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    locks = {f"!requirements/{name}.lock" for name in ("base", "cuda", "cuda12")}
    assert lines[0] == "*"
    assert {line for line in lines if line.startswith("!")} == {"!LICENSE", "!sparda_jax"} | locks | {
        f"!{name}" for name in LINKED
    }
    assert all((ROOT / line[1:]).exists() for line in lines if line.startswith("!"))


def test_image_starts_the_server_as_nobody_special() -> None:
    (entry,) = map(json.loads, instructions("ENTRYPOINT"))
    assert entry[:3] == ["python", "-m", "sparda_jax.serve"]
    assert {word for word in entry if word.startswith("--")} <= options("serve")
    assert entry[entry.index("--port") + 1] == instructions("EXPOSE")[0]
    assert instructions("USER") == ["10001:10001"]
    assert "XDG_CACHE_HOME=/cache" in DOCKERFILE
    assert json.loads(instructions("VOLUME")[0]) == ["/models", "/cache"]


@pytest.mark.parametrize("status", [200, 503])
def test_image_is_as_healthy_as_its_server(status: int) -> None:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    command = json.loads(re.search(r"CMD (\[.*\])", DOCKERFILE)[1])  # pyright: ignore[reportOptionalSubscript]
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as fake:
        threading.Thread(target=fake.handle_request, daemon=True).start()
        code = command[2].replace(":8000/", f":{fake.server_port}/")
        done = subprocess.run([sys.executable, *command[1:2], code], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (status == 200), done.stderr


def unit(name: str) -> str:
    found = re.search(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert found is not None, name
    return found[1]


def test_supervisors_wait_until_the_server_has_drained() -> None:
    assert int(unit("TimeoutStopSec")) > STOP_SECONDS
    assert unit("KillSignal") == "SIGTERM"
    page = (ROOT / "docs" / "operating.md").read_text()
    assert [int(seconds) > STOP_SECONDS for seconds in re.findall(r"--stop-timeout (\d+)", page)] == [True]


def test_unit_starts_the_server() -> None:
    words = shlex.split(unit("ExecStart"))
    assert words[1:3] == ["-m", "sparda_jax.serve"]
    assert {word for word in words if word.startswith("--")} <= options("serve")
    assert words[-1] == "$SPARDA_ARGS"
    assert f"XDG_CACHE_HOME=/var/cache/{unit('CacheDirectory')}" in unit("Environment").split()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With paths and a user of this machine, since it looks whether they are there."""
    text = UNIT.read_text().replace("/opt/sparda/.venv/bin/python", sys.executable)
    text = re.sub(r"^(User|Group)=.*\n", "", text, flags=re.MULTILINE)
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / UNIT.name)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_vllm_router_adds_to_requests_is_accepted() -> None:
    """As version 0.1.17 sends them; values that would change the answer are refused."""
    added = {"no_stop_trim": False, "skip_special_tokens": True, "return_hidden_states": False}
    completion = {"prompt": "a", "stream": False, "echo": False, "ignore_eos": False} | added
    parse_request(CompletionRequest, json.dumps(completion).encode())
    reasoning = {"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": False, "continue_final_message": False}
    parse_request(ChatRequest, json.dumps(chat | added | reasoning).encode())
    for field, value in added.items():
        with pytest.raises(ApiError, match=f"{field} is not supported"):
            parse_request(CompletionRequest, json.dumps(completion | {field: not value}).encode())


def test_schema_is_whole() -> None:
    """Nothing in it refers to what isn't there, so that tools make requests that get further than the first check."""
    schema = openapi()
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(schema)))
    assert json.dumps(schema).count('"$ref"') == sum(
        json.dumps(schema).count(f'"#/components/schemas/{name}"') for name in references
    )
    assert references <= set(schema["components"]["schemas"])
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["model"]["enum"] == ["m", None]
    assert body["properties"]["messages"]["items"]["required"] == ["role", "content"]
