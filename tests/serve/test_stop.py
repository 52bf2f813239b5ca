"""Stop strings: independent of how the text is cut, nothing leaked, nothing swallowed."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from sparda_jax.serve.stop import StopChecker

TEXTS = st.text(alphabet="ab🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    checker = StopChecker(stops)
    shown = ""
    for piece in pieces:
        text, stopped = checker.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + checker.flush(), False


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: the shortest beginning of the text that ends in a stop string, less the longest such one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


@given(TEXTS, STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_any_cut_gives_the_defined_result(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert run(stops, pieces) == expected(stops, text)


@given(TEXTS, STOPS)
def test_only_a_possible_prefix_is_held_back(text: str, stops: list[str]) -> None:
    """After every character, what is not shown is the beginning of some stop string, and nothing shorter would do."""
    checker = StopChecker(stops)
    shown = ""
    for i, char in enumerate(text):
        piece, stopped = checker.push(char)
        shown += piece
        if stopped:
            return
        held = text[len(shown) : i + 1]
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = [
            k for k in range(len(held) + 1, i + 2) if any(stop.startswith(text[i + 1 - k : i + 1]) for stop in stops)
        ]
        assert not longer
