"""Growing and lengthening from the command line: from a small checkpoint to a trained one, in two pieces."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer
from typer.testing import CliRunner, Result

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.checkpoint import load_model
from sparda_jax.config import ModelConfig
from sparda_jax.model import Decoder
from sparda_jax.pretrain import _lengthen_commands as commands
from sparda_jax.pretrain.__main__ import app
from sparda_jax.pretrain.lengthening import LENGTHENING, LONG_FORESIGHT
from sparda_jax.pretrain.recipe import Recipe, hf_config
from sparda_jax.pretrain.running import write_model
from sparda_jax.pretrain.tokenizer_training import save_hf_files

LENGTH = 512


def small(recipe: Recipe) -> Recipe:
    """The same phases over rows of 512 tokens."""
    phases = tuple(dataclasses.replace(p, seq_len=LENGTH, tokens=2 * LENGTH / 1e6) for p in recipe.phases)
    return dataclasses.replace(recipe, phases=phases)


@pytest.fixture
def start(tokenizer: Tokenizer, tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of one layer, and the data folder beside it."""
    monkeypatch.setattr(commands, "LENGTHENING", small(LENGTHENING))
    monkeypatch.setattr(commands, "LONG_FORESIGHT", small(LONG_FORESIGHT))
    save_hf_files(tokenizer, tmp_path / "data" / "tokenizer")
    np.save(tmp_path / "data" / "train.npy", tokens)
    generation = json.loads((tmp_path / "data" / "tokenizer" / "generation_config.json").read_text())
    description: dict[str, Any] = hf_config(tokenizer.get_vocab_size(), 1, generation["eos_token_id"]) | {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    description["sparse_config"] = description["sparse_config"] | {"window_size": 64, "topk": 3}
    config = ModelConfig.from_hf(description, generation)
    model = Decoder(config, has_forecast=True, dtype=jnp.float32, rngs=nnx.Rngs(3))
    write_model(model, tmp_path / "data" / "tokenizer", tmp_path / "start", description, generation, 0)
    return tmp_path / "start"


def run(*arguments: object) -> Result:
    done = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.slow
def test_from_a_checkpoint_to_a_longer_one(start: Path, tmp_path: Path) -> None:
    grown, long, settled = (tmp_path / name for name in ("grown", "long", "settled"))
    assert "2 layers" in run("grow", start, grown, "--layers", 2).output
    timed = run("speed", grown, "--fit", 10, "--batch-tokens", LENGTH, "--json", tmp_path / "speed.json")
    record = json.loads((tmp_path / "speed.json").read_text())
    assert float(timed.output.split()[-1]) == pytest.approx(10 / sum(record["stage_seconds"]), rel=1e-2)
    assert {(row["seq_len"], row["mode"]) for row in record["steps"]} == {
        (LENGTH, mode) for mode in ("dense", "sparse", "sparda")
    }
    options = ("--data", tmp_path / "data", "--workers", 1, "--batch-tokens", LENGTH)
    first = run("lengthen", grown, long, "--seconds", 0, *options)
    assert "step 1 of 6, to be gone on with" in first.output
    assert "step 6 of 6, finished" in run("lengthen", grown, long, "--seconds", 600, *options).output
    run("lengthen", long / "model", settled, "--settle", "--seconds", 600, *options)
    before, after = (load_model(p, require_forecast=True) for p in (grown, settled / "model"))
    assert after.config.num_layers == 2
    assert not np.array_equal(before.embed_tokens[...], after.embed_tokens[...])
    log = json.loads((settled / "model" / "training_log.json").read_text())["log"]
    assert [(line["step"], line["mode"]) for line in log] == [(1, "sparda"), (2, "sparse")]
    assert {"routing_loss", "foresight_loss"} <= log[0].keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("grow nowhere out", "nowhere is no Hugging Face checkpoint"),
        ("grow {model} out --layers 6", "num_layers=6 can't be grown from 6: give 7 to 12"),
        ("lengthen nowhere out --seconds 1", "nowhere is no Hugging Face checkpoint"),
        ("lengthen {model} out --seconds 1 --batch-tokens 64", "--batch-tokens 64: it must be at least 16384"),
        ("lengthen {model} out --seconds 1 --data nowhere", "train.npy (or train.npy.xz) is missing"),
        ("speed nowhere --fit 1", "nowhere is no folder"),
    ],
)
def test_what_can_not_be_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments.format(model=BUNDLED_MODEL).split(), env={"COLUMNS": "300"})
    assert (done.exit_code, said in done.output) == (2 if "Usage" in done.output else 1, True), done.output


def test_the_stages_train_mostly_at_16k() -> None:
    for recipe in (LENGTHENING, LONG_FORESIGHT):
        long = sum(p.tokens for p in recipe.phases if p.seq_len == 16384)
        assert long > 0.6 * sum(p.tokens for p in recipe.phases)
        assert all(65536 % p.seq_len == 0 for p in recipe.phases)
    assert LENGTHENING.seed != LONG_FORESIGHT.seed
