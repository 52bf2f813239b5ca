"""The rows of HELMET's files as questions, in its words."""

import dataclasses
import hashlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SHOTS, SEED = 2, 42
Row = dict[str, Any]
_RULER_TEXT = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n{context}\nWhat {are_all} the special magic {kind} for {query} mentioned in the "
    "provided text?"
)
_RULER_PREFIX = "The special magic {kind} for {query} mentioned in the provided text {are}"
_QA_TEXT = (
    "Use the given documents to write a concise and short answer to the question. Write your answer in the following "
    "format:\nAnswer: [answer]\n\n{demos}{context}\n\nQuestion: {question}"
)
_RANK_TEXT = (
    "You are provided with a list of documents, each indicated by their ID. Rank each document based on their "
    "relevance to the question in descending order from most relelvant to least relevant texts. Include all documents "
    "in the rankings. Write your answer using the unique IDs, with the following format:\nRanking: ID3 > ID1 > ID2\n\n"
    "{demos}{context}\n\nQuery: {question}"
)
_KV_TEXT = (
    "{context}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n"
    "{demos}Key: {question}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A row: a text with the place ``{context}`` for what may be shortened, which is named apart."""

    text: Callable[[str], str]
    context: str
    prefix: str
    references: tuple[str, ...]


def _shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    """As the library ``datasets`` shuffles."""
    return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]


def _some(rows: Sequence[Row], key: str, limit: int) -> list[Row]:
    """The rows of so many questions, in their order; a question stands there once for each place of its document."""
    keys = sorted({row[key] for row in rows})
    chosen = set(random.Random(SEED).sample(keys, min(limit, len(keys))))
    return [row for row in rows if row[key] in chosen]


def _demos(rows: Sequence[Row], key: str, of: str) -> list[Row]:
    """Examples for one question: the same every time, none of them the question itself, none twice."""
    seed = int(hashlib.sha256(of.encode()).hexdigest(), 16) % 2**31
    found: dict[str, Row] = {}
    for row in _shuffled([row for row in rows if row[key] != of], seed):
        found.setdefault(row[key], row)
    return list(found.values())[:SHOTS]


def needles(rows: Sequence[Row], _: Sequence[Row], limit: int, *, several: bool) -> list[Example]:
    """RULER's needles; ``several``: the answer has several values."""
    found = []
    for row in _shuffled(rows, SEED)[:limit]:
        words = {"kind": row["type_needle_v"], "query": row["query"], "are": "are" if several else "is"}
        words |= {"some": "Some" if several else "A", "are_all": "are all" if several else "is"}
        references = row["answer"] if "answer" in row else row["outputs"]
        found.append(
            Example(
                text=lambda context, words=words: _RULER_TEXT.format(context=context, **words),
                context=row["context"],
                prefix=_RULER_PREFIX.format(**words),
                references=tuple(references),
            )
        )
    return found


def key_values(rows: Sequence[Row], _: Sequence[Row], limit: int) -> list[Example]:
    """A value of a JSON object, by its key."""
    found = []
    for row in _shuffled(rows, SEED)[:limit]:
        demos = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in row["demos"][:SHOTS])
        found.append(
            Example(
                text=lambda context, row=row, demos=demos: _KV_TEXT.format(
                    context=context, demos=demos, question=row["question"]
                ),
                context=row["context"],
                prefix="Corresponding value:",
                references=_as_tuple(row["answer"]),
            )
        )
    return found


def _as_tuple(answer: str | Sequence[str]) -> tuple[str, ...]:
    return (answer,) if isinstance(answer, str) else tuple(answer)


def _passages(row: Row) -> str:
    return "\n\n".join(f"Document (Title: {part['title']}): {part['text']}" for part in row["ctxs"])


def questions(
    rows: Sequence[Row], demos: Sequence[Row], limit: int, *, rarer_than: float | None = None
) -> list[Example]:
    """Questions over documents. ``rarer_than``: only about things whose popularity has a smaller logarithm."""
    if rarer_than is not None:
        rows, demos = ([row for row in x if math.log10(row["s_pop"]) < rarer_than] for x in (rows, demos))
    key = "id" if "id" in rows[0] else "question"
    found = []
    for row in _some(rows, key, limit):
        shown = "".join(
            f"{_passages(demo)}\n\nQuestion: {demo['question']}\nAnswer: {demo['answers'][0]}\n\n"
            for demo in _demos(demos, key, row[key])
        )
        found.append(
            Example(
                text=lambda context, row=row, shown=shown: _QA_TEXT.format(
                    context=context, demos=shown, question=row["question"]
                ),
                context=_passages(row),
                prefix="Answer:",
                references=tuple(row["answers"]),
            )
        )
    return found


def _listed(row: Row) -> str:
    def one(part: Row) -> str:
        title = f" (Title: {part['title']})" if "title" in part else ""
        return f"[ID: {part['id']}] Document{title}: {part['text']}"

    return "\n\n".join(map(one, row["ctxs"]))


def rankings(rows: Sequence[Row], demos: Sequence[Row], limit: int) -> list[Example]:
    """Documents to be put in order."""
    found = []
    for row in _some(rows, "qid", limit):
        shown = ""
        for demo in _demos(demos, "qid", row["qid"]):
            ids = [part["id"] for part in sorted(demo["ctxs"], key=lambda part: part["label"], reverse=True)]
            shown += f"{_listed(demo)}\n\nQuery: {demo['query']}\nRanking: {' > '.join(ids)}\n\n"
        found.append(
            Example(
                text=lambda context, row=row, shown=shown: _RANK_TEXT.format(
                    context=context, demos=shown, question=row["query"]
                ),
                context=_listed(row),
                prefix="Ranking:",
                references=tuple(f"{part['id']}:{part['label']}" for part in row["ctxs"]),
            )
        )
    return found
