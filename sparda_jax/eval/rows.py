"""Rows of files of JSON lines, and prompts whose text has to be shortened to fit."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparda_jax.config import ConfigError
from sparda_jax.eval.cells import Job
from sparda_jax.eval.fitting import TooShortError
from sparda_jax.eval.prompting import Prompt, Prompter, Question


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines.

    Raises:
        ConfigError: it can't be read, or is no such file.
    """
    try:
        # Not by splitlines, which also divides at characters that stand in JSON strings as they are, such as U+2028.
        return [_row(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"data={file} can't be read as lines of JSON: {error}") from error


def checked(job: Job, file: Path) -> Job:
    """The job, once each of its prompts could be scored: a metric that fails later would cost the answers.

    Raises:
        ConfigError: ``file`` has no rows, or answers that the metric can't compare with.
    """
    if not job.prompts:
        raise ConfigError(f"data={file} has no rows: fetch it again, or leave {job.task} out of --tasks")
    for prompt in job.prompts:
        references = prompt.question.references
        try:
            job.score("1", references)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"data={file} has a row whose answers {references!r} can't be scored") from error
    return job


def _row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a line is no object: {line[:60]}")
    return row


def without_middle(asked: Question, prompter: Prompter, *, length: int, new_tokens: int) -> Prompt:
    """The prompt of a question; as many tokens as necessary are taken out of the middle of its text.

    Raises:
        TooShortError: the length has no room for it.
    """
    room, tokenizer = length - new_tokens, prompter.tokenizer
    ids, whole = prompter.encode(asked), tokenizer.encode(asked.text, add_bos=False)
    keep = len(whole)
    while len(ids) > room:
        keep -= len(ids) - room
        if keep < 2:
            raise TooShortError(f"{room} tokens are too few for a prompt: give a greater length")
        halves = whole[: keep // 2], whole[len(whole) - keep // 2 :]
        text = "".join(tokenizer.decode(half, skip_special_tokens=False) for half in halves)
        ids = prompter.encode(dataclasses.replace(asked, text=text))
    return Prompt(ids=ids, question=asked, new_tokens=new_tokens)


def without_end(
    asked: Callable[[str], Question], context: str, prompter: Prompter, *, length: int, new_tokens: int
) -> Prompt:
    """The prompt of a question about a context; as many tokens as necessary are taken from the context's end.

    Raises:
        TooShortError: the length has no room for it.
    """
    room, tokenizer = length - new_tokens, prompter.tokenizer
    question = asked(context)
    ids, whole = prompter.encode(question), tokenizer.encode(context, add_bos=False)
    keep = len(whole)
    while len(ids) > room:
        keep -= len(ids) - room
        if keep < 1:
            raise TooShortError(f"{room} tokens are too few for a prompt: give a greater length")
        question = asked(tokenizer.decode(whole[:keep], skip_special_tokens=False))
        ids = prompter.encode(question)
    return Prompt(ids=ids, question=question, new_tokens=new_tokens)
