"""LongBench (Bai et al. 2024), for whoever has its files: the English tasks, with the published prompts and metrics."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from sparda_jax.config import ConfigError
from sparda_jax.eval.cells import Job
from sparda_jax.eval.prompting import Prompter, Question, Template
from sparda_jax.eval.rows import checked, read_rows, without_middle
from sparda_jax.eval.scoring import Score
from sparda_jax.eval.text_scores import (
    class_named,
    first_line,
    line_similarity,
    numbers_right,
    rouge_l,
    word_f1,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongBenchTask:
    """One data set.

    Attributes:
        prompt: its template, with places for ``context`` and ``input``.
        new_tokens: length of the longest answer.
        score: of an answer; None: by the classes that the file names.
        few_shot: the context holds examples, so no chat template is used and the answer ends with its line.
    """

    prompt: str
    new_tokens: int
    score: Score | None
    few_shot: bool = False


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me the "
    "answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_CONCISE = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation."
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
TASKS: Mapping[str, LongBenchTask] = {
    "gov_report": LongBenchTask(
        prompt="You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n"
        "{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        new_tokens=512,
        score=rouge_l,
    ),
    "triviaqa": LongBenchTask(
        prompt="Answer the question based on the given passage. Only give me the answer and do not output any other "
        "words. The following are some examples.\n\n{context}\n\n{input}",
        new_tokens=32,
        score=word_f1,
        few_shot=True,
    ),
    "narrativeqa": LongBenchTask(
        prompt="You are given a story, which can be either a novel or a movie script, and a question. Answer the "
        f"question {_CONCISE}\n\nStory: {{context}}\n\nNow, answer the question based on the story {_CONCISE}\n\n"
        "Question: {input}\n\nAnswer:",
        new_tokens=128,
        score=word_f1,
    ),
    "qasper": LongBenchTask(
        prompt=f"You are given a scientific article and a question. Answer the question {_ARTICLE}\n\nArticle: "
        f"{{context}}\n\n Answer the question based on the above article {_ARTICLE}\n\nQuestion: {{input}}\n\nAnswer:",
        new_tokens=128,
        score=word_f1,
    ),
    "qmsum": LongBenchTask(
        prompt="You are given a meeting transcript and a query containing a question or instruction. Answer the query "
        "in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting "
        "transcript in one or more sentences.\n\nQuery: {input}\nAnswer:",
        new_tokens=512,
        score=rouge_l,
    ),
    "musique": LongBenchTask(prompt=_PASSAGES, new_tokens=32, score=word_f1),
    "2wikimqa": LongBenchTask(prompt=_PASSAGES, new_tokens=32, score=word_f1),
    "multifieldqa_en": LongBenchTask(
        prompt="Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based "
        "on the above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        new_tokens=64,
        score=word_f1,
    ),
    "repobench-p": LongBenchTask(
        prompt="Please complete the code given below. \n{context}{input}Next line of code:\n",
        new_tokens=64,
        score=line_similarity,
        few_shot=True,
    ),
    "hotpotqa": LongBenchTask(prompt=_PASSAGES, new_tokens=32, score=word_f1),
    "trec": LongBenchTask(
        prompt="Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n"
        "{input}",
        new_tokens=64,
        score=None,
        few_shot=True,
    ),
    "passage_retrieval_en": LongBenchTask(
        prompt="Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
        "abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the "
        'paragraph that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        new_tokens=32,
        score=numbers_right,
    ),
    "passage_count": LongBenchTask(
        prompt="There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
        "carefully read these paragraphs and determine how many unique paragraphs there are after removing duplicates. "
        "In other words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final "
        "count of unique paragraphs after removing duplicates. The output format should only contain the number, such "
        "as 1, 2, 3, and so on.\n\nThe final answer is: ",
        new_tokens=32,
        score=numbers_right,
    ),
    "samsum": LongBenchTask(
        prompt="Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n"
        "{input}",
        new_tokens=128,
        score=rouge_l,
        few_shot=True,
    ),
}
"""The fourteen of the paper, by the names of their files."""


def make_job(name: str, folder: Path, prompter: Prompter, *, length: int, samples: int | None) -> Job:
    """The prompts of one data set; the middle of those that are too long is left out, as published.

    Args:
        name: of `TASKS`; its file is ``FOLDER/NAME.jsonl``.
        folder: LongBench's ``data``.
        prompter: how questions become tokens.
        length: most tokens of prompt and answer together.
        samples: so many rows from the beginning; None: all.

    Raises:
        ConfigError: the file can't be read, or a row lacks a field.
        TooShortError: the length has no room for a prompt.
    """
    task, file = TASKS[name], folder / f"{name}.jsonl"
    chosen = dataclasses.replace(prompter, template=Template.PLAIN) if task.few_shot else prompter
    rows = read_rows(file)[:samples]
    prompts = []
    try:
        for row in rows:
            text = task.prompt.format(context=row["context"], input=row["input"])
            asked = Question(text=text, prefix="", references=tuple(row["answers"]))
            prompts.append(without_middle(asked, chosen, length=length, new_tokens=task.new_tokens))
        score = task.score or class_named(tuple(rows[0]["all_classes"]))
    except (LookupError, TypeError) as error:
        raise ConfigError(f"data={file} is no file of LongBench: {error!r} in a row") from error
    ends_with_line = task.few_shot and name != "repobench-p"
    job = Job(task=name, length=length, prompts=prompts, score=first_line(score) if ends_with_line else score)
    return checked(job, file)
