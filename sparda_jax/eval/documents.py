"""RULER's two question tasks over many documents, on a small world that a seed makes up.

RULER takes SQuAD and HotpotQA, whose share-alike licence would come with them. Here every document is about a person or
a town that does not exist, in sentences written for it; the texts may be used freely (CC0). What can be asked for
(towns, teachers, titles, rivers, mayors, feasts) stands in no document but those that answer.
"""

import dataclasses
import random

from sparda_jax.eval.prompting import Question
from sparda_jax.eval.words import all_words

_TASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {query}"
)
_PREFIX = " Answer:"
_STARTS = "Bran Cor Dal El Fal Gren Hal Ister Jor Kel Lam Mar Nor Or Pel Quar Ros Sel Tor Ul Ver Wen Yar Zel".split()
_MIDDLES = "a e i o u an el im or ash und ock itt eva ora ani isk ume".split()
_ENDS = "burg dale ford ham mere ness port stead thorpe wick field haven ridge bridge minster".split()
_CRAFTS = "a clockmaker,a painter,a botanist,a mason,a composer,a printer,a glazier,a surveyor,a baker,a weaver".split(
    ","
)
_PASTIMES = "kept bees,walked to the sea every Sunday,learned to play the flute,grew pears,repaired boats".split(",")
_GOODS = "cheese,lace,copper pots,dried plums,paper,rope,bells,honey,knives,wool".split(",")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Person:
    name: str
    town: str
    teacher: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Town:
    river: str
    mayor: str
    feast: str
    text: str


class _World:
    """People and their towns; names come once only."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._taken = rng, set[str]()

    def person(self) -> _Person:
        rng = self._rng
        name, teacher, town = self._human(), self._human(), self._place()
        title = self._new(lambda: f"The {self._adjective().title()} {rng.choice(all_words().nouns).title()}")
        born = rng.randint(1650, 1900)
        text = (
            f"{name}\n{name} was {rng.choice(_CRAFTS)} of the {self._adjective()} kind, born in {town} in {born}. "
            f"The first lessons came from {teacher}, who lived next door and asked for no money. At the age of "
            f"{rng.randint(19, 60)} the book {title} was finished, of which {rng.randint(200, 5000)} copies were sold. "
            f"In later years {name} {rng.choice(_PASTIMES)} and was seldom seen in company."
        )
        return _Person(name=name, town=town, teacher=teacher, title=title, text=text)

    def town(self, name: str) -> _Town:
        rng = self._rng
        river, mayor = self._place(), self._human()
        feast = self._new(lambda: f"Feast of the {self._adjective().title()} {rng.choice(all_words().nouns).title()}")
        text = (
            f"{name}\n{name} is a town of {rng.randint(2, 90)} thousand people. The river {river} flows through it and "
            f"turns {rng.randint(2, 30)} mills. Its market is known for {rng.choice(_GOODS)}. Every year in "
            f"{rng.choice(('May', 'June', 'August', 'October'))} the {feast} is held on the square. The first mayor "
            f"was {mayor}, whose house is now a school."
        )
        return _Town(river=river, mayor=mayor, feast=feast, text=text)

    def _new(self, make) -> str:
        while (made := make()) in self._taken:
            continue
        self._taken.add(made)
        return made

    def _place(self) -> str:
        rng = self._rng
        # Two middles: 24 * 18 * 18 * 15 names, enough for the longest prompts.
        return self._new(lambda: "".join(rng.choice(p) for p in (_STARTS, _MIDDLES, _MIDDLES, _ENDS)))

    def _human(self) -> str:
        words, rng = all_words(), self._rng
        return self._new(
            lambda: f"{rng.choice(words.first_names)} {rng.choice('ABCDEFGHJKLMNPRSTVW')}. {rng.choice(words.surnames)}"
        )

    def _adjective(self) -> str:
        return self._rng.choice(all_words().adjectives)


def one_hop(rng: random.Random, size: int, length: int) -> Question:
    """A question that one of ``size`` documents answers, as in SQuAD."""
    world = _World(rng)
    people = [world.person() for _ in range(size)]
    asked = people[0]
    query, answer = rng.choice(
        [
            (f"In which town was {asked.name} born?", asked.town),
            (f"Who gave {asked.name} the first lessons?", asked.teacher),
            (f"What is the title of the book that {asked.name} finished?", asked.title),
        ]
    )
    return _question(rng, [person.text for person in people], query, answer)


def two_hops(rng: random.Random, size: int, length: int) -> Question:
    """A question that takes two of ``size`` documents, as in HotpotQA: a person's town, and something about it."""
    world = _World(rng)
    asked = world.person()
    town = world.town(asked.town)
    texts = [asked.text, town.text]
    while len(texts) < size:
        person = world.person()
        texts += [person.text, world.town(person.town).text]
    query, answer = rng.choice(
        [
            (f"Which river flows through the town where {asked.name} was born?", town.river),
            (f"Who was the first mayor of the town where {asked.name} was born?", town.mayor),
            (f"What is held every year in the town where {asked.name} was born?", town.feast),
        ]
    )
    return _question(rng, texts[:size], query, answer)


def _question(rng: random.Random, texts: list[str], query: str, answer: str) -> Question:
    rng.shuffle(texts)
    context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(texts, start=1))
    return Question(text=_TASK.format(context=context, query=query), prefix=_PREFIX, references=(answer,))
