"""How facts are hidden in a document and asked for: RULER's wording and eight others."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wording:
    """One way to state a fact, to ask for it and to answer.

    `{k}` stands for the key, `{v}` for the value, `{vs}` for a list of values, `{t}` for the noun of the value's type.

    Attributes:
        name: for reports.
        key_type: `label` (hyphenated words, a word, a uuid), `person` or `thing` (a noun).
        value_types: which values fit, each with its noun: `number`, `word`, `uuid`, `city`, `person`.
        needle: the sentence hidden in the document.
        question: asks for the one value of a key; answered by `answer`.
        answer: answer to `question`, a full sentence.
        plural_question: asks for all values of a key; answered by `plural_answer`.
        plural_answer: answer to `plural_question`.
        preamble: put before the document now and then; may contain `{t}`.
        plural_preamble: the same where several needles are hidden.
    """

    name: str
    key_type: str
    value_types: tuple[tuple[str, str], ...]
    needle: str
    question: str
    answer: str
    plural_question: str
    plural_answer: str
    preamble: str
    plural_preamble: str

    def short_question(self, noun: str) -> str:
        """The singular question whose answer is the bare value: `V.`"""
        return f"{self.question} Answer with the {noun} only."


_READ = "Read the following text and answer the question about it."
READ_ALL = "Read the following text carefully. Questions about it follow."
_CODE_TYPES = (("number", "code"), ("number", "code"), ("word", "code"))

RULER = Wording(
    name="ruler",
    key_type="label",
    value_types=(("number", "number"),) * 4 + (("word", "word"), ("uuid", "uuid")),
    needle="One of the special magic {t}s for {k} is: {v}.",
    question="What is the special magic {t} for {k} mentioned in the provided text?",
    answer="The special magic {t} for {k} mentioned in the provided text is {v}.",
    plural_question="What are all the special magic {t}s for {k} mentioned in the provided text?",
    plural_answer="The special magic {t}s for {k} mentioned in the provided text are {vs}.",
    preamble="A special magic {t} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {t} afterwards.",
    plural_preamble="Some special magic {t}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {t}s afterwards.",
)

WORDINGS: tuple[Wording, ...] = (
    RULER,
    Wording(
        name="passcode",
        key_type="label",
        value_types=_CODE_TYPES,
        needle="The passcode for the {k} vault is {v}.",
        question="What is the passcode for the {k} vault?",
        answer="The passcode for the {k} vault is {v}.",
        plural_question="What are all the passcodes for the {k} vault?",
        plural_answer="The passcodes for the {k} vault are {vs}.",
        preamble="A passcode is hidden somewhere in this text.",
        plural_preamble="Some passcodes are hidden somewhere in this text.",
    ),
    Wording(
        name="phone",
        key_type="person",
        value_types=(("number", "number"),),
        needle="{k} can be reached by phone at {v}.",
        question="What is the phone number of {k}?",
        answer="The phone number of {k} is {v}.",
        plural_question="What are all the phone numbers of {k}?",
        plural_answer="The phone numbers of {k} are {vs}.",
        preamble=_READ,
        plural_preamble=READ_ALL,
    ),
    Wording(
        name="city",
        key_type="person",
        value_types=(("city", "city"),),
        needle="Last year {k} moved to {v}.",
        question="Which city did {k} move to?",
        answer="{k} moved to {v}.",
        plural_question="Which cities did {k} move to?",
        plural_answer="{k} moved to {vs}.",
        preamble=_READ,
        plural_preamble=READ_ALL,
    ),
    Wording(
        name="secret",
        key_type="person",
        value_types=(("word", "word"),),
        needle="Remember this: the secret word of {k} is {v}.",
        question="What is the secret word of {k}?",
        answer="The secret word of {k} is {v}.",
        plural_question="What are all the secret words of {k}?",
        plural_answer="The secret words of {k} are {vs}.",
        preamble=_READ,
        plural_preamble=READ_ALL,
    ),
    Wording(
        name="access",
        key_type="label",
        value_types=_CODE_TYPES,
        needle="Note that the access code of {k} was set to {v}.",
        question="What was the access code of {k} set to?",
        answer="The access code of {k} was set to {v}.",
        plural_question="What were all the access codes of {k} set to?",
        plural_answer="The access codes of {k} were set to {vs}.",
        preamble="Study the document below. You will be asked about access codes.",
        plural_preamble="Study the document below. You will be asked about access codes.",
    ),
    Wording(
        name="stock",
        key_type="thing",
        value_types=(("number", "number"),),
        needle="There are {v} units of {k} in the warehouse.",
        question="How many units of {k} are in the warehouse?",
        answer="There are {v} units of {k} in the warehouse.",
        plural_question="Which counts of {k} in the warehouse are given?",
        plural_answer="The counts of {k} in the warehouse are {vs}.",
        preamble=_READ,
        plural_preamble=READ_ALL,
    ),
    Wording(
        name="ship",
        key_type="label",
        value_types=(("number", "number"), ("uuid", "number")),
        needle="The ship {k} carries the registration number {v}.",
        question="Which registration number does the ship {k} carry?",
        answer="The ship {k} carries the registration number {v}.",
        plural_question="Which registration numbers does the ship {k} carry?",
        plural_answer="The ship {k} carries the registration numbers {vs}.",
        preamble=_READ,
        plural_preamble=READ_ALL,
    ),
    Wording(
        name="ticket",
        key_type="label",
        value_types=(("person", "name"),),
        needle="Ticket {k} was assigned to {v}.",
        question="Who was ticket {k} assigned to?",
        answer="Ticket {k} was assigned to {v}.",
        plural_question="Who are all the people that ticket {k} was assigned to?",
        plural_answer="Ticket {k} was assigned to {vs}.",
        preamble=_READ,
        plural_preamble=READ_ALL,
    ),
)


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b, and c`: the way RULER lists keys and values."""
    if len(items) < 3:
        return " and ".join(items)
    return ", ".join(items[:-1]) + ", and " + items[-1]
