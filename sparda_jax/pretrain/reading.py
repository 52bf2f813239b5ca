"""Reading: questions about one document among many, on people and towns that do not exist.

RULER's frame of `qa`, but none of the sentences or questions of `sparda_jax.eval.documents`: what is measured there is
whether reading carries over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sparda_jax.pretrain.facts import Exchange, FactSampler, answer_pieces
from sparda_jax.pretrain.task_words import WordLists

_TASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\n{question}"
)
_MOST_QUESTIONS = 12
_TWO_HOPS = 0.4
# Kind of value, sentence, question.
_OF_PEOPLE = (
    ("human", "{n} was married to {v} for many years.", "Who was {n} married to?"),
    ("human", "The best friend of {n} was {v}.", "Who was the best friend of {n}?"),
    ("human", "{n} sold the house to {v}.", "To whom did {n} sell the house?"),
    ("human", "As a child {n} was brought up by {v}.", "Who brought up {n}?"),
    ("place", "{n} died in {v} after a short illness.", "Where did {n} die?"),
    ("place", "{n} went to school in {v}.", "In which town did {n} go to school?"),
    ("place", "For ten years {n} worked in {v}.", "Where did {n} work for ten years?"),
    ("title", "{n} painted a picture called {v}.", "What is the name of the picture that {n} painted?"),
    ("title", "{n} sailed on a ship named {v}.", "What is the name of the ship that {n} sailed on?"),
    ("title", "The song {v} was written by {n}.", "Which song was written by {n}?"),
    ("year", "{n} returned home in {v}.", "In which year did {n} return home?"),
    ("year", "{n} inherited a farm in {v}.", "In which year did {n} inherit a farm?"),
)
_OF_TOWNS = (
    ("human", "The harbour of {n} was built by {v}.", "Who built the harbour of {n}?"),
    ("human", "The oldest inn of {n} belonged to {v}.", "To whom did the oldest inn of {n} belong?"),
    ("place", "A straight road leads from {n} to {v}.", "Where does the straight road from {n} lead?"),
    ("title", "The newspaper of {n} is called {v}.", "What is the newspaper of {n} called?"),
    ("title", "The hill above {n} is known as {v}.", "What is the hill above {n} known as?"),
    ("year", "The church of {n} burned down in {v}.", "In which year did the church of {n} burn down?"),
)
_IDLE = (
    "Little else is known.",
    "The neighbours spoke well of it.",
    "The letters from those years were lost.",
    "A portrait hangs in the town hall.",
    "There were good years and bad ones.",
    "Nobody wrote down the reasons.",
)
_LIVED = ("place", "{n} lived in {v}.", "In which town did {n} live?")
_HEADS = "Ash Birch Clay Dun East Fox Gold Hart Iron Knap Lang Mill North Oak Pen Raven Stone Thorn West Wolf".split()
_TAILS = "bury combe cote don gate hurst land mouth ness pool stoke ton well worth".split()


@dataclass(frozen=True, kw_only=True)
class _Asked:
    question: str
    value: str


class Reading:
    """Draws documents and questions about them.

    Args:
        words: word lists of the split.
        facts: draws keys that are not in use.
    """

    def __init__(self, words: WordLists, facts: FactSampler) -> None:
        self._words, self._facts = words, facts

    def draw(self, rng: np.random.Generator, size: int) -> list[Exchange]:
        """Questions about ``size`` documents; the first holds them all."""
        taken: set[str] = set()
        texts: list[str] = []
        asked: list[_Asked] = []
        while len(texts) < size:
            name = self._value(rng, "human", taken)
            town = self._value(rng, "place", taken)
            text, questions = self._document(rng, name, _OF_PEOPLE, taken, lived_in=town)
            texts.append(text)
            asked += questions
            if len(texts) < size and rng.random() < _TWO_HOPS:
                text, questions = self._document(rng, town, _OF_TOWNS, taken)
                texts.append(text)
                asked += questions
                away = f"the town where {name} lived"
                asked += [_Asked(question=q.question.replace(town, away), value=q.value) for q in questions]
        texts = [texts[i] for i in rng.permutation(len(texts))]
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(texts, start=1))
        chosen = [asked[i] for i in rng.permutation(len(asked))[:_MOST_QUESTIONS]]
        exchanges = []
        for one in chosen:
            question = f"Question: {one.question}"
            if not exchanges:
                question = _TASK.format(context=context, question=question)
            answer = answer_pieces(" Answer: \0", (one.value,))
            exchanges.append(Exchange(question=question, answer=answer, values=(one.value,)))
        return exchanges

    def _document(
        self,
        rng: np.random.Generator,
        name: str,
        relations: tuple[tuple[str, str, str], ...],
        taken: set[str],
        *,
        lived_in: str | None = None,
    ) -> tuple[str, list[_Asked]]:
        told = [relations[i] for i in rng.permutation(len(relations))[: rng.integers(2, 4)]]
        facts = [(*relation[1:], self._value(rng, relation[0], taken)) for relation in told]
        if lived_in is not None:
            facts.append((*_LIVED[1:], lived_in))
        sentences = [sentence.format(n=name, v=value) for sentence, _, value in facts]
        sentences.append(_IDLE[rng.integers(len(_IDLE))])
        text = f"{name}\n" + " ".join(sentences[i] for i in rng.permutation(len(sentences)))
        return text, [_Asked(question=question.format(n=name), value=value) for _, question, value in facts]

    def _value(self, rng: np.random.Generator, kind: str, taken: set[str]) -> str:
        words = self._words

        def pick(items: Sequence[str]) -> str:
            return items[int(rng.integers(len(items)))]

        makers: dict[str, Callable[[], str]] = {
            "human": lambda: f"{pick(words.first_names)} {chr(65 + rng.integers(26))}. {pick(words.surnames)}",
            "place": lambda: pick(_HEADS) + pick(words.nouns)[:3].lower() + pick(_TAILS),
            "title": lambda: f"The {pick(words.adjectives).title()} {pick(words.nouns).title()}",
        }
        if kind == "year":  # not many exist: two facts may share one
            return str(rng.integers(1600, 1950))
        return self._facts.unused(makers[kind], taken)
