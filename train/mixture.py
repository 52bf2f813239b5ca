"""Rows of several domains in fixed proportions: which row comes when is a function of the seed and the place alone."""

import functools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Int64

from sparda_jax.train.errors import TrainingError

# Every so many rows the proportions hold exactly; a weight counts to a thousandth.
PERIOD = 1000
PROLONG = "prolong"
_PUBLISHED = {
    "thestackv1_concat_by_repo-65536": 0.30,
    "book-65536": 0.30,
    "fineweb-edu": 0.10,
    "fineweb-2023-50": 0.10,
    "stackexchange": 0.04,
    "dolmawiki": 0.04,
    "tuluv2": 0.03,
    "arxiv": 0.03,
    "openwebmath": 0.03,
    "textbooks": 0.03,
}


def read_mixture(given: Sequence[str], domains: Collection[str]) -> dict[str, int]:
    """Rows of each domain in a `PERIOD`, by name.

    Args:
        given: ``NAME=WEIGHT`` for every domain, in any scale; or ``prolong`` alone, for the published weights of its
            ten domains, those that are missing left out. Empty: no mixture, and an empty result.
        domains: those that the data have.

    Raises:
        TrainingError: a name that the data don't have or that comes twice, a domain without a weight, or a weight that
            is not positive or too small to count.
    """
    if not given:
        return {}
    if list(given) == [PROLONG]:
        weights = {name: weight for name, weight in _PUBLISHED.items() if name in domains}
    else:
        pairs = list(map(_weight, given))
        weights = dict(pairs)
        if len(weights) < len(pairs):
            twice = next(name for name in weights if [n for n, _ in pairs].count(name) > 1)
            raise TrainingError(f"--mix names {twice} more than once; give each domain one weight")
    if set(weights) != set(domains):
        raise TrainingError(
            f"--mix must give a weight to each domain of --data, which are {', '.join(sorted(domains))}, and to no "
            f"other; it has {', '.join(sorted(weights)) or 'none of them'}"
        )
    total = sum(weights.values())
    if not math.isfinite(total):
        raise TrainingError(f"--mix has weights that add up to {total}; give smaller ones")
    exact = {name: weight / total * PERIOD for name, weight in weights.items()}
    counts = {name: math.floor(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: PERIOD - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        if not count:
            raise TrainingError(f"--mix {name}={weights[name]} is less than one row in {PERIOD}; give it more weight")
    return dict(sorted(counts.items()))


def _weight(text: str) -> tuple[str, float]:
    name, separator, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not separator or not (math.isfinite(weight) and weight > 0):
        raise TrainingError(f"--mix {text}: use NAME=WEIGHT with a positive weight, or {PROLONG} alone")
    return name, weight


class ShuffledRows:
    """All rows in a new random order every epoch."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed

    def row(self, place: int) -> int:
        """The row that comes at ``place``, from 0."""
        epoch, i = divmod(place, self._num_rows)
        return int(_order((self._seed, epoch), self._num_rows)[i])


class MixedRows:
    """Rows of domains in fixed proportions; in each domain a new random order of all its rows every epoch of its own.

    Args:
        counts: rows of each domain in a `PERIOD`.
        num_rows: of each domain there are; those of a domain are numbered behind those of the one before.
        seed: of the orders.
    """

    def __init__(self, counts: Mapping[str, int], num_rows: Mapping[str, int], seed: int) -> None:
        self._counts = tuple(counts.values())
        self._num_rows = tuple(num_rows[name] for name in counts)
        self._first = np.cumsum([0, *self._num_rows]).tolist()
        self._seed = seed

    def row(self, place: int) -> int:
        """The row that comes at ``place``, from 0."""
        period, i = divmod(place, PERIOD)
        domains, ranks = _pattern((self._seed, period), self._counts)
        domain = int(domains[i])
        epoch, j = divmod(period * self._counts[domain] + int(ranks[i]), self._num_rows[domain])
        # A seed that ends in 0 is the one without it.
        return self._first[domain] + int(_order((self._seed, epoch, domain + 1), self._num_rows[domain])[j])


@functools.lru_cache(maxsize=64)
def _order(seed: tuple[int, ...], num_rows: int) -> Int64[np.ndarray, " rows"]:
    return np.random.default_rng(list(seed)).permutation(num_rows)


@functools.lru_cache(maxsize=4)
def _pattern(seed: tuple[int, ...], counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The domain of each place of a period, and how many places before it in the period have the same."""
    domains = np.random.default_rng(list(seed)).permutation(np.repeat(np.arange(len(counts)), counts))
    ranks = np.empty(len(domains), np.int64)
    for domain in range(len(counts)):
        ranks[domains == domain] = np.arange(counts[domain])
    return domains, ranks
