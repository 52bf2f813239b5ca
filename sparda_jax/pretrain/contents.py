"""What recall documents are about, as text: the needles, the questions, the answers (no tokens yet).

RULER's wording and layouts are those of its `niah` and `variable_tracking` tasks; key-value lookup follows "Lost in
the Middle".
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sparda_jax.pretrain.facts import Exchange, Fact, FactSampler, Spelling, answer_pieces, ask_all, ask_one
from sparda_jax.pretrain.haystack import FILLERS
from sparda_jax.pretrain.task_words import WordLists
from sparda_jax.pretrain.worded import WORDED_KINDS, WordedTasks
from sparda_jax.pretrain.wordings import READ_ALL, RULER, WORDINGS, Wording

PLACED_KINDS = ("single", "multikey", "multivalue", "multiquery", "keyvalue", "tracking", "copy")
KINDS = (*PLACED_KINDS, *WORDED_KINDS)
STYLES = ("chat", "plain")
ALL_NEEDLES = "needles"
"""The filler that is none: distractors fill the document."""

_SHORTEST_WORDED = 512
_FILLER_SHARES = (0.5, 0.2, 0.3)
_ANSWERS_SHARE = 0.5
_MOST_QUESTIONS = 48
_NEEDLES_SHARE = 0.4
_EXCHANGE_TOKENS, _NEEDLE_TOKENS, _PAIR_TOKENS, _UUID_TOKENS = 64, 20, 12, 34
"""About what a question with its answer, a needle, a key-value line and a uuid take; only for planning counts."""
_LONGEST_COPY = 1024

_JSON_PREAMBLE = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
_LINES_PREAMBLE = "Here is a list of keys and values."
_TRACKING_PREAMBLE = "Memorize and track the chain(s) of variable assignment hidden in the following text."


@dataclass(frozen=True, kw_only=True)
class TaskMix:
    """Which documents are drawn how often.

    Attributes:
        kinds: (kind, share), the shares adding up to 1.
        ruler: share of the documents of a placed kind that keep to RULER's wording.
    """

    kinds: tuple[tuple[str, float], ...] = tuple(
        zip(PLACED_KINDS, (0.18, 0.32, 0.12, 0.06, 0.18, 0.08, 0.06), strict=True)
    )
    ruler: float = 0.35

    def __post_init__(self) -> None:
        if unknown := [kind for kind, _ in self.kinds if kind not in KINDS]:
            raise ValueError(f"kinds: {unknown} given, must be among {KINDS}")
        if abs(sum(share for _, share in self.kinds) - 1) > 1e-9:
            raise ValueError(f"kinds: shares {self.kinds} given, they must add up to 1")
        if not 0.0 <= self.ruler <= 1.0:
            raise ValueError(f"ruler: {self.ruler} given, must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What a recall document is.

    Attributes:
        kind: one of `KINDS`.
        length: most tokens of the whole document, template and answers included.
        filler: one of `FILLERS`, or `needles`: nothing but distractors (multikey and keyvalue).
        style: `chat` (the chat template) or `plain` (RULER's layout for base models).
        num_facts: keys with values, distractors included; 0 fills the document (filler `needles`).
        num_values: values of each key (multivalue), keys in one question (multiquery), links of a chain (tracking).
        num_questions: most questions asked; fewer if the length does not allow them.
        ruler: RULER's wording, preamble, hyphenated keys and 7-digit numbers only.
        value_type: forces (type, noun) of the values, e.g. `("uuid", "uuid")`; None lets the wording choose.
        question_first: the first question stands before the document (chat style).
        depth: where the first fact's needles go, from 0 (start) to 1 (end); None draws it uniformly.
    """

    kind: str
    length: int
    filler: str = "prose"
    style: str = "chat"
    num_facts: int = 1
    num_values: int = 1
    num_questions: int = 1
    ruler: bool = False
    value_type: tuple[str, str] | None = None
    question_first: bool = False
    depth: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("kind", KINDS), ("filler", (*FILLERS, "needles")), ("style", STYLES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: {getattr(self, name)!r} given, must be one of {allowed}")
        if self.length < 64:
            raise ValueError(f"length: {self.length} tokens given, a document needs at least 64")


@dataclass(frozen=True, kw_only=True)
class Question:
    """An exchange and the groups of needles that its answer needs."""

    exchange: Exchange
    groups: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Content:
    """The text of a document before filler.

    Attributes:
        preamble: what stands before the filler; may be empty.
        closing: what stands right after it.
        groups: the needles of each fact; those not asked for are distractors and may be left out.
        questions: what may be asked, the most wanted first.
        ordered: needles of a group keep their order in the document.
        lines: needles are lines of their own.
    """

    preamble: str
    groups: tuple[tuple[str, ...], ...]
    questions: tuple[Question, ...]
    closing: str = ""
    ordered: bool = False
    lines: bool = False


def sample_spec(rng: np.random.Generator, length: int, mix: TaskMix) -> TaskSpec:
    """Draws what a training document of at most `length` tokens is."""
    kind = mix.kinds[rng.choice(len(mix.kinds), p=[share for _, share in mix.kinds])][0]
    if kind in WORDED_KINDS:
        # Mostly short ones: they ask little, however long they are.
        shortest = min(_SHORTEST_WORDED, length)
        return TaskSpec(kind=kind, length=int(np.exp(rng.uniform(np.log(shortest), np.log(length)))))
    if kind == "copy" and length > _LONGEST_COPY:
        kind = "multikey"
    most_questions = int(max(1, min(_MOST_QUESTIONS, _ANSWERS_SHARE * length / _EXCHANGE_TOKENS)))
    most_facts = max(2, int(_NEEDLES_SHARE * length / _NEEDLE_TOKENS))
    spec = TaskSpec(
        kind=kind,
        length=length,
        filler=FILLERS[rng.choice(len(FILLERS), p=_FILLER_SHARES)],
        style="plain" if rng.random() < 0.15 else "chat",
        num_questions=int(rng.integers((most_questions + 1) // 2, most_questions + 1)),
        ruler=bool(rng.random() < mix.ruler),
        question_first=bool(rng.random() < 0.12),
    )
    num_facts = int(np.exp(rng.uniform(np.log(2), np.log(most_facts + 1))))
    if kind == "single":
        # Either one fact or a few in different wordings: nothing competes with the one asked for.
        count = 1 if rng.random() < 0.4 else min(most_facts, int(rng.integers(2, 5)))
        return replace(spec, num_facts=count, num_questions=count, ruler=spec.ruler and count == 1)
    if kind == "multikey":
        if rng.random() < 0.3:
            return replace(spec, filler=ALL_NEEDLES)
        return replace(spec, num_facts=max(num_facts, min(spec.num_questions, most_facts)))
    if kind in ("multivalue", "multiquery"):
        per_question = int(rng.integers(2, 5))
        return replace(spec, num_facts=max(per_question, num_facts) // per_question, num_values=per_question)
    if kind == "keyvalue":
        return replace(spec, filler=ALL_NEEDLES) if rng.random() < 0.8 else replace(spec, num_facts=num_facts)
    if kind == "tracking":
        links = int(rng.integers(2, 6))
        return replace(spec, num_facts=max(1, min(6, num_facts // links)), num_values=links)
    return spec


class ContentSampler:
    """Draws the text of documents.

    Args:
        words: word lists of the split.
        spelling: how hard keys and values are to copy.
        tokens_of: length of a text in tokens.
    """

    def __init__(self, words: WordLists, spelling: Spelling, tokens_of: Callable[[str], int]) -> None:
        self._facts = FactSampler(words, spelling)
        self._worded = WordedTasks(words, self._facts, tokens_of)

    def draw(self, rng: np.random.Generator, spec: TaskSpec, taken: set[str]) -> Content:
        """The content that a spec describes; keys and values not in `taken`, which is extended."""
        if spec.kind == "keyvalue":
            return self._keyvalue(rng, spec, taken)
        if spec.kind == "tracking":
            return self._tracking(rng, spec, taken)
        if spec.kind == "copy":
            return self._copy(rng, spec)
        if spec.kind in WORDED_KINDS:
            exchanges = self._worded.draw(rng, spec.kind, spec.length)
            questions = tuple(Question(exchange=exchange, groups=()) for exchange in exchanges)
            return Content(preamble="", groups=(), questions=questions)
        return self._needles(rng, spec, taken)

    def _needles(self, rng: np.random.Generator, spec: TaskSpec, taken: set[str]) -> Content:
        mixed = not spec.ruler and (spec.kind == "single" or (spec.kind == "multikey" and rng.random() < 0.3))
        wordings = [WORDINGS[i] for i in rng.permutation(len(WORDINGS))] if mixed else [_one_wording(rng, spec)]
        facts = self._draw_facts(rng, spec, taken, wordings)
        indices = range(len(facts))
        if spec.kind == "multivalue":
            questions = [Question(exchange=ask_all([facts[i]]), groups=(i,)) for i in indices]
        elif spec.kind == "multiquery":
            size = spec.num_values
            parts = [tuple(range(i, i + size)) for i in range(0, len(facts) - size + 1, size)]
            questions = [Question(exchange=ask_all([facts[i] for i in part]), groups=part) for part in parts]
        else:
            questions = [
                Question(exchange=ask_one(facts[i], short=not spec.ruler and rng.random() < 0.3), groups=(i,))
                for i in indices
            ]
        if mixed:
            preamble = READ_ALL
        else:
            wording, several = facts[0].wording, len(facts) > 1 or spec.num_values > 1
            preamble = (wording.plural_preamble if several else wording.preamble).format(t=facts[0].noun)
        if spec.style == "chat" and not spec.ruler and rng.random() < 0.5:
            preamble = ""
        return Content(
            preamble=preamble,
            groups=tuple(tuple(fact.needles()) for fact in facts),
            questions=_in_random_order(rng, spec, questions),
            ordered=spec.kind == "multivalue",
        )

    def _draw_facts(
        self, rng: np.random.Generator, spec: TaskSpec, taken: set[str], wordings: list[Wording]
    ) -> list[Fact]:
        per_fact = spec.num_values if spec.kind == "multivalue" else 1
        per_question = spec.num_values if spec.kind == "multiquery" else 1
        count = spec.num_facts * per_question
        value_type = spec.value_type
        if len(wordings) == 1 and value_type is None:
            value_type = wordings[0].value_types[rng.integers(len(wordings[0].value_types))]
        if spec.filler == ALL_NEEDLES:
            per_needle = _NEEDLE_TOKENS + (_UUID_TOKENS if value_type and value_type[0] == "uuid" else 0)
            count = max(2, per_question, (spec.length - _EXCHANGE_TOKENS) // (per_needle * per_fact))
        return [
            self._facts.fact(
                rng,
                wordings[i % len(wordings)],
                taken,
                num_values=per_fact,
                word_key=spec.ruler,
                value_type=value_type,
            )
            for i in range(count)
        ]

    def _keyvalue(self, rng: np.random.Generator, spec: TaskSpec, taken: set[str]) -> Content:
        filled = spec.filler == ALL_NEEDLES
        as_json = filled and rng.random() < 0.5
        uuids = as_json and rng.random() < 0.25
        value_type = "uuid" if uuids else ("number", "number", "word")[rng.integers(3)]
        line = '"{k}": {v},' if as_json else ("{k} = {v};", "{k}: {v};", "- {k} -> {v};")[rng.integers(3)]
        count = spec.num_facts
        if filled:
            count = max(2, (spec.length - _EXCHANGE_TOKENS) // (2 * _UUID_TOKENS if uuids else _PAIR_TOKENS))
        groups, questions = [], []
        direct = as_json and rng.random() < 0.5
        for i in range(count):
            key = self._facts.unused(lambda: self._facts.uuid(rng) if uuids else self._facts.key(rng, "label"), taken)
            value = self._facts.unused(lambda: self._facts.value(rng, value_type), taken)
            groups.append((line.format(k=key, v=json.dumps(value) if as_json and value_type != "number" else value),))
            if direct:
                question, answer = f'Key: "{key}"\nCorresponding value:', "\0"
            else:
                question, answer = f'What is the value of "{key}"?', f'The value of "{key}" is \0.'
            exchange = Exchange(question=question, answer=answer_pieces(answer, (value,)), values=(value,))
            questions.append(Question(exchange=exchange, groups=(i,)))
        return Content(
            preamble=_JSON_PREAMBLE if as_json else _LINES_PREAMBLE,
            closing="\n}" if as_json else "",
            groups=tuple(groups),
            questions=_in_random_order(rng, spec, questions),
            lines=True,
        )

    def _tracking(self, rng: np.random.Generator, spec: TaskSpec, taken: set[str]) -> Content:
        end = "" if spec.filler == "noise" else "."
        groups, questions = [], []
        for i in range(spec.num_facts):
            value = self._facts.unused(lambda: self._facts.number(rng, 5), taken)
            names = [self._facts.unused(lambda: self._facts.variable(rng), taken) for _ in range(spec.num_values)]
            links = [f"VAR {later} = VAR {earlier}{end}" for earlier, later in itertools.pairwise(names)]
            groups.append((f"VAR {names[0]} = {value}{end}", *links))
            if spec.ruler or rng.random() < 0.5:
                question = f"Question: Find all variables that are assigned the value {value} in the text above."
                answer = (
                    f"According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
                    f"assigned the value {value}, they are: " + " ".join("\0" * len(names))
                )
                found = tuple(names)
            else:
                name = names[rng.integers(len(names))]
                question, answer, found = f"What is the value of {name}?", f"The value of {name} is \0.", (value,)
            exchange = Exchange(question=question, answer=answer_pieces(answer, found), values=found)
            questions.append(Question(exchange=exchange, groups=(i,)))
        return Content(
            preamble=_TRACKING_PREAMBLE,
            groups=tuple(groups),
            questions=_in_random_order(rng, spec, questions),
            ordered=True,
            lines=True,
        )

    def _copy(self, rng: np.random.Generator, spec: TaskSpec) -> Content:
        """Repeating a list of words or numbers: the plainest use of what stood before."""
        count = int(rng.integers(3, max(4, min(48, spec.length // 32))))
        value_type = "number" if rng.random() < 0.3 else "word"
        text = " ".join(self._facts.value(rng, value_type) for _ in range(count))
        exchange = Exchange(question=f"Repeat the following: {text}", answer=((text, False),), values=(text,))
        return Content(preamble="", groups=(), questions=(Question(exchange=exchange, groups=()),))


def _one_wording(rng: np.random.Generator, spec: TaskSpec) -> Wording:
    return RULER if spec.ruler else WORDINGS[rng.integers(len(WORDINGS))]


def _in_random_order(rng: np.random.Generator, spec: TaskSpec, questions: list[Question]) -> tuple[Question, ...]:
    """At most `num_questions` of them; where a depth is given, the first fact's question comes first."""
    order = rng.permutation(len(questions))
    if spec.depth is not None:
        order = np.concatenate([[0], order[order != 0]])
    return tuple(questions[i] for i in order[: spec.num_questions])
