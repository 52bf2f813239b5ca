"""Byte-level BPE tokenizer of the bundled model, and its Hugging Face files.

Digits are split off one by one before byte-level BPE, so that a number is the same token ids wherever it stands: after
a space (which is then a token of its own), a colon, a newline or nothing. Every UTF-8 string survives a round trip.

`python -m sparda_jax.pretrain.tokenizer_training --documents .data/corpus/documents.jsonl --out DIR`
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sparda_jax.pretrain.corpus import read_documents

VOCAB_SIZE = 4096
PAD, BOS, EOS, IM_START, IM_END = "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, IM_START, IM_END)
"""Their ids are 0 to 4 in this order."""
PAD_ID, BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML. It writes the beginning-of-sequence token itself, so its output is tokenized with
`add_special_tokens=False`."""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains the tokenizer.

    Args:
        texts: training text, any number of pieces.
        vocab_size: number of entries wanted, the special tokens and the 256 bytes included.

    Returns:
        A tokenizer whose `encode` puts `<s>` first unless `add_special_tokens=False`.

    Raises:
        ValueError: the text is too small for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=20,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size: {vocab_size} wanted, the text gives {tokenizer.get_vocab_size()}; train on more text"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_hf_files(tokenizer: Tokenizer, folder: Path, *, model_max_length: int = 16384) -> None:
    """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json.

    Args:
        tokenizer: what `train_tokenizer` returned.
        folder: created if missing.
        model_max_length: context limit in tokens that the configuration names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    added = {
        str(index): {"content": token, "special": True}
        | dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        for index, token in enumerate(SPECIAL_TOKENS)
    }
    config = {
        "added_tokens_decoder": added,
        **names,
        "additional_special_tokens": [IM_START, IM_END],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    special_map = {**names, "additional_special_tokens": [IM_START, IM_END]}
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": [EOS_ID, IM_END_ID],
        "pad_token_id": PAD_ID,
        "do_sample": False,
    }
    for name, content in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special_map),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _training_texts(documents: Path) -> Iterator[str]:
    for document in read_documents(documents):
        if document.split == "train":
            yield document.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, default=Path(".data/corpus/documents.jsonl"))
    parser.add_argument("--out", type=Path, default=Path(".data/pretrain/tokenizer"))
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(_training_texts(arguments.documents), vocab_size=arguments.vocab_size)
    save_hf_files(tokenizer, arguments.out)
    print(f"{tokenizer.get_vocab_size()} entries in {arguments.out}")


if __name__ == "__main__":
    main()
