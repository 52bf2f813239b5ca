"""Which blocks a query reads: scores on the compressed grid, pooling, forcing, top-k (docs/semantics.md 4 and 5.4)."""

import numpy as np
from jaxtyping import Float, Int

from tests.oracle.numerics import EXACT, Numerics


def visible_stage1(
    rows: Int[np.ndarray, "q_len"], q_len: int, n1: int, kernel: int = 32, stride: int = 16, ref_compat: bool = False
) -> Int[np.ndarray, "q_len"]:
    """How many compressed keys each prefill row sees in stage 1: those whose whole window ends at or before it.

    `rows [T]` are token indices, `q_len` is the length of the prefill (only quirk Q1 depends on it). Section 4.2.
    """
    if not ref_compat:
        return np.clip((rows - kernel + 1) // stride + 1, 0, n1)
    shift = kernel - stride - 1

    def trunc(x):
        return np.trunc(x / stride).astype(int)  # C integer division

    return np.clip(trunc(rows - shift) + n1 - trunc(np.int64(q_len - shift)), 0, n1)


def stage1_score(
    q: Float[np.ndarray, "q_len heads head_dim"],
    k1: Float[np.ndarray, "n1 kv_heads head_dim"],
    visible: Int[np.ndarray, "q_len"],
    numerics: Numerics = EXACT,
) -> Float[np.ndarray, "kv_heads q_len n1"]:
    """InfLLM-V2 score [Hk, T, n1]: softmax per head over the visible keys, then summed over the heads of a group.

    `q [T, H, D]`, `k1 [n1, Hk, D]`, `visible [T]`: the first so many keys count. Invisible keys score 0. Section 4.1.
    """
    (t, heads, dim), (n1, kv_heads, _) = q.shape, k1.shape
    grouped = q.reshape(t, kv_heads, heads // kv_heads, dim)
    z = np.einsum("tmgd,jmd->mtgj", grouped, k1, optimize=True) / np.sqrt(dim).astype(q.dtype)
    seen = np.arange(n1) < visible[:, None]
    z = np.where(seen[None, :, None], z, -np.inf)
    top = z.max(axis=-1, keepdims=True, initial=-np.inf)
    exp = np.exp(z - np.where(np.isinf(top), 0, top))
    total = exp.sum(axis=-1, keepdims=True)
    p = exp / np.where(total == 0, 1, total)
    return numerics.round_score(p.sum(axis=2))


def forecast_score(
    forecast: Float[np.ndarray, "q_len kv_heads head_dim"],
    k1: Float[np.ndarray, "n1 kv_heads head_dim"],
    rows: Int[np.ndarray, "q_len"] | None,
    stride: int = 16,
    numerics: Numerics = EXACT,
) -> Float[np.ndarray, "kv_heads q_len n1"]:
    """SparDA score [Hk, T, n1]: the raw dot product of `forecast [T, Hk, D]` and `k1 [n1, Hk, D]`. Section 5.4.

    `rows [T]` (prefill): key j scores -inf where its window starts after the row. None (decode): no mask.
    """
    score = numerics.round_score(np.einsum("tmd,jmd->mtj", forecast, k1, optimize=True))
    if rows is None:
        return score
    return np.where(stride * np.arange(len(k1)) > rows[:, None], -np.inf, score)


def align_teacher(
    score: Float[np.ndarray, "kv_heads q_len keys"], ratio: int, n1: int
) -> Float[np.ndarray, "kv_heads q_len n1"]:
    """Training: scores [Hk, T, n] on a grid `ratio` times finer -> [Hk, T, n1]: max over ratio*j-1 .. ratio*j+ratio-1.

    Windows are `ratio + 1` wide with one -inf on each side; the result is cut, or filled with 0, to n1 (section 9). On
    equal grids (ratio 1) there is no pooling.
    """
    if ratio == 1:
        return score
    n = score.shape[-1]
    out = np.zeros((*score.shape[:-1], n1), score.dtype)
    for j in range(min(n1, max(0, (n + 2 - ratio - 1) // ratio + 1))):
        out[..., j] = score[..., max(0, ratio * j - 1) : ratio * j + ratio].max(axis=-1)
    return out


def pool_blocks(
    score: Float[np.ndarray, "kv_heads q_len keys"],
    query_block: Int[np.ndarray, "q_len"],
    num_blocks: int,
    init_blocks: int,
    local_blocks: int,
    ratio: int = 4,
) -> Float[np.ndarray, "kv_heads q_len num_blocks"]:
    """Block scores [Hk, T, num_blocks] from `score [Hk, T, n]`, `ratio` entries to a block. Section 4.3.

    Block b gets the maximum over entries ratio*b-1 .. ratio*b+ratio-1, -inf if there are none; the first
    `init_blocks` and blocks query_block-local_blocks .. query_block (`query_block [T]`) get +inf.
    """
    kv_heads, t, n = score.shape
    pooled = np.full((kv_heads, t, num_blocks), -np.inf, score.dtype)
    for b in range(num_blocks):
        low, high = max(0, ratio * b - 1), min(n, ratio * b + ratio)
        if low < high:
            pooled[:, :, b] = score[:, :, low:high].max(axis=-1)
    block = np.arange(num_blocks)
    distance = query_block[:, None] - block
    forced = (block < init_blocks) | ((distance >= 0) & (distance <= local_blocks))
    return np.where(forced, np.inf, pooled)


def select_blocks(
    pooled: Float[np.ndarray, "kv_heads q_len blocks"],
    query_block: Int[np.ndarray, "q_len"],
    total: int,
    ref_compat: bool = False,
) -> Int[np.ndarray, "kv_heads q_len k"]:
    """The `min(total, num_blocks)` best blocks a row, int32 [Hk, T, k], ascending, -1 (invalid) last. Section 4.4.

    Ties go to the lowest block. Blocks after `query_block [T]` never win a place in the clean semantics; in the
    reference they may (quirk Q2) and are made invalid afterwards, by a `query_block` that Q3 shifts.
    """
    num_blocks = pooled.shape[-1]
    future = np.arange(num_blocks) > query_block[:, None]
    ranked = pooled if ref_compat else np.where(future, -np.inf, pooled)
    best = np.argsort(-ranked, axis=-1, kind="stable")[..., : min(total, num_blocks)]
    ids = np.sort(best, axis=-1)
    return np.where(ids > query_block[:, None], -1, ids).astype(np.int32)
