"""RULER's tasks: what a prompt holds and where, its length with two tokenizers, its dependence on the seed only."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparda_jax.eval.essays import generated
from sparda_jax.eval.fitting import TooShortError, largest_fitting
from sparda_jax.eval.needles import NOISE, placed
from sparda_jax.eval.prompting import Prompter, Question, Template
from sparda_jax.eval.ruler import NAMES, make_prompts, needle_prompts, tasks
from tests.eval.support import bundled, bytewise

TASKS = tasks()
NEEDLES = [name for name in NAMES if name.startswith("niah")]
SEEDS = st.integers(0, 10**6)
# The bundled tokenizer has about three bytes a token; from 4096 tokens on words are listed more often.
LENGTHS = [(bundled, 1536), (bytewise, 9000)]


def question(name: str, seed: int, size: int, length: int = 4096) -> Question:
    return TASKS[name].build(random.Random(seed), size, length)


def test_there_are_thirteen() -> None:
    assert len(NAMES) == 13
    assert {name: TASKS[name].new_tokens for name in NAMES if name not in NEEDLES} == {
        "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32,
    }  # fmt: skip
    assert {TASKS[name].new_tokens for name in NEEDLES} == {128}


@pytest.mark.parametrize(("prompter", "length"), LENGTHS, ids=["bundled", "bytes"])
@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_answer_fit_and_fill_the_length(name: str, prompter, length: int) -> None:
    task = TASKS[name]
    for prompt in make_prompts(name, task, prompter(), length=length, seed=3, samples=4):
        total = len(prompt.ids) + prompt.new_tokens
        assert 0.75 * length < total <= length
        assert prompt.ids == prompter().encode(prompt.question)


@given(tokens=st.lists(st.integers(1, 9), min_size=1, max_size=60), least=st.integers(1, 5), room=st.integers(0, 200))
def test_the_largest_size_that_fits(tokens: list[int], least: int, room: int) -> None:
    def tokens_of(size: int) -> int:
        return sum(tokens[i % len(tokens)] for i in range(size))

    fitting = [size for size in range(least, 300) if tokens_of(size) <= room]
    if not fitting:
        with pytest.raises(TooShortError):
            largest_fitting(tokens_of, room, least=least)
    else:
        assert largest_fitting(tokens_of, room, least=least) == max(fitting)


def test_a_length_that_is_too_short_is_named_with_its_task() -> None:
    with pytest.raises(TooShortError, match=r"task cwe at length=300: .* give a greater length"):
        make_prompts("cwe", TASKS["cwe"], bundled(), length=300, seed=1, samples=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_depends_on_its_seed_and_number_only(name: str) -> None:
    def made(seed: int, samples: int) -> list[list[int]]:
        return [p.ids for p in make_prompts(name, TASKS[name], bundled(), length=1536, seed=seed, samples=samples)]

    assert made(5, 3)[:2] == made(5, 2)
    assert len({tuple(ids) for ids in made(5, 2) + made(6, 2)}) == 4


@pytest.mark.parametrize("name", NEEDLES)
@given(seed=SEEDS, size=st.integers(4, 60))
def test_values_stand_in_the_text_once_behind_their_key(name: str, seed: int, size: int) -> None:
    asked = question(name, seed, size)
    numbers = {"niah_multivalue": (4, 1), "niah_multiquery": (4, 4)}
    values, keys = numbers.get(name, (1, 1))
    assert len(set(asked.references)) == values
    ending = asked.text.rpartition("\n")[2]
    kind = "uuid" if name in ("niah_single_3", "niah_multikey_3") else "number"
    queried = re.findall(r"[\w-]+", re.sub(r"^What .*? for | mentioned .*|, and |, ", " ", ending))
    assert len(queried) == keys
    for value in asked.references:
        assert asked.text.count(value) == 1
        assert value not in asked.prefix
        (key,) = re.findall(rf"One of the special magic {kind}s for ([\w-]+) is: {value}\.", asked.text)
        assert key in queried
    needles = re.findall(r"One of the special magic \w+ for ([\w-]+) is: ", asked.text)
    distractors = {"niah_multikey_1": 3, "niah_multikey_2": size, "niah_multikey_3": size}.get(name, 0)
    assert len(needles) == values + distractors
    if name != "niah_multivalue":
        assert len(set(needles)) == len(needles)
    singular = values == 1
    assert asked.text.startswith(f"A special magic {kind} is" if singular else f"Some special magic {kind}s are")
    assert asked.prefix.endswith("text is" if singular else "text are")


def test_haystacks_are_rulers() -> None:
    assert question("niah_single_1", 1, 9).text.count(NOISE + "\n") == 9
    assert NOISE not in question("niah_single_2", 1, 9).text


@given(size=st.integers(1, 40), depth=st.floats(0, 1))
def test_a_needle_lies_at_its_depth(size: int, depth: float) -> None:
    filler = [str(i) for i in range(size)]
    found = placed(filler, ["needle"], [depth])
    assert [piece for piece in found if piece != "needle"] == filler
    assert abs(found.index("needle") - depth * size) <= 0.5


def test_prompts_for_the_heat_map_have_their_depth_in_tokens() -> None:
    depths = [0.0, 0.25, 0.5, 1.0]
    made = needle_prompts(bundled(), length=2048, depths=depths, seed=1, samples=3, sentences=generated)
    for depth, prompts in zip(depths, made, strict=True):
        for prompt in prompts:
            before, _, after = prompt.question.text.partition("One of the special magic numbers")
            context = len(before) + len(after)
            assert abs(len(before) / context - depth) < 0.12
    assert made[0][0].question.text.index("One of the special") < 200


@given(seed=SEEDS, size=st.integers(5, 60))
def test_variables_are_those_that_the_chain_reaches(seed: int, size: int) -> None:
    asked = question("vt", seed, size)
    example, _, rest = asked.text.rpartition("\n\nMemorize")
    value = re.findall(r"assigned the value (\d{5}) in the text above", rest)[0]
    reached = {value}
    assignments = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", rest)
    for name, source in assignments:
        if source in reached:
            reached.add(name)
    assert len(assignments) == 5
    assert reached - {value} == set(asked.references)
    assert rest.count(NOISE) == size
    assert value in asked.prefix
    # The example is complete, and about other variables.
    assert example.count("VAR ") == 9
    assert all(name not in example for name in asked.references)
    assert re.search(r"they are: ([A-Z]{3} ){4}[A-Z]{3}$", example)


@pytest.mark.parametrize(("length", "common", "other"), [(2048, 6, 1), (4096, 30, 3)])
@given(seed=SEEDS, size=st.integers(11, 2500))
def test_common_words_are_the_ten_most_frequent(length: int, common: int, other: int, seed: int, size: int) -> None:
    asked = question("cwe", seed, size, length)
    listed = asked.text.rpartition("appear most often.\n")[2]
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert len(counts) == size
    assert {word for word, count in counts.items() if count == common} == set(asked.references)
    assert set(counts.values()) == {common, other}


@given(seed=SEEDS, size=st.integers(100, 3000))
def test_coded_words_are_the_most_frequent_behind_the_dots(seed: int, size: int) -> None:
    asked = question("fwe", seed, size)
    words = asked.text.partition("coded words. ")[2].partition("\nQuestion")[0].split()
    ranked = Counter(words).most_common(5)
    assert [word for word, _ in ranked[:4]] == ["...", *asked.references]
    counts = [count for _, count in ranked]
    assert counts[:4] == sorted(counts[:4], reverse=True)
    assert len(set(counts[:4])) == 4
    assert counts[3] > counts[4]


def documents(text: str) -> list[str]:
    context = text.partition("given documents.\n\n")[2].rpartition("\n\nAnswer the question")[0]
    return re.split(r"(?:^|\n\n)Document \d+:\n", context)[1:]


@given(seed=SEEDS, size=st.integers(1, 40))
def test_one_document_answers(seed: int, size: int) -> None:
    asked = question("qa_1", seed, size)
    found = documents(asked.text)
    assert len(found) == size
    name = re.findall(r"(?:was|gave|that) (\w+ \w\. \w+)", asked.text.rpartition("Question: ")[2])[0]
    (document,) = [text for text in found if text.startswith(name + "\n")]
    assert asked.references[0] in document
    assert asked.text.count(asked.references[0]) == 1


@given(seed=SEEDS, size=st.integers(2, 40))
def test_two_documents_answer(seed: int, size: int) -> None:
    asked = question("qa_2", seed, size)
    found = documents(asked.text)
    assert len(found) == size
    name = re.findall(r"where (\w+ \w\. \w+) was born", asked.text.rpartition("Question: ")[2])[0]
    (person,) = [text for text in found if text.startswith(name + "\n")]
    town = re.findall(r"born in (\w+) in", person)[0]
    (about,) = [text for text in found if text.startswith(town + "\n")]
    assert asked.references[0] in about
    assert asked.references[0] not in person
    assert asked.text.count(asked.references[0]) == 1


def test_templates() -> None:
    asked = Question(text="What?", prefix=" It is", references=("x",))
    tokenizer = bundled().tokenizer
    assert tokenizer.decode(bundled().encode(asked), skip_special_tokens=False) == (
        "<s><|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n It is"
    )
    thinking = Prompter(tokenizer=tokenizer, template=Template.MINICPM4)
    assert "What? /no_think<|im_end|>" in tokenizer.decode(thinking.encode(asked), skip_special_tokens=False)
    assert bytewise().tokenizer.decode(bytewise().encode(asked)) == "What? It is"
