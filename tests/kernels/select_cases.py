"""Cases for block selection in decode, and what they should give, in float64 numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from sparda_jax.pallas_kernels.block_selection import Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Every new one costs seconds to interpret, so the tests share a few."""

    batch: int = 3
    kv_heads: int = 2
    group: int
    head_dim: int
    blocks: int
    width: int
    init_blocks: int = 1
    local_blocks: int = 2
    dtype: str = "bfloat16"

    @property
    def limits(self) -> dict[str, int]:
        return {"init_blocks": self.init_blocks, "local_blocks": self.local_blocks, "width": self.width}


GEOMETRIES = (
    Geometry(group=16, head_dim=128, blocks=40, width=12),
    Geometry(group=1, head_dim=64, kv_heads=1, blocks=33, width=8, init_blocks=0),
    Geometry(group=8, head_dim=64, blocks=128, width=96, local_blocks=33),
    Geometry(group=5, head_dim=128, blocks=9, width=16, dtype="float32", init_blocks=2, local_blocks=1),
)
# MiniCPM4.1 at 128K tokens, and one that fills no tile; only for a GPU.
LONG = (
    Geometry(group=16, head_dim=128, blocks=2048, width=96, local_blocks=33),
    Geometry(group=8, head_dim=64, blocks=2051, width=128, local_blocks=8),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The operands of one call, as numpy arrays; float32 values that the geometry's dtype holds exactly."""

    geometry: Geometry
    scorer: Scorer
    queries: np.ndarray
    pages: np.ndarray
    block_table: np.ndarray
    visible: np.ndarray
    query_block: np.ndarray
    num_selected: np.ndarray

    @property
    def scored(self) -> tuple[jnp.ndarray, ...]:
        floats = [jnp.asarray(a, self.geometry.dtype) for a in (self.queries, self.pages)]
        return (*floats, jnp.asarray(self.block_table), jnp.asarray(self.visible))

    @property
    def operands(self) -> tuple[jnp.ndarray, ...]:
        return (*self.scored, jnp.asarray(self.query_block), jnp.asarray(self.num_selected))


def make_case(geometry: Geometry, scorer: Scorer, lengths: np.ndarray, seed: int, *, levels: int = 0) -> Case:
    """Random keys for sequences of ``lengths`` stored tokens each; 0 is an idle lane.

    What a sequence does not see is NaN or a page number out of any range. With ``levels`` the keys and queries take so
    few values that many scores are equal.
    """
    g, rng = geometry, np.random.default_rng(seed)

    def values(*shape: int) -> np.ndarray:
        drawn = rng.integers(-levels, levels + 1, shape) if levels else rng.standard_normal(shape)
        return np.asarray(jnp.asarray(drawn, g.dtype), np.float32)

    visible = np.maximum((lengths - 32) // 16 + 1, 0).astype(np.int32)
    pages = values(g.batch * g.blocks + 3, g.kv_heads, 4, g.head_dim)
    table = rng.permutation(len(pages))[: g.batch * g.blocks].reshape(g.batch, g.blocks).astype(np.int32)
    unseen = np.ones(pages.shape[:3], bool)
    for b in range(g.batch):
        entry = np.arange(1, int(visible[b]) + 1)
        unseen[table[b, entry // 4], :, entry % 4] = False
        table[b, visible[b] // 4 + (visible[b] > 0) :] = rng.choice([-1, -(2**31), 2**31 - 1])
    return Case(
        geometry=g,
        scorer=scorer,
        queries=values(g.batch, g.kv_heads, 1 if scorer is Scorer.FORECAST else g.group, g.head_dim),
        pages=np.where(unseen[..., None], np.nan, pages),
        block_table=table,
        visible=visible,
        query_block=((lengths - 1) // 64).astype(np.int32),
        num_selected=rng.integers(1, g.width + 1, g.batch).astype(np.int32),
    )


def exact_scores(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Block scores [batch, kv_heads, blocks] in float64, and the scale that their rounding errors are relative to."""
    g = case.geometry
    scores = np.full((g.batch, g.kv_heads, g.blocks), -np.inf)
    scale = np.zeros_like(scores)
    for b, h in np.ndindex(g.batch, g.kv_heads):
        entry = np.arange(1, int(case.visible[b]) + 1)
        keys = case.pages[case.block_table[b, entry // 4], h, entry % 4].astype(np.float64)
        logits = keys @ case.queries[b, h].astype(np.float64).T
        size = np.abs(keys) @ np.abs(case.queries[b, h]).astype(np.float64).T
        if case.scorer is Scorer.INFLLM and len(keys):
            weights = np.exp((logits - logits.max(axis=0)) / np.sqrt(g.head_dim))
            logits = weights / weights.sum(axis=0)
            # float32 rounds a logit relative to its size, and a weight relative to that.
            size = logits * np.maximum(size / np.sqrt(g.head_dim) / 10, 1)
        for window, (score, bound) in enumerate(zip(logits.sum(axis=1), size.sum(axis=1), strict=True)):
            for block in {(window + 1) // 4, window // 4}:
                scores[b, h, block] = max(scores[b, h, block], score)
                scale[b, h, block] = max(scale[b, h, block], bound)
    return scores, scale


def exact_choice(
    scores: np.ndarray, query_block: np.ndarray, num_selected: np.ndarray, geometry: Geometry
) -> np.ndarray:
    """The selection from float32 ``scores`` by a stable sort: ids [batch, kv_heads, width]."""
    found = np.full((*scores.shape[:2], geometry.width), -1, np.int32)
    largest = np.finfo(np.float32).max
    for b, h in np.ndindex(scores.shape[:2]):
        ids = np.arange(int(query_block[b]) + 1)
        forced = (ids < geometry.init_blocks) | (ids >= query_block[b] - geometry.local_blocks)
        ranked = np.where(forced, np.inf, np.minimum(scores[b, h, ids], largest))
        chosen = np.sort(np.argsort(-ranked, kind="stable")[: num_selected[b]])
        found[b, h, : len(chosen)] = chosen
    return found


def joined_parts(parts: np.ndarray, visible: np.ndarray, blocks: int, backend: str) -> np.ndarray:
    """Block scores [batch, kv_heads, blocks] from what a backend's score kernel leaves."""
    own, entry = parts[:, :, 0], parts[:, :, 1]
    if backend == "mosaic_gpu":
        own, entry = own[..., 32 : 32 + blocks], entry[..., 31 : 31 + blocks]
    pages_seen = np.where(visible > 0, visible // 4 + 1, 0)
    unseen = np.arange(blocks) >= pages_seen[:, None, None]
    own, entry = (np.where(unseen, -np.inf, part) for part in (own, entry))
    return np.maximum(own, np.pad(entry[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-np.inf))


def split_parts(scores: np.ndarray, backend: str) -> np.ndarray:
    """What a backend's top-k expects where each block's score comes from its own page; unseen places are NaN."""
    parts = np.stack([scores, np.full(scores.shape, -np.inf, np.float32)], axis=2)
    if backend == "mosaic_gpu":
        padded = 32 + 1024 * -(-scores.shape[-1] // 1024)
        rest = padded - 32 - scores.shape[-1]
        parts = np.pad(parts, ((0, 0), (0, 0), (0, 0), (32, rest)), constant_values=np.nan)
    return parts
