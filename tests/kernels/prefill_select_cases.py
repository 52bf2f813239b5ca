"""Cases for block selection in prefill, and what they should give, in float64 numpy, a row at a time."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from sparda_jax.pallas_kernels.block_selection import Scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Every new one costs seconds to interpret, so the tests share a few."""

    batch: int = 2
    q_len: int
    kv_heads: int = 2
    group: int
    head_dim: int
    windows: int
    num_selected: int
    init_blocks: int = 1
    local_blocks: int = 2
    dtype: str = "bfloat16"

    @property
    def limits(self) -> dict[str, int]:
        names = ("init_blocks", "local_blocks", "num_selected")
        return {name: getattr(self, name) for name in names}

    @property
    def blocks(self) -> int:
        return -(-self.windows // 4)


# More blocks than a word has, tiles that are not full, a last block without all of its windows; the bundled model's
# heads; one KV head and no init block.
GEOMETRIES = (
    Geometry(q_len=150, group=3, head_dim=64, windows=4 * 70 - 1, num_selected=12),
    Geometry(q_len=97, group=16, head_dim=128, kv_heads=1, windows=4 * 20, num_selected=9, init_blocks=0),
)
# MiniCPM4.1 at 128K tokens, and one whose sizes are no powers of two; only for a GPU.
LONG = (
    Geometry(batch=1, q_len=700, group=16, head_dim=128, windows=8192, num_selected=96, local_blocks=32),
    Geometry(q_len=1100, group=3, head_dim=64, kv_heads=3, windows=5001, num_selected=41, local_blocks=8),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The operands of one call, as numpy arrays; float32 values that the geometry's dtype holds exactly."""

    geometry: Geometry
    scorer: Scorer
    queries: np.ndarray
    keys: np.ndarray
    start: np.ndarray
    num_new: np.ndarray

    @property
    def operands(self) -> tuple[jnp.ndarray, ...]:
        floats = [jnp.asarray(a, self.geometry.dtype) for a in (self.queries, self.keys)]
        return (*floats, jnp.asarray(self.start, jnp.int32), jnp.asarray(self.num_new, jnp.int32))


def make_case(
    geometry: Geometry, scorer: Scorer, start: list[int], num_new: list[int], seed: int, *, levels: int = 0
) -> Case:
    """Random keys and queries; padding and windows that no token of a sequence sees are NaN.

    With ``levels`` they take so few values that many scores are equal, and exact in float32.
    """
    g, rng = geometry, np.random.default_rng(seed)

    def values(*shape: int) -> np.ndarray:
        drawn = rng.integers(-levels, levels + 1, shape) if levels else rng.standard_normal(shape)
        return np.asarray(jnp.asarray(drawn, g.dtype), np.float32)

    group = 1 if scorer is Scorer.FORECAST else g.group
    queries = values(g.batch, g.q_len, g.kv_heads, group, g.head_dim)
    keys = values(g.batch, g.kv_heads, g.windows, g.head_dim)
    for b in range(g.batch):
        queries[b, num_new[b] :] = np.nan
        keys[b, :, max(start[b] + num_new[b] - 16, 0) // 16 :] = np.nan
    return Case(geometry=g, scorer=scorer, queries=queries, keys=keys, start=np.array(start), num_new=np.array(num_new))


def exact_row(case: Case, b: int, h: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """A token's score of each block up to its own, and the scale that rounding errors are relative to."""
    position = int(case.start[b]) + row
    q = case.queries[b, row, h].astype(np.float64)
    keys = case.keys[b, h, : max(position - 15, 0) // 16].astype(np.float64)
    scores, size = keys @ q.T, np.abs(keys) @ np.abs(q).T
    if case.scorer is Scorer.INFLLM and len(keys):
        weights = np.exp((scores - scores.max(axis=0)) / np.sqrt(case.geometry.head_dim))
        scores = weights / weights.sum(axis=0)
        # float32 rounds a logit relative to its size, and a weight relative to that.
        size = scores * np.maximum(size / np.sqrt(case.geometry.head_dim) / 10, 1)
    scores, size = scores.sum(axis=1), size.sum(axis=1)
    blocks = position // 64 + 1
    pooled, bound = np.full(blocks, -np.inf), np.zeros(blocks)
    for block in range(blocks):
        own = slice(max(4 * block - 1, 0), 4 * block + 4)
        pooled[block] = scores[own].max(initial=-np.inf)
        bound[block] = size[own].max(initial=0)
    return pooled, bound


def exact_choice(scores: np.ndarray, geometry: Geometry) -> np.ndarray:
    """The selection of a token whose own block is the last that is scored, by a stable sort: bool, one a block."""
    ids, own = np.arange(len(scores)), len(scores) - 1
    forced = (ids < geometry.init_blocks) | (ids >= own - geometry.local_blocks)
    ranked = np.where(forced, np.inf, np.minimum(scores, np.finfo(np.float32).max))
    chosen = np.zeros(len(scores), bool)
    chosen[np.argsort(-ranked, kind="stable")[: geometry.num_selected]] = True
    return chosen
