"""The bundled model's tokenizer: digits, round trips, special tokens, Hugging Face files."""

import json
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sparda_jax.pretrain.prepare import without_special_tokens
from sparda_jax.pretrain.tokenizer_training import (
    BOS,
    BOS_ID,
    EOS_ID,
    IM_END_ID,
    IM_START_ID,
    SPECIAL_TOKENS,
    save_hf_files,
    train_tokenizer,
)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("lead", ["", " ", ":", "\n", "\n\n", " is: ", "x", "-", '"', "<|im_start|>assistant\n"])
def test_number_has_the_same_ids_wherever_it_stands(tokenizer: Tokenizer, lead: str) -> None:
    digits = [ids(tokenizer, d)[0] for d in "1234567"]
    assert len(set(digits)) == 7
    assert ids(tokenizer, lead + "1234567.") == [*ids(tokenizer, lead), *digits, *ids(tokenizer, ".")]


@given(text=st.text())
def test_every_text_survives(tokenizer: Tokenizer, text: str) -> None:
    text = without_special_tokens(text)
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    text = "".join(chr(c) for c in (*range(1, 256), 0x20AC, 0x1F600, 0x10FFFF))
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(5))
    assert tokenizer.encode("a b").ids[0] == BOS_ID
    assert tokenizer.encode("a b").ids.count(BOS_ID) == 1
    chat = ids(tokenizer, "<|im_start|>user\nhi<|im_end|>")
    assert chat[0] == IM_START_ID
    assert chat[-1] == IM_END_ID


def test_spelled_special_tokens_leave_the_corpus() -> None:
    assert without_special_tokens("the <s> tag </s> and <|im_end|> here") == "the  tag  and  here"


def test_hf_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_hf_files(tokenizer, tmp_path)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.encode("In the beginning 42").ids == tokenizer.encode("In the beginning 42").ids
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert {int(i): item["content"] for i, item in config["added_tokens_decoder"].items()} == dict(
        enumerate(SPECIAL_TOKENS)
    )
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [EOS_ID, IM_END_ID]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    template = jinja2.Environment().from_string(config["chat_template"])
    text = template.render(messages=messages, bos_token=BOS, add_generation_prompt=True)
    assert text == ("<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n")
    assert ids(tokenizer, text).count(BOS_ID) == 1


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size: 4096 wanted"):
        train_tokenizer(["too little"])
