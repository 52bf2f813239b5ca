"""`SparDA.from_pretrained(...).generate(...)` over a tiny checkpoint with a real tokenizer."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparda_jax import infinigen
from sparda_jax.checkpoint import CheckpointError
from sparda_jax.config import MINICPM41_128K_FACTORS, ConfigError
from sparda_jax.library import SparDA
from tests import oracle
from tests.core.support import write_checkpoint
from tests.serve.tiny_tokenizer import write_tokenizer

CONFIG = oracle.toy_config(vocab_size=320, eos_token_id=1, max_position_embeddings=1024)
WEIGHTS = oracle.toy_weights(CONFIG, seed=3)
TEXT = "the special magic number for the quick brown fox is 1234567. " * 24
NEW = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("model"), CONFIG, WEIGHTS))


@pytest.fixture(scope="module")
def model(folder: Path) -> SparDA:
    return SparDA.from_pretrained(folder, mode="sparda")


@pytest.fixture(scope="module")
def greedy(model: SparDA) -> list[int]:
    """The oracle's continuation of TEXT, which has more blocks than are selected."""
    ids = model.encode(TEXT)
    assert len(ids) > 400
    result = oracle.forward(WEIGHTS, CONFIG, ids, "sparda")
    found = []
    for _ in range(NEW):
        found.append(int(result.logits[-1].argmax()))
        result = oracle.decode(result.state, found[-1])
    return found


def test_one_text(model: SparDA, greedy: list[int]):
    (found,) = model.generate(TEXT, max_new_tokens=NEW)
    assert found.tokens == greedy
    assert found.text == model.tokenizer.decode(greedy)
    assert (found.finish_reason, found.stats) == ("length", None)
    assert found.prompt_tokens == len(model.tokenizer.encode(TEXT))


def test_texts_ids_and_chats_in_one_batch(model: SparDA, greedy: list[int]):
    chat = [{"role": "user", "content": "hello there"}]
    for prompts in ([TEXT, chat], ["hello world", model.encode(TEXT)]):
        found = model.generate(prompts, max_new_tokens=NEW, return_stats=True)
        assert greedy in [result.tokens for result in found]
        for prompt, result in zip(prompts, found, strict=True):
            assert result.prompt_tokens == len(model.encode(prompt))
            assert result == model.generate([prompt], max_new_tokens=NEW, return_stats=True)[0]
    assert model.encode(chat) == model.tokenizer.encode_chat(chat)


def test_one_prompt_of_any_kind_is_a_batch_of_one(model: SparDA):
    chat = [{"role": "user", "content": "hello there"}]
    ids = model.encode("hello world")
    prompts: list[Any] = [chat, ids, tuple(ids), np.asarray(ids)]
    for prompt in prompts:
        assert model.generate(prompt, max_new_tokens=2) == model.generate([prompt], max_new_tokens=2)


def test_numbers_of_another_kind_are_refused(model: SparDA, folder: Path):
    fraction: Any = 1.5
    for name in ("max_new_tokens", "top_k", "seed"):
        with pytest.raises(ValueError, match=f"^{name.replace('new_', '')}=1.5"):
            model.generate("hello", **{name: fraction})
    with pytest.raises(TypeError):
        model.generate([[fraction]])
    with pytest.raises(ValueError, match=r"^seed="):
        model.generate("hello", seed=2**64)
    with pytest.raises(ConfigError, match="max_model_len=0"):
        SparDA.from_pretrained(folder, max_model_len=0)
    with pytest.raises(ConfigError, match="dtype=int32"):
        SparDA.from_pretrained(folder, dtype="int32")
    # The last seed of all is followed by the first.
    last, first = model.generate(["hello"] * 2, seed=2**64 - 1, temperature=1.5, max_new_tokens=4)
    assert [first] == model.generate("hello", seed=0, temperature=1.5, max_new_tokens=4)
    assert [last] == model.generate("hello", seed=-1, temperature=1.5, max_new_tokens=4)


def test_stats(model: SparDA):
    long, short = model.generate([TEXT, "hello"], max_new_tokens=NEW, return_stats=True)
    assert long.stats is not None
    assert short.stats is not None
    blocks = -(-long.prompt_tokens // 64)
    assert long.stats.decode.read_fraction == pytest.approx(6 / blocks, rel=0.1)
    assert long.stats.prefill.tokens == long.prompt_tokens
    assert len(long.stats.prefill.blocks_read) == 2
    assert short.stats.prefill.read_fraction == short.stats.decode.read_fraction == 1


def test_stops_at_any_end_of_sequence_id(
    model: SparDA, greedy: list[int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The ids of config.json and generation_config.json; the lane that stops leaves the other alone."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    end = greedy[3]
    at = greedy.index(end)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    config = SparDA.from_pretrained(tmp_path, mode="sparda").config
    assert config.eos_token_ids == (1, end)
    # Into the model whose programs are compiled already.
    before = model.generate([TEXT, "hello world"], max_new_tokens=NEW)
    assert end not in before[1].tokens
    monkeypatch.setattr(model.runner, "config", config)
    found, other = model.generate([TEXT, "hello world"], max_new_tokens=NEW)
    assert (found.tokens, found.finish_reason) == (greedy[:at], "stop")
    assert other == before[1]


def test_prompt_i_is_sampled_with_seed_plus_i(model: SparDA):
    options = {"max_new_tokens": NEW, "temperature": 1.5, "top_p": 0.99, "top_k": 100}
    first, second = model.generate([TEXT, TEXT], seed=5, **options)
    assert first.tokens != second.tokens
    assert model.generate(TEXT, seed=6, **options)[0].tokens == second.tokens
    assert model.generate([TEXT], seed=5, **options)[0].tokens == first.tokens


def test_modes_by_name(folder: Path, greedy: list[int]):
    dense = SparDA.from_pretrained(folder, mode="dense", max_model_len=600)
    ids = dense.encode(TEXT)
    (found,) = dense.generate(TEXT, max_new_tokens=2, return_stats=True)
    expected = oracle.forward(WEIGHTS, CONFIG, ids, "dense").logits[-1].argmax()
    assert found.tokens[0] == expected
    assert found.stats is not None
    assert found.stats.mode == "dense"
    with pytest.raises(ConfigError, match="mode=spars is not known: use one of dense, sparse, sparda, "):
        SparDA.from_pretrained(folder, mode="spars")


@pytest.mark.slow
def test_infinigen_calibrates_on_the_bundled_text(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(infinigen, "MAX_CALIBRATION_TOKENS", 256)
    model = SparDA.from_pretrained(folder, mode="infinigen")
    skew = model.runner._skew
    assert skew is not None
    for basis in skew:
        np.testing.assert_allclose(jnp.einsum("hdc,hde->hce", basis, basis), np.stack([np.eye(16)] * 2), atol=1e-4)
    assert len(model.generate("hello", max_new_tokens=2)[0].tokens) == 2


def test_long_context_takes_the_published_factors(tmp_path: Path):
    scaling = {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64, "original_max_position_embeddings": 65536}
    config = oracle.toy_config(
        vocab_size=320, head_dim=128, num_attention_heads=2, rope_scaling={"rope_type": "longrope"} | scaling
    )
    write_tokenizer(write_checkpoint(tmp_path, config, oracle.toy_weights(config)))
    plain, long = (SparDA.from_pretrained(tmp_path, long_context=x).runner for x in (False, True))
    assert plain.config.rope.long_factor == (1.0,) * 64
    # What the compiled steps see is the model behind the runner, not the runner's own field.
    assert nnx.merge(long._graphdef, long._state).config.rope.long_factor == MINICPM41_128K_FACTORS


def test_what_is_wrong_is_named(folder: Path, tmp_path: Path, model: SparDA):
    plain = {n: w for n, w in WEIGHTS.items() if "q_future" not in n and "q_curr" not in n}
    write_tokenizer(write_checkpoint(tmp_path, CONFIG, plain))
    with pytest.raises(CheckpointError, match="has no Forecast"):
        SparDA.from_pretrained(tmp_path, mode="sparda")
    assert SparDA.from_pretrained(tmp_path, mode="sparse").generate("hello", max_new_tokens=1)
    with pytest.raises(ConfigError, match="128K factors"):
        SparDA.from_pretrained(folder, long_context=True)
    with pytest.raises(ValueError, match="prompts is empty"):
        model.generate([])
    with pytest.raises(ValueError, match="max_model_len=1024"):
        model.generate(TEXT, max_new_tokens=1000)
    with pytest.raises(ValueError, match=r"^top_p"):
        model.generate(TEXT, top_p=0.0)
