"""Everything that pretraining reads, made in one go: corpus, tokenizer, token files.

`python -m sparda_jax.pretrain.prepare --out .data/pretrain` writes

* `tokenizer/`: the Hugging Face tokenizer files,
* `train.npy`, `eval.npy`: uint16 token ids, `<s> document </s>` after `<s> document </s>`, documents shuffled; the
  same packed
  as `.npy.xz`, less than half as large, which is enough to train from,
* `manifest.json`: packages, versions, licences, sizes, hashes.
"""

import argparse
import json
import lzma
from pathlib import Path

import numpy as np
from jaxtyping import UInt16
from tokenizers import Tokenizer

from sparda_jax.pretrain.corpus import collect, read_documents
from sparda_jax.pretrain.tokenizer_training import BOS_ID, EOS_ID, SPECIAL_TOKENS, save_hf_files, train_tokenizer


def without_special_tokens(text: str) -> str:
    """The text without the spelling of a special token, which the tokenizer would take for the token itself."""
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text


def tokenize_documents(tokenizer: Tokenizer, texts: list[str]) -> UInt16[np.ndarray, " tokens"]:
    """All texts as `<s> ids </s>`, one after the other."""
    pieces = []
    for start in range(0, len(texts), 512):
        chunk = [without_special_tokens(text) for text in texts[start : start + 512]]
        for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False):
            pieces.append(np.array([BOS_ID, *encoding.ids, EOS_ID], np.uint16))
    return np.concatenate(pieces)


def prepare(out: Path, corpus: Path, *, max_train_tokens: int, seed: int, tokenizer_file: Path | None = None) -> None:
    """Trains the tokenizer on `corpus/documents.jsonl` and writes the token files to `out`.

    Args:
        out: folder for the results.
        corpus: folder with documents.jsonl and manifest.json.
        max_train_tokens: the training file stops at the document that passes this size (two bytes a token).
        seed: order of the documents.
        tokenizer_file: the tokenizer.json of a model to be trained further, instead of a new one: packages move on, and
            a tokenizer trained on other versions of them numbers its tokens differently.
    """
    texts: dict[str, list[str]] = {"train": [], "eval": []}
    for document in read_documents(corpus / "documents.jsonl"):
        texts[document.split].append(document.text)
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file else train_tokenizer(texts["train"])
    save_hf_files(tokenizer, out / "tokenizer")
    manifest = json.loads((corpus / "manifest.json").read_text())
    for split, parts in texts.items():
        order = np.random.default_rng(seed).permutation(len(parts))
        tokens = tokenize_documents(tokenizer, [parts[i] for i in order])
        if split == "train" and tokens.size > max_train_tokens:
            ends = 1 + np.flatnonzero(tokens == EOS_ID)
            tokens = tokens[: ends[np.searchsorted(ends, max_train_tokens)]]
        np.save(out / f"{split}.npy", tokens)
        packed = lzma.compress((out / f"{split}.npy").read_bytes(), preset=4)
        (out / f"{split}.npy.xz").write_bytes(packed)
        size = sum(len(text.encode()) for text in parts)
        manifest[split] = {"documents": len(parts), "tokens": int(tokens.size), "bytes": size}
        print(f"{split}: {len(parts)} documents, {size / 1e6:.1f} MB, {tokens.size / 1e6:.2f} M tokens")
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".data/pretrain"))
    parser.add_argument(
        "--corpus", type=Path, default=Path(".data/corpus"), help="documents.jsonl is made here if missing"
    )
    parser.add_argument("--cache", type=Path, default=Path(".data/packages"), help="folder for downloaded packages")
    parser.add_argument("--max-train-tokens", type=int, default=40_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to keep, to train an existing model further")
    arguments = parser.parse_args()
    if not (arguments.corpus / "documents.jsonl").exists():
        collect(arguments.corpus, arguments.cache)
    prepare(
        arguments.out,
        arguments.corpus,
        max_train_tokens=arguments.max_train_tokens,
        seed=arguments.seed,
        tokenizer_file=arguments.tokenizer,
    )


if __name__ == "__main__":
    main()
