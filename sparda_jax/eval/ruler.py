"""The thirteen tasks of RULER (Hsieh et al. 2024), made offline, for any tokenizer and length."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from sparda_jax.eval.counting import COMMON, common_words, frequent_words
from sparda_jax.eval.documents import one_hop, two_hops
from sparda_jax.eval.essays import Sentences, generated
from sparda_jax.eval.fitting import TooShortError, largest_fitting, shrunk_to_fit
from sparda_jax.eval.needles import NeedleTask
from sparda_jax.eval.prompting import Prompt, Prompter, Question
from sparda_jax.eval.scoring import Score, best_match, share_matched
from sparda_jax.eval.tracking import HOPS, variable_tracking

# Prompts that are tokenized at the same time; the tokenizer lets other threads run.
_THREADS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerTask:
    """One task.

    Attributes:
        build: makes a question from randomness, a size of its filler, and the length that the prompt is meant for.
        least: the smallest size.
        new_tokens: length of the longest answer.
        score: of an answer against the references, from 0 to 1.
    """

    build: Callable[[random.Random, int, int], Question]
    least: int
    new_tokens: int
    score: Score


def tasks(sentences: Sentences = generated) -> Mapping[str, RulerTask]:
    """The tasks by name, in RULER's order.

    Args:
        sentences: the running text of those that have needles in essays.
    """
    needles = {
        "niah_single_1": NeedleTask(haystack="repeat", sentences=sentences),
        "niah_single_2": NeedleTask(haystack="essay", sentences=sentences),
        "niah_single_3": NeedleTask(haystack="essay", values="uuids", sentences=sentences),
        "niah_multikey_1": NeedleTask(haystack="essay", num_keys=4, sentences=sentences),
        "niah_multikey_2": NeedleTask(haystack="needle", sentences=sentences),
        "niah_multikey_3": NeedleTask(haystack="needle", keys="uuids", values="uuids", sentences=sentences),
        "niah_multivalue": NeedleTask(haystack="essay", num_values=4, sentences=sentences),
        "niah_multiquery": NeedleTask(haystack="essay", num_keys=4, num_queries=4, sentences=sentences),
    }
    found = {
        name: RulerTask(build=task, least=task.least, new_tokens=128, score=share_matched)
        for name, task in needles.items()
    }
    found["vt"] = RulerTask(build=variable_tracking, least=HOPS + 1, new_tokens=30, score=share_matched)
    found["cwe"] = RulerTask(build=common_words, least=COMMON + 1, new_tokens=120, score=share_matched)
    # With fewer words the third and the fourth may come equally often.
    found["fwe"] = RulerTask(build=frequent_words, least=100, new_tokens=50, score=share_matched)
    found["qa_1"] = RulerTask(build=one_hop, least=1, new_tokens=32, score=best_match)
    found["qa_2"] = RulerTask(build=two_hops, least=2, new_tokens=32, score=best_match)
    return found


NAMES = tuple(tasks())


def make_prompts(
    name: str, task: RulerTask, prompter: Prompter, *, length: int, seed: int, samples: int
) -> list[Prompt]:
    """Prompts of one task; a prompt depends on nothing but task, length, seed, its number, tokenizer and template.

    Args:
        name, task: from `tasks`.
        prompter: how questions become tokens.
        length: most tokens of prompt and answer together.
        seed: of all prompts.
        samples: how many.

    Raises:
        TooShortError: the length is too small for this task.
    """
    room = length - task.new_tokens

    def question(number: int, size: int) -> Question:
        return task.build(random.Random(f"{name} {length} {seed} {number}"), size, length)

    def tokens_of(number: int, size: int) -> int:
        return len(prompter.encode(question(number, size)))

    def one(number: int) -> Prompt:
        fitting = shrunk_to_fit(lambda n: tokens_of(number, n), room, size, least=task.least)
        asked = question(number, fitting)
        return Prompt(ids=prompter.encode(asked), question=asked, new_tokens=task.new_tokens)

    try:
        size = largest_fitting(lambda n: tokens_of(0, n), room, least=task.least)
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(one, range(samples)))
    except TooShortError as error:
        raise TooShortError(f"task {name} at length={length}: {error}; give a greater length") from None


def needle_prompts(
    prompter: Prompter, *, length: int, depths: Sequence[float], seed: int, samples: int, sentences: Sentences
) -> list[list[Prompt]]:
    """Prompts of `niah_single_2` whose needle lies at given depths: ``samples`` for each.

    Raises:
        TooShortError: the length is too small.
    """
    needle = NeedleTask(haystack="essay", sentences=sentences)

    def at(depth: float) -> RulerTask:
        def build(rng: random.Random, size: int, length: int) -> Question:
            return needle(rng, size, length, [depth])

        return RulerTask(build=build, least=needle.least, new_tokens=128, score=share_matched)

    made = {"length": length, "seed": seed, "samples": samples}
    return [make_prompts(f"needle {depth}", at(depth), prompter, **made) for depth in depths]
