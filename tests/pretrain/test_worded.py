"""Tasks that are one text: their answers are what the text says, and their words are training's."""

import random
import re
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

from sparda_jax.eval.documents import one_hop, two_hops
from sparda_jax.eval.tracking import variable_tracking
from sparda_jax.pretrain.contents import TaskMix, sample_spec
from sparda_jax.pretrain.facts import FactSampler, Spelling
from sparda_jax.pretrain.haystack import TokenCorpus
from sparda_jax.pretrain.task_words import is_eval_word, word_lists
from sparda_jax.pretrain.tasks import VALUE_KIND, RecallTasks
from sparda_jax.pretrain.worded import WORDED_KINDS, WordedTasks

LENGTHS = (512, 1500, 5000)


@pytest.fixture(scope="module")
def worded(tokenizer: Tokenizer) -> WordedTasks:
    words = word_lists("train")
    facts = FactSampler(words, Spelling(few_digits=0.3, invented_words=0.3))
    return WordedTasks(words, facts, lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))


@pytest.mark.parametrize("length", LENGTHS)
def test_chains_lead_to_the_variables_asked_for(worded: WordedTasks, length: int) -> None:
    for seed in range(12):
        exchanges = worded.draw(np.random.default_rng(seed), "chains", length)
        text = exchanges[0].question.rpartition("Memorize and track")[2]
        value_of: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
            assert name not in value_of
            value_of[name] = value_of.get(str(source), str(source))
        for exchange in exchanges:
            value = exchange.question.split()[-5]
            assert list(exchange.values) == [name for name, found in value_of.items() if found == value]
            assert len(exchange.values) >= 3
        assert sum(len(e.values) for e in exchanges) == len(value_of)


def test_names_follow_the_words_that_the_evaluation_begins_an_answer_with(worded: WordedTasks) -> None:
    asked = variable_tracking(random.Random(1), 30, 0)
    begun = re.sub(r"\d{5}", "VALUE", asked.prefix)
    found = {
        re.sub(r"\d{5}", "VALUE", exchange.answer[0][0]).replace(f"{len(exchange.values)} variables", "5 variables")
        for seed in range(20)
        for exchange in worded.draw(np.random.default_rng(seed), "chains", 900)
    }
    assert found == {begun, begun.rstrip()}


@pytest.mark.parametrize("length", LENGTHS)
def test_common_words_are_the_most_common(worded: WordedTasks, length: int) -> None:
    for seed in range(12):
        (exchange,) = worded.draw(np.random.default_rng(seed), "common", length)
        entries = re.findall(r"\d+\. (\w+)", exchange.question.rpartition("most often.\n")[2])
        counts = Counter(entries)
        assert {word for word, _ in counts.most_common(10)} == set(exchange.values)
        ranked = sorted(counts.values(), reverse=True)
        assert ranked[9] > ranked[10]
        assert list(exchange.values) == [w for w in dict.fromkeys(entries) if w in exchange.values]
        assert "".join(text for text, _ in exchange.answer).endswith(f" 10. {exchange.values[-1]}")


@pytest.mark.parametrize("length", LENGTHS)
def test_frequent_words_are_the_most_frequent(worded: WordedTasks, length: int) -> None:
    for seed in range(12):
        (exchange,) = worded.draw(np.random.default_rng(seed), "frequent", length)
        text = exchange.question.split("coded words. ")[1].split("\nQuestion")[0]
        counts = Counter(text.split())
        assert counts.most_common(1)[0][0] == "..."
        counts.pop("...")
        assert [counts[word] for word in exchange.values] == sorted(counts.values(), reverse=True)[:3]


@pytest.mark.parametrize("length", LENGTHS)
def test_readings_say_what_is_asked_once(worded: WordedTasks, length: int) -> None:
    two = 0
    for seed in range(12):
        exchanges = worded.draw(np.random.default_rng(seed), "reading", length)
        documents = exchanges[0].question.partition("\nDocument 1:\n")[2].split("\n\nAnswer the question")[0]
        for exchange in exchanges:
            question = exchange.question.rpartition("Question: ")[2]
            away = re.search(r"the town where (.+) lived", question)
            asked = re.search(r"[A-Z]\w+ [A-Z]\. \w+|(?<!^)[A-Z]\w+", question)
            assert asked is not None
            name = asked[0]
            if away is not None:
                two += 1
                name = re.findall(rf"{re.escape(away[1])} lived in (\w+)\.", documents)[0]
            own = [d for d in re.split(r"\n\n?Document \d+:\n", documents) if d.startswith(f"{name}\n")]
            assert len(own) == 1
            assert exchange.values[0] in own[0]
    assert two > 0 or length == LENGTHS[0]


@pytest.mark.parametrize("kind", WORDED_KINDS)
def test_documents_fill_their_length_and_no_more(tokenizer: Tokenizer, worded: WordedTasks, kind: str) -> None:
    sizes = []
    for seed in range(20):
        exchange = worded.draw(np.random.default_rng(seed), kind, 3000)[0]
        text = exchange.question + "".join(text for text, _ in exchange.answer)
        sizes.append(len(tokenizer.encode(text, add_special_tokens=False).ids))
    assert max(sizes) <= 3000
    assert np.median(sizes) > 2000


def test_words_and_sentences_are_not_those_of_the_evaluation(worded: WordedTasks) -> None:
    (exchange,) = worded.draw(np.random.default_rng(1), "common", 5000)
    entries = re.findall(r"\d+\. (\w+)", exchange.question)
    known = {*word_lists("eval").nouns, *word_lists("eval").adjectives}
    assert not any(is_eval_word(word) for word in set(entries) & known)
    read = worded.draw(np.random.default_rng(2), "reading", 20000)[0].question
    for ask in (one_hop, two_hops):
        evaluated = ask(random.Random(3), 6, 0).text
        bodies = [part.split("\n\n")[0] for part in evaluated.split("Document ")[1:]]
        for sentence in re.findall(r"(?<=\. )[A-Z][^.]{20,}\.", "\n".join(bodies)):
            assert sentence not in read


def test_a_mix_draws_its_kinds_in_their_shares(tokenizer: Tokenizer, tokens: np.ndarray) -> None:
    mix = TaskMix(kinds=(("chains", 0.75), ("single", 0.25)), ruler=1.0)
    rng = np.random.default_rng(5)
    specs = [sample_spec(rng, 4000, mix) for _ in range(400)]
    chains = [spec for spec in specs if spec.kind == "chains"]
    assert 0.68 < len(chains) / 400 < 0.82
    assert min(s.length for s in chains) < 800
    assert max(s.length for s in chains) > 3500
    assert {spec.kind for spec in specs} == {"chains", "single"}
    document = RecallTasks(tokenizer, TokenCorpus(tokens, tokenizer), mix=mix).document(rng, 1000)
    assert (document.kinds == VALUE_KIND).any()
    with pytest.raises(ValueError, match=r"kinds: \['nonsense'\] given"):
        TaskMix(kinds=(("nonsense", 1.0),))
    with pytest.raises(ValueError, match="must add up to 1"):
        TaskMix(kinds=(("single", 0.5),))
