"""serve/README.md names the fields, paths and modules that exist."""

import re
from pathlib import Path

from sparda_jax.profiling import Profiler
from sparda_jax.serve.api import ServerInfo, create_app
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.protocol import IGNORED, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.serve.fakes import TOKENIZER, FakeRunner

FOLDER = Path(__file__).parents[2] / "serve"
README = (FOLDER / "README.md").read_text()


def test_every_field_is_described() -> None:
    kinds = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    fields = {field for kind in kinds for field in kind.model_fields}
    named = set(re.findall(r"`([a-z_]+)`", README))
    assert fields - named == set()
    assert set(re.findall(r"`(user|metadata|store)`", README)) <= IGNORED


def test_every_path_and_module_exists(tmp_path: Path) -> None:
    app = create_app(
        Engine(FakeRunner(), eos_token_ids=[]),
        TOKENIZER,
        ServerInfo(model="m", mode="sparse", vocab_size=9),
        profiler=Profiler(tmp_path, max_seconds=1),
    )
    described = set(re.findall(r"`(?:GET|POST) (/[a-z0-9/_]+?)(?:/NAME)?`", README))
    # The pages that show the schema are no part of it.
    shown = {"/docs", "/redoc"}
    assert described == {path.replace("/{model}", "") for path in app.openapi()["paths"]} | shown
    modules = {path.name for path in FOLDER.glob("*.py")} - {"__init__.py", "errors.py", "metrics.py", "settings.py"}
    assert set(re.findall(r"`([a-z_]+\.py)`", README)) == modules
