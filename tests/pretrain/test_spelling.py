"""Keys and values that can only be copied: invented words, numbers of few digits, and none of them in evaluation."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from sparda_jax.pretrain import corpus, prepare
from sparda_jax.pretrain.facts import FactSampler, Spelling
from sparda_jax.pretrain.task_words import is_eval_word, word_lists


def test_invented_words_are_made_of_two_training_words_and_never_evaluation_words() -> None:
    words = word_lists("train")
    sampler = FactSampler(words, Spelling(invented_words=1.0))
    rng = np.random.default_rng(0)
    drawn = [sampler.value(rng, "city") for _ in range(400)]
    invented = [word for word in drawn if word not in words.cities]
    assert len(invented) > 200
    assert not any(is_eval_word(word) for word in drawn)
    for word in invented:
        assert any(
            any(other.lower().endswith(word[cut:].lower()) for other in words.cities)
            for cut in range(2, len(word))
            if any(city.startswith(word[:cut]) for city in words.cities)
        ), word


def test_numbers_of_few_digits() -> None:
    sampler = FactSampler(word_lists("train"), Spelling(few_digits=1.0))
    rng = np.random.default_rng(1)
    numbers = [sampler.number(rng) for _ in range(500)]
    assert all(4 <= len(number) <= 8 and number[0] != "0" for number in numbers)
    # A zero in front is replaced, which may add one digit to the four.
    assert max(len(set(number)) for number in numbers) <= 5
    assert np.mean([len(set(number)) <= 3 for number in numbers]) > 0.6


def test_without_spelling_the_draws_are_what_they_were() -> None:
    plain = FactSampler(word_lists("eval"), Spelling())
    rng, same = np.random.default_rng(2), np.random.default_rng(2)
    assert plain.number(rng, 7) == str(same.integers(10**6, 10**7))
    cities = word_lists("eval").cities
    assert plain.value(rng, "city") == cities[same.integers(len(cities))]


@pytest.mark.parametrize("name", ["invented_words", "few_digits"])
def test_shares_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 1.5 given"):
        Spelling(**{name: 1.5})


def test_a_given_tokenizer_is_kept(tmp_path: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    splits = ["eval", *["train"] * (len(texts) - 1)]
    lines = [
        json.dumps({"source": "x", "licence": "y", "split": s, "text": t}) for s, t in zip(splits, texts, strict=True)
    ]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "manifest.json").write_text("{}")
    tokenizer.save(str(tmp_path / "kept.json"))
    out = tmp_path / "out"
    prepare.prepare(out, tmp_path, max_train_tokens=10**6, seed=0, tokenizer_file=tmp_path / "kept.json")
    written = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    assert written.get_vocab() == tokenizer.get_vocab()
    tokens = np.load(out / "train.npy")
    assert written.decode(tokens[1:9].tolist()) in " ".join(texts)


def test_a_package_is_unpacked_whole_into_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed while it unpacked leaves nothing that looks like a package."""
    (tmp_path / "debs").mkdir()
    (tmp_path / "debs" / "some-doc_1.0_all.deb").touch()
    (tmp_path / "unpacked" / "some-doc.part").mkdir(parents=True)
    (tmp_path / "unpacked" / "some-doc.part" / "half").touch()

    class Result:
        stdout = "1.0\n"

    def run(command: list[str], **_: object) -> Result:
        if command[:2] == ["dpkg", "-x"]:
            target = Path(command[3])
            assert target.parent.is_dir()
            assert not target.exists()
            target.mkdir()
            (target / "whole").touch()
        return Result()

    monkeypatch.setattr(corpus.subprocess, "run", run)
    root, version = corpus.download("some-doc", tmp_path)
    assert (version, [path.name for path in root.iterdir()]) == ("1.0", ["whole"])
