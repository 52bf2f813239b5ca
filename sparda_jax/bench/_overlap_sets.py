"""Selections as sets: how much tokens at some distance share, and how many blocks neighbours read together."""

import functools

import numpy as np
from jaxtyping import Bool, Float, Int

from sparda_jax.config import SparseConfig

GROUP = 12
"""Neighbouring tokens that a CTA of the Hopper prefill kernel takes; it reads the union of their blocks."""


def membership(ids: Int[np.ndarray, "tokens selected"], blocks: int) -> Bool[np.ndarray, "tokens blocks"]:
    """Which blocks each token selected; ids below 0 are padding."""
    mask = np.zeros((len(ids), blocks + 1), bool)
    np.put_along_axis(mask, np.where(ids < 0, blocks, ids), True, axis=1)
    return mask[:, :blocks]


def forced(
    positions: Int[np.ndarray, "tokens"], blocks: int, sparse: SparseConfig
) -> Bool[np.ndarray, "tokens blocks"]:
    """Which blocks each token selects whatever the scores: the first ones, its own and the local ones."""
    own, block = positions[:, None] // sparse.block_size, np.arange(blocks)
    return ((block < sparse.init_blocks) | (block >= own - sparse.local_blocks)) & (block <= own)


def shared(
    selected: Bool[np.ndarray, "tokens blocks"], free: Bool[np.ndarray, "tokens blocks"], distance: int
) -> Float[np.ndarray, "pairs"]:
    """The share of each token's free blocks that the token ``distance`` before it selected as well.

    Args:
        selected: of consecutive tokens of one KV head.
        free: those of them that are not forced; at least one each.
        distance: in tokens, at least 1; the first ``distance`` tokens have no pair.
    """
    later = free[distance:]
    return (later & selected[:-distance]).sum(axis=1) / later.sum(axis=1)


def unions(selected: Bool[np.ndarray, "tokens blocks"]) -> Int[np.ndarray, "groups"]:
    """Blocks that some of `GROUP` neighbours selected; tokens that fill no group at the end are left out."""
    groups = len(selected) // GROUP
    return selected[: groups * GROUP].reshape(groups, GROUP, -1).any(axis=1).sum(axis=-1)


def independent_unions(positions: Int[np.ndarray, "tokens"], sparse: SparseConfig) -> Float[np.ndarray, "groups"]:
    """What `unions` would be on average if each token drew its free blocks at random from those that it may.

    Args:
        positions: of tokens that have a choice, see `first_choice`.
        sparse: the widths.
    """

    @functools.cache
    def expected(own: tuple[int, ...]) -> float:
        ends = np.array(own) * sparse.block_size
        blocks = max(own) + 1
        fixed = forced(ends, blocks, sparse)
        candidates = ~fixed & (np.arange(blocks) <= ends[:, None] // sparse.block_size)
        chance = (sparse.num_selected_blocks - fixed.sum(axis=1)) / candidates.sum(axis=1)
        missed = np.where(fixed, 0.0, np.where(candidates, 1 - chance[:, None], 1.0))
        return float((1 - missed.prod(axis=0)).sum())

    groups = len(positions) // GROUP
    own = (positions[: groups * GROUP] // sparse.block_size).reshape(groups, GROUP)
    return np.array([expected(tuple(group)) for group in own.tolist()])


def first_choice(sparse: SparseConfig) -> int:
    """The first position whose token selects some visible blocks and not others, also if it is decoded."""
    return max(sparse.num_selected_blocks * sparse.block_size, sparse.dense_len - 1)
