"""The readers of LongBench and HELMET, on small files in their format."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparda_jax.config import ConfigError
from sparda_jax.eval import helmet, longbench
from sparda_jax.eval.cells import Job
from sparda_jax.eval.fitting import TooShortError
from tests.eval.support import bundled, bytewise


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def score(job: Job, *answers: str) -> list[float]:
    return [job.score(text, p.question.references) for text, p in zip(answers, job.prompts, strict=True)]


def test_longbench(tmp_path: Path) -> None:
    rows = [
        {"context": f"begin {i} " + "word " * 500 + "end", "input": "why?", "answers": ["Because.", "So"]}
        for i in range(3)
    ]
    write(tmp_path / "hotpotqa.jsonl", rows)
    whole = longbench.make_job("hotpotqa", tmp_path, bundled(), length=2048, samples=None)
    assert len(whole.prompts) == 3
    text = bundled().tokenizer.decode(whole.prompts[0].ids, skip_special_tokens=False)
    assert text.startswith("<s><|im_start|>user\nAnswer the question based on the given passages.")
    assert text.endswith("\n\nQuestion: why?\nAnswer:<|im_end|>\n<|im_start|>assistant\n")
    assert whole.prompts[0].new_tokens == 32
    assert score(whole, "because", "so it is", "no") == [1.0, pytest.approx(0.5), 0.0]
    # The middle is left out.
    short = longbench.make_job("hotpotqa", tmp_path, bundled(), length=300, samples=2)
    assert len(short.prompts) == 2
    for prompt in short.prompts:
        assert 260 <= len(prompt.ids) <= 268
        text = bundled().tokenizer.decode(prompt.ids)
        assert "user\nAnswer the question" in text
        assert text.endswith("Question: why?\nAnswer:\nassistant\n")
        assert "end" in text
        assert 50 < text.count("word") < 300
    with pytest.raises(TooShortError, match="too few for a prompt"):
        longbench.make_job("hotpotqa", tmp_path, bundled(), length=42, samples=1)


def test_longbench_few_shot_tasks_have_no_template_and_one_line(tmp_path: Path) -> None:
    row = {"context": "c", "input": "Question: x\nType:", "answers": ["Food"], "all_classes": ["Food", "Place"]}
    write(tmp_path / "trec.jsonl", [row])
    job = longbench.make_job("trec", tmp_path, bundled(), length=512, samples=None)
    text = bundled().tokenizer.decode(job.prompts[0].ids, skip_special_tokens=False)
    assert text.endswith("examples of questions.\n\nc\nQuestion: x\nType:")
    assert "im_start" not in text
    assert score(job, "\nFood\nPlace") == [1.0]
    assert score(job, "Food Place") == [0.5]


def test_longbench_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data=.*qasper\.jsonl can't be read"):
        longbench.make_job("qasper", tmp_path, bundled(), length=512, samples=None)
    write(tmp_path / "qasper.jsonl", [{"context": "c"}])
    with pytest.raises(ConfigError, match=r"no file of LongBench: KeyError\('input'\) in a row"):
        longbench.make_job("qasper", tmp_path, bundled(), length=512, samples=None)


def test_the_fourteen_tasks() -> None:
    assert len(longbench.TASKS) == 14
    for task in longbench.TASKS.values():
        assert task.prompt.format(context="CCC", input="III").count("CCC") == 1


def test_helmet_recall(tmp_path: Path) -> None:
    row = {"context": "hay", "query": "k", "type_needle_v": "numbers", "outputs": ["11", "22"]}
    write(tmp_path / "ruler/niah_multivalue/validation_1024.jsonl", [row])
    job = helmet.make_job("ruler_niah_mv", tmp_path, bundled(), length=1024, samples=100)
    asked = job.prompts[0].question
    assert asked.text.startswith("Some special magic numbers are hidden")
    assert asked.text.endswith("hay\nWhat are all the special magic numbers for k mentioned in the provided text?")
    assert asked.prefix == "The special magic numbers for k mentioned in the provided text are"
    assert score(job, "22 and 33") == [0.5]
    plain = helmet.make_job("ruler_niah_mv", tmp_path, bytewise(), length=1024, samples=1)
    assert plain.prompts[0].question.prefix == "\n" + asked.prefix
    rows = [
        {"context": '{"a": "1"}', "question": f"q{i}", "answer": f"v{i}", "demos": [["x", "1"], ["y", "2"], ["z", "3"]]}
        for i in range(9)
    ]
    write(tmp_path / "json_kv/test_k105_dep6.jsonl", rows)
    job = helmet.make_job("json_kv", tmp_path, bundled(), length=8192, samples=4)
    assert len({prompt.question.references for prompt in job.prompts}) == 4
    (value,) = job.prompts[0].question.references
    assert job.prompts[0].question.text.endswith(
        "Key: x\nCorresponding value: 1\n\nKey: y\nCorresponding value: 2\n\nKey: q" + value[1:]
    )
    with pytest.raises(ConfigError, match="length=1000 has no file of json_kv: use 8192, 16384"):
        helmet.make_job("json_kv", tmp_path, bundled(), length=1000, samples=4)


def qa_rows(count: int, first: int, popular: int = 10) -> list[dict[str, Any]]:
    """Two rows for each question, as for two places of its document."""
    return [
        {
            "id": f"id{i}",
            "question": f"what is {i}?",
            "answers": [f"it is {i}"],
            "s_pop": popular if i % 2 else 10**6,
            "ctxs": [{"title": f"T{i}", "text": f"passage {i} {place}"}, {"title": "U", "text": "other " * 40}],
        }
        for i in range(first, first + count)
        for place in range(2)
    ]


def test_helmet_rag(tmp_path: Path) -> None:
    write(tmp_path / "kilt/nq-dev-multikilt_1000_k50_dep6.jsonl", qa_rows(6, 0))
    write(tmp_path / "kilt/nq-train-multikilt_1000_k3_dep6.jsonl", qa_rows(6, 100))
    job = helmet.make_job("kilt_nq", tmp_path, bundled(), length=8192, samples=3)
    assert len(job.prompts) == 6  # three questions at two places
    again = helmet.make_job("kilt_nq", tmp_path, bundled(), length=8192, samples=3)
    assert [prompt.ids for prompt in again.prompts] == [prompt.ids for prompt in job.prompts]
    asked = job.prompts[0].question
    shown, _, question = asked.text.rpartition("\n\nQuestion: ")
    number = asked.references[0].removeprefix("it is ")
    assert question == f"what is {number}?"
    examples = shown.split("Answer: ")[2:]
    assert len(examples) == 2
    assert all(example.startswith("it is 10") for example in examples)
    assert f"Document (Title: T{number}): passage {number} 0" in shown
    assert asked.prefix == "Answer:"
    assert job.score(f" It is {number}!\nmore", asked.references) == 1.0
    assert job.score(f"no\nit is {number}", asked.references) == 0.0


def test_helmet_shortens_documents_from_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "kilt/popqa_test_1000_k50_dep6.jsonl", qa_rows(8, 0))
    write(tmp_path / "kilt/popqa_test_1000_k3_dep6.jsonl", qa_rows(8, 0))
    whole = helmet.make_job("kilt_popqa_3", tmp_path, bundled(), length=8192, samples=100)
    length = min(len(prompt.ids) for prompt in whole.prompts)  # 20 of them are for the answer
    monkeypatch.setitem(helmet._DOCUMENTS, length, 50)
    job = helmet.make_job("kilt_popqa_3", tmp_path, bundled(), length=length, samples=100)
    assert len(job.prompts) == len(whole.prompts) == 8  # the rare ones
    for prompt, long in zip(job.prompts, whole.prompts, strict=True):
        number = int(prompt.question.references[0].removeprefix("it is "))
        assert number % 2 == 1
        assert length - 25 <= len(prompt.ids) <= length - 20
        shown = prompt.question.text
        assert shown.endswith(f"Question: what is {number}?")
        assert shown.count(f"what is {number}?") == 1  # none of the examples
        assert f"passage {number} " in shown
        assert shown.count("other") < long.question.text.count("other")


def test_helmet_rerank(tmp_path: Path) -> None:
    def row(i: int) -> dict[str, Any]:
        documents = [{"id": f"{10 * i + j}", "text": f"d{j}", "label": j} for j in range(3)]
        return {"qid": f"q{i}", "query": f"find {i}", "ctxs": documents}

    write(tmp_path / "msmarco/test_reranking_data_k50_dep3.jsonl", [row(i) for i in range(4)])
    write(tmp_path / "msmarco/test_reranking_data_k10_dep3.jsonl", [row(i) for i in range(4)])
    job = helmet.make_job("msmarco_rerank_psg", tmp_path, bundled(), length=8192, samples=2)
    for prompt in job.prompts:
        text = prompt.question.text
        number = int(text.rpartition("find ")[2])
        ids = [str(10 * number + j) for j in (2, 1, 0)]
        assert prompt.question.references == tuple(f"{name}:{j}" for name, j in zip(ids[::-1], range(3), strict=True))
        assert text.count("\nRanking: ") == 3  # the format and two examples
        assert f"[ID: {ids[0]}] Document: d2" in text
        assert job.score(" ID" + " > ID".join(ids), prompt.question.references) == 1.0
        assert job.score(" ID" + " > ID".join(ids[::-1]), prompt.question.references) < 1.0


def test_rows_are_lines_whatever_characters_stand_in_them(tmp_path: Path) -> None:
    """JSON may hold U+2028, U+0085 and the like as they are; they end a line of text, and none of JSON."""
    row = {"context": "one\u2028two\x85three\u2029", "input": "why?", "answers": ["x"]}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8")
    job = longbench.make_job("hotpotqa", tmp_path, bundled(), length=512, samples=None)
    assert "one\u2028two\x85three\u2029" in job.prompts[0].question.text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("hotpotqa", "\n", "has no rows"),
        ("hotpotqa", "[1]", r"a line is no object: \[1\]"),
        ("hotpotqa", "[" * 100_000, "can't be read as lines of JSON"),
        ("hotpotqa", '{"context": "c", "input": "i", "answers": []}', r"answers \(\) can't be scored"),
        ("samsum", '{"context": "c", "input": "i", "answers": [1]}', r"answers \(1,\) can't be scored"),
        ("passage_count", '{"context": "c", "input": "i", "answers": ["x"]}', r"answers \('x',\) can't be scored"),
    ],
)
def test_rows_that_cannot_be_asked_are_named_before_anything_is(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / f"{name}.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        longbench.make_job(name, tmp_path, bundled(), length=512, samples=None)


def test_helmet_names_what_is_missing(tmp_path: Path) -> None:
    row = {"context": "c", "answer": "v", "demos": [["x", "1"]]}
    write(tmp_path / "json_kv/test_k105_dep6.jsonl", [row])
    with pytest.raises(ConfigError, match=r"no file of HELMET's json_kv: KeyError\('question'\) in a row"):
        helmet.make_job("json_kv", tmp_path, bundled(), length=8192, samples=1)
