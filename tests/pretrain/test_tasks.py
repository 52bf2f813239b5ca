"""Recall documents: exact token ids, marked answers, depths, determinism, evaluation apart from training."""

from dataclasses import replace

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

from sparda_jax.pretrain.contents import ALL_NEEDLES, KINDS, TaskMix, TaskSpec, sample_spec
from sparda_jax.pretrain.haystack import FILLERS, TokenCorpus
from sparda_jax.pretrain.task_words import word_lists
from sparda_jax.pretrain.tasks import (
    ANSWER_KIND,
    EVAL_KINDS,
    NOISE_KIND,
    TEXT_KIND,
    VALUE_KIND,
    DoesNotFitError,
    RecallDocument,
    RecallTasks,
    eval_prompts,
)
from sparda_jax.pretrain.tokenizer_training import CHAT_TEMPLATE, EOS_ID, IM_END_ID


def text_of(tasks: RecallTasks, ids: np.ndarray) -> str:
    return tasks.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def documents(tasks: RecallTasks, *, seed: int, lengths: tuple[int, ...], count: int) -> list[RecallDocument]:
    rng = np.random.default_rng(seed)
    return [tasks.document(rng, length) for length in lengths for _ in range(count)]


def test_assembled_ids_are_those_of_the_text(tasks: RecallTasks) -> None:
    for document in documents(tasks, seed=1, lengths=(128, 300, 900, 2500), count=60):
        text = text_of(tasks, document.ids)
        assert tasks.tokenizer.encode(text, add_special_tokens=False).ids == document.ids.tolist()


def test_every_kind_and_filler_fits_and_is_exact(tasks: RecallTasks) -> None:
    rng = np.random.default_rng(2)
    for kind in (k for k in KINDS if k != "chains"):  # whose answers may begin behind a space of its own
        for filler in (*FILLERS, ALL_NEEDLES):
            for style in ("chat", "plain"):
                spec = replace(
                    sample_spec(rng, 1200, TaskMix()), kind=kind, filler=filler, style=style, num_facts=5, num_values=3
                )
                document = tasks.build(rng, spec)
                text = text_of(tasks, document.ids)
                assert document.ids.size <= 1200
                assert tasks.tokenizer.encode(text, add_special_tokens=False).ids == document.ids.tolist()
                assert bool(document.turns) == (style == "chat")


def test_kinds_mark_answers_and_values_exactly(tasks: RecallTasks) -> None:
    for document in documents(tasks, seed=3, lengths=(200, 1500), count=60):
        marked = document.kinds >= ANSWER_KIND
        expected = np.zeros_like(marked)
        for i, start in enumerate(document.answer_starts):
            ends = np.flatnonzero(np.isin(document.ids[start:], [IM_END_ID, EOS_ID]))
            if document.turns:
                stop = start + int(ends[0]) + 1
            else:  # plain: up to the next question, marked as no answer, or </s>
                rest = np.flatnonzero(~marked[start:])
                stop = start + int(rest[0]) if rest.size else document.ids.size
            expected[start:stop] = True
            answer = text_of(tasks, document.ids[start:stop])
            at = [answer.find(value) for value in document.values[i]]
            assert min(at) >= 0
            assert at == sorted(at)
        np.testing.assert_array_equal(marked, expected)
        value_text = text_of(tasks, document.ids[document.kinds == VALUE_KIND]).replace(" ", "")
        named = [value for values in document.values for value in values]
        if (document.kinds == VALUE_KIND).any():
            assert value_text == "".join(named).replace(" ", "")


def test_plain_answers_are_followed_by_questions_or_the_end(tasks: RecallTasks) -> None:
    rng = np.random.default_rng(4)
    spec = TaskSpec(kind="multikey", length=900, style="plain", ruler=True, num_facts=6, num_questions=4)
    text = text_of(tasks, tasks.build(rng, spec).ids)
    assert text.endswith(".</s>")
    question, answer = "What is the special magic ", " The special magic "
    assert text.count(question) == 4
    for part in text.split(question)[1:]:
        assert "mentioned in the provided text?" + answer in part


def test_filler_is_marked_by_what_it_is(tasks: RecallTasks) -> None:
    rng = np.random.default_rng(5)
    for filler, kind in (("prose", TEXT_KIND), ("noise", NOISE_KIND), ("words", NOISE_KIND)):
        document = tasks.build(rng, TaskSpec(kind="single", length=600, filler=filler, ruler=True))
        assert (document.kinds == kind).sum() > 350
        assert not (document.kinds == (TEXT_KIND + NOISE_KIND - kind)).any()


@pytest.mark.parametrize("filler", FILLERS)
def test_needle_depth_is_uniform(tasks: RecallTasks, filler: str) -> None:
    rng = np.random.default_rng(6)
    spec = TaskSpec(kind="multikey", length=1500, filler=filler, num_facts=8)
    depths = np.concatenate([tasks.build(rng, spec).depths for _ in range(150)])
    counts, _ = np.histogram(depths, bins=5, range=(0, 1))
    # 240 a bin on average; snapping to cuts moves some over the edges.
    assert counts.min() > 0.75 * depths.size / 5
    assert counts.max() < 1.25 * depths.size / 5


def test_given_depth_is_kept(tasks: RecallTasks) -> None:
    rng = np.random.default_rng(7)
    for depth in (0.0, 0.3, 0.7, 1.0):
        for filler in (*FILLERS, ALL_NEEDLES):
            document = tasks.build(rng, TaskSpec(kind="multikey", length=2000, filler=filler, num_facts=5, depth=depth))
            assert document.depths[0] == pytest.approx(depth, abs=0.06)


def test_documents_are_full(tasks: RecallTasks) -> None:
    rng = np.random.default_rng(8)
    for filler in (*FILLERS, ALL_NEEDLES):
        spec = TaskSpec(kind="multikey", length=2000, filler=filler, num_facts=5, num_questions=3)
        assert tasks.build(rng, spec).ids.size > 1900


def test_same_seed_same_document(tasks: RecallTasks) -> None:
    one, two = (documents(tasks, seed=9, lengths=(400, 1200), count=5) for _ in range(2))
    other = documents(tasks, seed=10, lengths=(400, 1200), count=5)
    assert [d.ids.tolist() for d in one] == [d.ids.tolist() for d in two]
    assert [d.ids.tolist() for d in one] != [d.ids.tolist() for d in other]


def test_too_short_for_one_question_is_refused(tasks: RecallTasks) -> None:
    spec = TaskSpec(kind="multivalue", length=64, num_values=8, value_type=("uuid", "uuid"))
    with pytest.raises(DoesNotFitError, match="length: 64 tokens"):
        tasks.build(np.random.default_rng(0), spec)
    with pytest.raises(ValueError, match="kind: 'niah' given"):
        TaskSpec(kind="niah", length=500)


def test_eval_words_are_never_trained_on() -> None:
    train, held_out = word_lists("train"), word_lists("eval")
    for name in ("nouns", "adjectives", "first_names", "surnames", "cities"):
        one, other = set(getattr(train, name)), set(getattr(held_out, name))
        assert one
        assert other
        assert not one & other
    with pytest.raises(ValueError, match="split: 'test' given"):
        word_lists("test")


def test_eval_prompts(eval_tasks: RecallTasks) -> None:
    train = word_lists("train")
    trained = {*train.nouns, *train.adjectives}
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    for kind in EVAL_KINDS:
        prompts = eval_prompts(kind, 1000, 10, 0, tasks=eval_tasks)
        assert len(prompts) == 10
        for prompt in prompts:
            text = template.render(messages=prompt.messages, bos_token="<s>", add_generation_prompt=True)
            assert eval_tasks.tokenizer.encode(text, add_special_tokens=False).ids == prompt.ids.tolist()
            assert prompt.ids.size <= 1000
            user = prompt.messages[-1]["content"]
            assert all(value in user for value in prompt.expected)
            if kind == "single":
                key = user.rsplit(" for ", 1)[1].split(" ")[0]
                assert not trained & set(key.split("-"))
    depths = [prompt.depth for prompt in eval_prompts("single", 2000, 50, 1, tasks=eval_tasks)]
    counts, _ = np.histogram(depths, bins=5, range=(0, 1))
    assert counts.min() >= 8
    again = eval_prompts("single", 2000, 50, 1, tasks=eval_tasks)
    assert [p.depth for p in again] == depths
    with pytest.raises(ValueError, match="kind: 'copy' given"):
        eval_prompts("copy", 1000, 1, 0, tasks=eval_tasks)


def test_eval_filler_is_held_out(eval_tasks: RecallTasks, texts: list[str]) -> None:
    for prompt in eval_prompts("single", 800, 5, 3, tasks=eval_tasks, filler="prose"):
        lines = prompt.messages[0]["content"].split("\n")[1:-1]
        held_out = "\n".join(texts[-3:])
        found = [line in held_out for line in lines if "special magic" not in line]
        assert sum(found) >= len(found) - 1  # the last line may be cut at a sentence


def test_corpus_refuses_foreign_ids(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"tokens: 2 ids given, not all below .* 700"):
        TokenCorpus(np.array([1, 9999], np.uint16), tokenizer)
