"""``python -m sparda_jax.pretrain``: what is missing is told in a sentence, before anything is trained."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.pretrain.__main__ import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("foresee {model} out --data nowhere", "--data nowhere holds no tokenizer/generation_config.json: give the"),
        ("train out --data nowhere", "--data nowhere holds no tokenizer/generation_config.json: give the"),
        ("foresee nowhere out --data {data}", "nowhere is no folder"),
        ("adapt nowhere out --data {data}", "nowhere is no folder"),
        ("refine {data} out --data {data}", "holds no config.json"),
        ("foresee {dense} out --data {data}", "no Forecast"),
        ("foresee {model} out --data {data} --forecast nowhere", "nowhere does not exist"),
        ("foresee {model} out --data {data} --batch-tokens 0", "--batch-tokens 0: it must be at least 8192"),
        ("foresee {model} out --data {data} --workers 0", "Invalid value for '--workers'"),
        ("foresee {model} out --data {data} --scale -1", "Invalid value for '--scale'"),
        ("foresee", "Missing argument 'start'"),
    ],
)
def test_what_can_not_be_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data, dense = tmp_path / "data", tmp_path / "dense"
    data.mkdir()
    (data / "tokenizer").symlink_to(BUNDLED_MODEL)
    dense.mkdir()
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        (dense / file).symlink_to(BUNDLED_MODEL / file)
    filled = arguments.format(model=BUNDLED_MODEL, data=data, dense=dense)
    done = CliRunner().invoke(app, filled.split(), env={"COLUMNS": "300"})
    assert (done.exit_code, said in done.output) == (2 if "Usage" in done.output else 1, True), done.output
    assert not (tmp_path / "out").exists()
