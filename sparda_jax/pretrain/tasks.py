"""Recall documents as token ids: needles put into filler, answers marked token by token, and held-out prompts for
evaluation.

A document is drawn from a numpy Generator, so that a seed gives the same document everywhere. Through the chat
template the first user message holds document and question and the assistant's message the answer; further questions
follow as further turns. Plain-style documents follow RULER's layout for base models. See `haystack` for why pieces
tokenized apart give the joined text's ids.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, UInt8
from tokenizers import Tokenizer

from sparda_jax.pretrain.contents import ALL_NEEDLES, Content, ContentSampler, TaskMix, TaskSpec, sample_spec
from sparda_jax.pretrain.facts import Exchange, Spelling
from sparda_jax.pretrain.haystack import FILLERS, FillerSampler, Haystack, TokenCorpus
from sparda_jax.pretrain.task_words import word_lists
from sparda_jax.pretrain.tokenizer_training import BOS_ID, EOS_ID, IM_END_ID

PAD_KIND, TEXT_KIND, NOISE_KIND, PROMPT_KIND, ANSWER_KIND, VALUE_KIND = range(6)
"""What a token is: padding, prose, meaningless filler, template, question or needle, answer around values, value."""

SHORTEST_DOCUMENT = 96
EVAL_KINDS = ("single", "multikey", "multivalue", "multiquery", "keyvalue", "tracking")

_SYSTEM = "You are a helpful assistant."
_SYSTEM_OPEN, _SYSTEM_CLOSE = "<|im_start|>system\n", "<|im_end|>\n"
_USER = "<|im_start|>user"
"""Without its newline: what follows always begins with one."""
_TO_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
_LARGEST_NEEDLE_SHARE = 0.6
"""Distractors take at most this part of what questions leave, the rest is filler."""


class DoesNotFitError(ValueError):
    """One question with its needles is longer than the document may be."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A message: its role and where its content lies in the document's ids."""

    role: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class RecallDocument:
    """A recall document as token ids.

    Attributes:
        ids: token ids, `<s>` first.
        kinds: for each token, what it is (`TEXT_KIND` ...).
        turns: the messages of a chat-style document, in order; empty in plain style.
        values: for each answer, the values it holds.
        answer_starts: for each answer, the position of its first token; what stands before it is the prompt.
        depths: where the needles lie in the filler, from 0 to 1; the first one belongs to the first fact kept.
    """

    ids: Int[np.ndarray, " tokens"]
    kinds: UInt8[np.ndarray, " tokens"]
    turns: tuple[Turn, ...]
    values: tuple[tuple[str, ...], ...]
    answer_starts: tuple[int, ...]
    depths: Float[np.ndarray, " needles"]


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """A held-out prompt.

    Attributes:
        messages: chat messages, for the chat template with a generation prompt.
        ids: the same as token ids, `<s>` once, up to where the answer begins.
        expected: values that a right answer holds, in order.
        depth: where the first needle lies, from 0 to 1.
    """

    messages: list[dict[str, str]]
    ids: Int[np.ndarray, " tokens"]
    expected: tuple[str, ...]
    depth: float


class _Writer:
    """Collects pieces of token ids and what they are."""

    def __init__(self) -> None:
        self._ids: list[Int[np.ndarray, " tokens"]] = []
        self._kinds: list[int] = []
        self.size = 0

    def add(self, ids: list[int] | Int[np.ndarray, " tokens"], kind: int) -> None:
        array = np.asarray(ids, np.int32)
        self._ids.append(array)
        self._kinds.append(kind)
        self.size += array.size

    def arrays(self) -> tuple[Int[np.ndarray, " tokens"], UInt8[np.ndarray, " tokens"]]:
        sizes = [piece.size for piece in self._ids]
        return np.concatenate(self._ids), np.repeat(np.array(self._kinds, np.uint8), sizes)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Choices of form that the content does not fix."""

    plain: bool
    question_first: bool
    labelled: bool
    system: bool
    led_by_space: bool
    separator: str

    @classmethod
    def draw(cls, rng: np.random.Generator, spec: TaskSpec, content: Content) -> "_Layout":
        plain, draws = spec.style == "plain", rng.random(4)
        return cls(
            plain=plain,
            question_first=spec.question_first and not plain and bool(content.groups) and not content.lines,
            labelled=not spec.ruler and not content.lines and bool(content.groups) and draws[0] < 0.3,
            system=not plain and spec.depth is None and draws[1] < 0.1,
            # RULER begins the assistant's turn with the answer's first words and a space in front of them.
            led_by_space=plain or (spec.ruler and spec.depth is None and draws[2] < 0.1),
            separator=" " if spec.filler == "prose" and not content.lines and draws[3] < 0.5 else "\n",
        )

    def question(self, text: str, *, position: int) -> str:
        """A question with the white space and the labels around it."""
        if not self.labelled:
            return f"\n{text}"
        apart = self.plain or (position == 0 and not self.question_first)
        return f"{chr(10) * (1 + apart)}Question: {text}" + ("\nAnswer:" if self.plain else "")

    def answer(self, exchange: Exchange) -> list[tuple[str, bool]]:
        """The pieces of an answer."""
        (text, is_value), *rest = exchange.answer
        return [(" " + text if self.led_by_space else text, is_value), *rest]


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A question and its answer as ids, the groups of needles they need, and their tokens, template included."""

    question: list[int]
    answer: list[tuple[list[int], bool]]
    values: tuple[str, ...]
    groups: tuple[int, ...]
    cost: int


class RecallTasks:
    """Draws recall documents.

    Args:
        tokenizer: the tokenizer.
        corpus: tokenized prose for filler; the held-out one for evaluation.
        split: `train` or `eval`: which words keys, values and shuffled filler are made of.
        spelling: how hard keys and values are to copy.
        mix: which documents `document` draws how often.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        corpus: TokenCorpus,
        *,
        split: str = "train",
        spelling: Spelling | None = None,
        mix: TaskMix | None = None,
    ) -> None:
        self.tokenizer, self._mix = tokenizer, mix or TaskMix()
        words = word_lists(split)
        self._contents = ContentSampler(
            words, spelling or Spelling(), lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
        )
        self._filler = FillerSampler(tokenizer, corpus, words, ruler_noise_only=split == "eval")
        self._newline = [corpus.newline]
        self._cache: dict[str, list[int]] = {"": []}

    def document(self, rng: np.random.Generator, length: int, taken: set[str] | None = None) -> RecallDocument:
        """A training document of at most `length` tokens.

        Args:
            rng: source of randomness.
            length: most tokens, `SHORTEST_DOCUMENT` or more.
            taken: keys and values used by other documents of the same window; extended.

        Raises:
            ValueError: `length` is too small.
        """
        if length < SHORTEST_DOCUMENT:
            raise ValueError(f"length: {length} tokens given, a document needs at least {SHORTEST_DOCUMENT}")
        taken = set() if taken is None else taken
        while True:
            try:
                return self.build(rng, sample_spec(rng, length, self._mix), taken)
            except DoesNotFitError:  # a draw with long keys; the next one is as good
                continue

    def build(self, rng: np.random.Generator, spec: TaskSpec, taken: set[str] | None = None) -> RecallDocument:
        """The document that a spec describes.

        Args:
            rng: source of randomness.
            spec: what the document is.
            taken: keys and values not to be used; extended.

        Raises:
            DoesNotFitError: one question and its needles do not fit into `spec.length`.
        """
        content = self._contents.draw(rng, spec, set() if taken is None else taken)
        layout = _Layout.draw(rng, spec, content)
        exchanges, groups = self._encode(content, layout)
        system = _SYSTEM_OPEN + _SYSTEM + _SYSTEM_CLOSE if layout.system else ""
        head = self._fixed(system + ("" if layout.plain else _USER))
        preamble = self._fixed("\n" * (not layout.plain and content.preamble != "") + content.preamble)
        closing = self._fixed(content.closing)
        spare = 4  # <s>, up to two newlines around the filler, </s>
        room = spec.length - spare - len(head) - len(preamble) - len(closing)
        asked, kept, room = _fit(spec, exchanges, groups, room)
        filled = spec.filler in FILLERS and bool(content.groups)
        haystack = self._filler.draw(rng, spec.filler, room) if filled else None
        needles, positions, depths = _place(rng, spec, content, {group: groups[group] for group in kept}, haystack)

        writer, turns, starts = _Writer(), [], []
        writer.add([BOS_ID], PROMPT_KIND)
        if layout.system:
            start = 1 + len(self._fixed(_SYSTEM_OPEN))
            turns.append(Turn(role="system", start=start, stop=start + len(self._fixed(_SYSTEM))))
        writer.add(head, PROMPT_KIND)
        opened = writer.size + 1
        if layout.question_first:
            writer.add(asked[0].question, PROMPT_KIND)
        writer.add(preamble, PROMPT_KIND)
        self._write_context(writer, layout, needles, positions, haystack)
        writer.add(closing, PROMPT_KIND)
        for i, exchange in enumerate(asked):
            if i > 0 and not layout.plain:
                writer.add(self._fixed("\n" + _USER), PROMPT_KIND)
                opened = writer.size + 1
            if i > 0 or not layout.question_first:
                writer.add(exchange.question, PROMPT_KIND)
            if not layout.plain:
                turns.append(Turn(role="user", start=opened, stop=writer.size))
                writer.add(self._fixed(_TO_ANSWER), PROMPT_KIND)
            starts.append(writer.size)
            for ids, is_value in exchange.answer:
                writer.add(ids, VALUE_KIND if is_value else ANSWER_KIND)
            if not layout.plain:
                turns.append(Turn(role="assistant", start=starts[-1], stop=writer.size))
                writer.add([IM_END_ID], ANSWER_KIND)
        writer.add([EOS_ID] if layout.plain else self._newline, ANSWER_KIND if layout.plain else PROMPT_KIND)
        ids, kinds = writer.arrays()
        return RecallDocument(
            ids=ids,
            kinds=kinds,
            turns=tuple(turns),
            values=tuple(exchange.values for exchange in asked),
            answer_starts=tuple(starts),
            depths=depths,
        )

    def eval_prompt(self, rng: np.random.Generator, spec: TaskSpec) -> EvalPrompt:
        """A prompt with one question from a chat-style spec.

        Raises:
            DoesNotFitError: the question and its needles do not fit into `spec.length`.
            ValueError: `spec.style` is not `chat`.
        """
        if spec.style != "chat":
            raise ValueError(f"style: {spec.style!r} given, evaluation prompts are made in style 'chat'")
        document = self.build(rng, spec)
        messages = []
        for turn in document.turns[:-1]:
            content = self.tokenizer.decode(document.ids[turn.start : turn.stop].tolist(), skip_special_tokens=False)
            messages.append({"role": turn.role, "content": content})
        return EvalPrompt(
            messages=messages,
            ids=document.ids[: document.answer_starts[0]],
            expected=document.values[0],
            depth=float(document.depths[0]),
        )

    def _fixed(self, text: str) -> list[int]:
        """Ids of a text that comes back again and again."""
        if text not in self._cache:
            self._cache[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self._cache[text]

    def _encode(self, content: Content, layout: _Layout) -> tuple[list[_Asked], list[list[list[int]]]]:
        """Questions and groups of needles as ids, in one call of the tokenizer."""
        exchanges = [question.exchange for question in content.questions]
        questions = [layout.question(exchange.question, position=i) for i, exchange in enumerate(exchanges)]
        answers = [layout.answer(exchange) for exchange in exchanges]
        texts = [layout.separator + needle for group in content.groups for needle in group]
        texts += questions + [text for pieces in answers for text, _ in pieces]
        encoded = iter([item.ids for item in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)])
        groups = [[next(encoded) for _ in group] for group in content.groups]
        question_ids = [next(encoded) for _ in questions]
        around = 1 if layout.plain else len(self._fixed(_TO_ANSWER)) + len(self._fixed("\n" + _USER)) + 1
        asked = []
        for question, ids, pieces in zip(content.questions, question_ids, answers, strict=True):
            answer = [(next(encoded), is_value) for _, is_value in pieces]
            cost = len(ids) + sum(len(piece) for piece, _ in answer) + around
            values = question.exchange.values
            asked.append(_Asked(question=ids, answer=answer, values=values, groups=question.groups, cost=cost))
        return asked, groups

    def _write_context(
        self,
        writer: _Writer,
        layout: _Layout,
        needles: list[list[int]],
        positions: list[int],
        haystack: Haystack | None,
    ) -> None:
        """Filler with the needles at their positions; begins with a newline."""
        filler = np.zeros(0, np.int32) if haystack is None else haystack.ids
        kind = TEXT_KIND if haystack is not None and haystack.is_prose else NOISE_KIND
        written = 0
        if layout.separator == " " and positions and positions[0] == 0:
            writer.add(self._newline, PROMPT_KIND)
        for needle, position in [*zip(needles, positions, strict=True), ([], filler.size)]:
            if position > written:
                if written == 0:
                    writer.add(self._newline, PROMPT_KIND)
                writer.add(filler[written:position], kind)
                written = position
            writer.add(needle, PROMPT_KIND)


def _fit(
    spec: TaskSpec, exchanges: list[_Asked], groups: list[list[list[int]]], room: int
) -> tuple[list[_Asked], list[int], int]:
    """Takes questions with their needles, then distractors, as long as there is room.

    Returns:
        The questions asked, the groups of needles kept in ascending order, and the tokens left for filler.
    """
    sizes = [sum(len(needle) for needle in group) for group in groups]
    asked: list[_Asked] = []
    kept: set[int] = set()
    for exchange in exchanges:
        missing = [group for group in exchange.groups if group not in kept]
        cost = exchange.cost + sum(sizes[group] for group in missing)
        if cost > room:
            if not asked:
                raise DoesNotFitError(f"length: {spec.length} tokens are too few for a question of kind {spec.kind}")
            break
        asked.append(exchange)
        kept.update(missing)
        room -= cost
    reserve = 0 if spec.filler == ALL_NEEDLES else int((1 - _LARGEST_NEEDLE_SHARE) * room)
    for group, size in enumerate(sizes):
        if group not in kept and size <= room - reserve:
            kept.add(group)
            room -= size
    return asked, sorted(kept), room


def _place(
    rng: np.random.Generator,
    spec: TaskSpec,
    content: Content,
    groups: dict[int, list[list[int]]],
    haystack: Haystack | None,
) -> tuple[list[list[int]], list[int], Float[np.ndarray, " needles"]]:
    """Draws where the needles go: uniform in depth, snapped to a cut.

    Returns:
        Needles in the order of the text, their positions in the filler (all 0 without filler), and depths in the order
        of `groups`.
    """
    needles = [needle for group in groups.values() for needle in group]
    wanted = rng.random(len(needles))
    start = 0
    for i, group in enumerate(groups.values()):
        part = slice(start, start + len(group))
        if i == 0 and spec.depth is not None and needles:
            wanted[0] = spec.depth
        if content.ordered:
            wanted[part] = np.sort(wanted[part])
        start += len(group)
    order = np.argsort(wanted, kind="stable")
    ordered = [needles[i] for i in order]
    if haystack is None or haystack.ids.size == 0:
        ranks = np.argsort(order) / max(1, len(needles) - 1)
        return ordered, [0] * len(needles), ranks
    right = np.searchsorted(haystack.cuts, wanted * haystack.ids.size).clip(1, haystack.cuts.size - 1)
    low, high = haystack.cuts[right - 1], haystack.cuts[right]
    positions = np.where(wanted * haystack.ids.size - low <= high - wanted * haystack.ids.size, low, high)
    return ordered, [int(positions[i]) for i in order], positions / haystack.ids.size


def load_eval_tasks(folder: Path) -> RecallTasks:
    """The held-out tasks from the files that `prepare` wrote to `folder`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    return RecallTasks(tokenizer, TokenCorpus.load(folder / "eval.npy", tokenizer), split="eval")


def eval_prompts(
    kind: str,
    length_tokens: int,
    n: int,
    seed: int,
    *,
    tasks: RecallTasks,
    filler: str | None = None,
    num_facts: int | None = None,
) -> list[EvalPrompt]:
    """Held-out prompts in RULER's wording, one question each, depths spread evenly from 0 to 1.

    Args:
        kind: one of `EVAL_KINDS`.
        length_tokens: most tokens of prompt and answer together.
        n: number of prompts.
        seed: random seed.
        tasks: from `load_eval_tasks`; its words and filler are disjoint from those of training.
        filler: one of `FILLERS` or `needles`; None takes the fillers in turn (keyvalue: always `needles`).
        num_facts: keys in the document; None means 1 (single), 4 (multikey, multiquery), 1 (multivalue, tracking).

    Returns:
        `n` prompts.

    Raises:
        ValueError: unknown kind or filler, or a length too small.
    """
    if kind not in EVAL_KINDS:
        raise ValueError(f"kind: {kind!r} given, must be one of {EVAL_KINDS}")
    rng = np.random.default_rng([seed, EVAL_KINDS.index(kind), length_tokens])
    depths = rng.permutation((np.arange(n) + 0.5) / n)
    prompts = []
    for i, depth in enumerate(depths):
        chosen = filler or (ALL_NEEDLES if kind == "keyvalue" else FILLERS[i % len(FILLERS)])
        spec = TaskSpec(
            kind=kind,
            length=length_tokens,
            filler=chosen,
            ruler=True,
            num_facts=num_facts or {"multikey": 4}.get(kind, 1),
            num_values={"multivalue": 4, "multiquery": 4, "tracking": 5}.get(kind, 1),
            value_type=("number", "number"),
            depth=float(depth),
        )
        prompts.append(tasks.eval_prompt(rng, spec))
    return prompts
