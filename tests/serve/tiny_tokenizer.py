"""A real byte-level BPE tokenizer in Hugging Face's files, trained in a moment on a few sentences."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, IM_START, IM_END = range(4)
CHAT_TEMPLATE = """
{%- if not messages %}{{ raise_exception('no messages') }}{% endif -%}
{{ bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}"""
_TEXT = [
    "the special magic number for the quick brown fox is 1234567.",
    "hello world, hello there: what is the magic number? user assistant system",
    "the grass is green. the sky is blue. the sun is yellow.",
]


def train_backend() -> tokenizers.Tokenizer:
    """About 320 tokens: 4 special ones, 256 bytes, and merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_TEXT, trainer)
    return backend


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``; ``config`` replaces entries of the latter."""
    train_backend().save(str(folder / "tokenizer.json"))
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return folder
