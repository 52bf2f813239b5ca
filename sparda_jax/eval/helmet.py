"""HELMET (Yen et al. 2025), for whoever has its files: recall, retrieval-augmented generation and re-ranking.

Its other categories fetch their data elsewhere or need another model as a judge, and are not here.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparda_jax.config import ConfigError
from sparda_jax.eval._helmet_examples import Example, Row, key_values, needles, questions, rankings
from sparda_jax.eval.cells import Job
from sparda_jax.eval.fitting import TooShortError
from sparda_jax.eval.prompting import Prompt, Prompter, Question, Template
from sparda_jax.eval.rows import checked, read_rows, without_end
from sparda_jax.eval.scoring import Score, share_matched
from sparda_jax.eval.text_scores import ranking_gain, substring_exact_match

# Documents (key-value pairs) that fit a length of Llama's tokens, in the names of the files.
_KEY_VALUES = {8192: 105, 16384: 220, 32768: 440, 65536: 900, 131072: 1800}
_DOCUMENTS = {8192: 50, 16384: 105, 32768: 220, 65536: 440, 131072: 1000}
_RANKED = {8192: 50, 16384: 130, 32768: 285, 65536: 600, 131072: 1000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelmetTask:
    """One data set.

    Attributes:
        file: within HELMET's ``data``, with the place ``{k}`` for what ``sizes`` says, or ``{length}``.
        demos: the file that examples are drawn from.
        sizes: by length.
        new_tokens: length of the longest answer.
        examples: from the file's rows, the demos' rows and a limit.
        score: of an answer.
        one_line: the answer ends with its line.
    """

    file: str
    demos: str | None = None
    sizes: Mapping[int, int] | None = None
    new_tokens: int
    examples: Callable[[Sequence[Row], Sequence[Row], int], list[Example]]
    score: Score
    one_line: bool = False


def _ruler(file: str, new_tokens: int, *, several: bool) -> HelmetTask:
    def examples(rows: Sequence[Row], demos: Sequence[Row], limit: int) -> list[Example]:
        return needles(rows, demos, limit, several=several)

    name = f"ruler/{file}/validation_{{length}}.jsonl"
    return HelmetTask(file=name, new_tokens=new_tokens, examples=examples, score=share_matched)


def _kilt(file: str, demos: str, rarer_than: float | None = None) -> HelmetTask:
    def examples(rows: Sequence[Row], others: Sequence[Row], limit: int) -> list[Example]:
        return questions(rows, others, limit, rarer_than=rarer_than)

    return HelmetTask(
        file=f"kilt/{file}",
        demos=f"kilt/{demos}",
        sizes=_DOCUMENTS,
        new_tokens=20,
        examples=examples,
        score=substring_exact_match,
        one_line=True,
    )


TASKS: Mapping[str, HelmetTask] = {
    "ruler_niah_mk_2": _ruler("niah_multikey_2", 50, several=False),
    "ruler_niah_mk_3": _ruler("niah_multikey_3", 100, several=False),
    "ruler_niah_mv": _ruler("niah_multivalue", 50, several=True),
    "json_kv": HelmetTask(
        file="json_kv/test_k{k}_dep6.jsonl",
        sizes=_KEY_VALUES,
        new_tokens=100,
        examples=key_values,
        score=substring_exact_match,
    ),
    "kilt_nq": _kilt("nq-dev-multikilt_1000_k{k}_dep6.jsonl", "nq-train-multikilt_1000_k3_dep6.jsonl"),
    "kilt_triviaqa": _kilt(
        "triviaqa-dev-multikilt_1000_k{k}_dep6.jsonl", "triviaqa-train-multikilt_1000_k3_dep6.jsonl"
    ),
    "kilt_hotpotqa": _kilt(
        "hotpotqa-dev-multikilt_1000_k{k}_dep3.jsonl", "hotpotqa-train-multikilt_1000_k3_dep3.jsonl"
    ),
    "kilt_popqa_3": _kilt("popqa_test_1000_k{k}_dep6.jsonl", "popqa_test_1000_k3_dep6.jsonl", 3.0),
    "msmarco_rerank_psg": HelmetTask(
        file="msmarco/test_reranking_data_k{k}_dep3.jsonl",
        demos="msmarco/test_reranking_data_k10_dep3.jsonl",
        sizes=_RANKED,
        new_tokens=200,
        examples=rankings,
        score=ranking_gain,
        one_line=True,
    ),
}


def make_job(name: str, folder: Path, prompter: Prompter, *, length: int, samples: int) -> Job:
    """The prompts of one data set; contexts that are too long lose their end.

    Args:
        name: of `TASKS`.
        folder: HELMET's ``data``.
        prompter: how questions become tokens.
        length: most tokens of prompt and answer together; one of the lengths that files are made for.
        samples: so many questions.

    Raises:
        ConfigError: there is no file for the length, it can't be read, or a row lacks a field.
        TooShortError: the length has no room for a prompt.
    """
    task = TASKS[name]
    if task.sizes is not None and length not in task.sizes:
        raise ConfigError(f"length={length} has no file of {name}: use {', '.join(map(str, task.sizes))}")
    size = None if task.sizes is None else task.sizes[length]
    file = folder / task.file.format(k=size, length=length)
    rows, demos = read_rows(file), [] if task.demos is None else read_rows(folder / task.demos)
    # Without a template nothing else stands between the question and the beginning of the answer.
    between = "\n" if prompter.template is Template.PLAIN else ""

    def prompt(example: Example) -> Prompt:
        def asked(context: str) -> Question:
            prefix = between + example.prefix
            return Question(text=example.text(context), prefix=prefix, references=example.references)

        return without_end(asked, example.context, prompter, length=length, new_tokens=task.new_tokens)

    def of_line(answer: str, references: Sequence[str]) -> float:
        return task.score(answer.partition("\n")[0], references)

    try:  # some fields are read when a prompt is written
        prompts = list(map(prompt, task.examples(rows, demos, samples)))
    except TooShortError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"data={file} is no file of HELMET's {name}: {error!r} in a row") from error
    job = Job(task=name, length=length, prompts=prompts, score=of_line if task.one_line else task.score)
    return checked(job, file)
