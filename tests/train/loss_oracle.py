"""The Forecast loss of one document in plain float64 numpy, query by query, as docs/semantics.md section 11 defines it.

Beside it a version of the last step in plain jnp that autodiff can go through.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

# What the published code clamps probabilities at.
PUBLISHED_EPS = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """A `SparseConfig` of any size; the default is the grid of the golden numbers."""

    kernel_size: int = 8
    kernel_stride: int = 4
    block_size: int = 16
    init_blocks: int = 1
    local_blocks: int = 2
    num_selected_blocks: int = 6

    @property
    def per_block(self) -> int:
        return self.block_size // self.kernel_stride


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Everything between the inputs and the loss, by KV head and query.

    Attributes:
        compressed: [H, Nc, D]. fine: [H, T, T - 1], the teacher before the alignment. aligned: [H, T, Nc].
        selected: the ids of each query, ascending, without -1. supervised: [H, T, blocks].
        student: [H, T, Nc], its softmax. kl: [H, T], without the published clamps.
    """

    compressed: np.ndarray
    fine: np.ndarray
    aligned: np.ndarray
    selected: list[list[list[int]]]
    supervised: np.ndarray
    student: np.ndarray
    kl: np.ndarray

    @property
    def loss(self) -> float:
        return float(self.kl.mean())

    def published_kl(self, grid: Grid) -> Float[np.ndarray, "kv_heads length"]:
        """With 1e-8 added to every sum, and as a clamp of every probability."""
        blocks = self.supervised.shape[-1]
        entries = grid.per_block * min(grid.num_selected_blocks, blocks)
        result = np.zeros_like(self.kl)
        for head, query in np.ndindex(*self.kl.shape):
            keys = _keys_of(self.supervised[head, query], self.aligned.shape[-1], grid)
            vectors = []
            for row in (self.aligned[head, query], self.student[head, query]):
                row = row / (row.sum() + PUBLISHED_EPS)
                unused = np.zeros(entries - len(keys))
                vector = np.concatenate([row[keys], unused, [max(row.sum() - row[keys].sum(), 0)]])
                vector = np.maximum(vector, PUBLISHED_EPS)
                vectors.append(vector / vector.sum())
            result[head, query] = np.sum(vectors[0] * np.log(vectors[0] / vectors[1]))
        return result


def trace(student: np.ndarray, q: np.ndarray, k: np.ndarray, grid: Grid) -> Trace:
    """``student`` and ``k`` [T, H, D], ``q`` [T, H, G, D], one document from position 0 on."""
    length, kv_heads, head_dim = k.shape
    blocks = -(-length // grid.block_size)
    begins = range(0, length - grid.kernel_size + 1, grid.kernel_stride)
    compressed = np.stack([k[j : j + grid.kernel_size].mean(axis=0) for j in begins], axis=1)
    windows = compressed.shape[1]
    pairs = np.stack([k[i : i + 2].mean(axis=0) for i in range(length - 1)], axis=1)
    fine = np.zeros((kv_heads, length, length - 1))
    aligned, likelihood = np.zeros((2, kv_heads, length, windows))
    supervised = np.zeros((kv_heads, length, blocks), bool)
    selected, kl = [[] for _ in range(kv_heads)], np.zeros((kv_heads, length))
    for head, query in np.ndindex(kv_heads, length):
        seen = np.arange(length - 1) <= query
        for heads_q in q[query, head]:
            fine[head, query] += _softmax(pairs[head] @ heads_q / np.sqrt(head_dim), seen)
        for j in range(windows):
            start = grid.kernel_stride * j
            aligned[head, query, j] = fine[head, query, max(start - 1, 0) : start + grid.kernel_stride].max()
        ids, forced = _select(aligned[head, query], query, blocks, grid)
        selected[head].append(ids)
        supervised[head, query, [b for b in ids if b not in forced]] = True
        begun = grid.kernel_stride * np.arange(windows) <= query
        likelihood[head, query] = _softmax(compressed[head] @ student[query, head] / np.sqrt(head_dim), begun)
        keys = _keys_of(supervised[head, query], windows, grid)
        if len(keys):
            t, p = (_with_rest(row[head, query], keys) for row in (aligned, likelihood))
            kl[head, query] = np.sum(np.where(t > 0, t * np.log(np.where(t > 0, t, 1) / p), 0))
    return Trace(
        compressed=compressed,
        fine=fine,
        aligned=aligned,
        selected=selected,
        supervised=supervised,
        student=likelihood,
        kl=kl,
    )


def _with_rest(row: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The entries ``keys`` of a distribution and, as one entry, the sum of the others."""
    row = row / row.sum()
    return np.append(row[keys], np.delete(row, keys).sum())


def _softmax(logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
    weights = np.where(seen, np.exp(logits - logits[seen].max()), 0) if seen.any() else np.zeros_like(logits)
    return weights / max(weights.sum(), 1e-300)


def _select(aligned: np.ndarray, query: int, blocks: int, grid: Grid) -> tuple[list[int], set[int]]:
    """The selected past blocks, and which past blocks are forced."""
    own = query // grid.block_size
    forced = {b for b in range(own + 1) if b < grid.init_blocks or b >= own - grid.local_blocks}
    scores = []
    for b in range(blocks):
        near = aligned[max(grid.per_block * b - 1, 0) : grid.per_block * (b + 1)]
        score = np.inf if b in forced or b < grid.init_blocks else near.max(initial=-np.inf)
        scores.append((-score, b))
    best = sorted(b for _, b in sorted(scores)[: grid.num_selected_blocks])
    return [b for b in best if b <= own], forced


def _keys_of(supervised: np.ndarray, windows: int, grid: Grid) -> np.ndarray:
    keys = [grid.per_block * b + i for b in np.flatnonzero(supervised) for i in range(grid.per_block)]
    return np.minimum(np.array(keys, int), windows - 1)


def differentiable_loss(
    student: Float[jax.Array, "length kv_heads head_dim"], traced: Trace, grid: Grid
) -> Float[jax.Array, ""]:
    """The mean divergence as plain probabilities, in which only ``student`` [T, H, D] is not a constant."""
    length, _, head_dim = student.shape
    windows = traced.compressed.shape[1]
    begun = grid.kernel_stride * jnp.arange(windows) <= jnp.arange(length)[:, None]
    logits = jnp.einsum("thd,hwd->htw", student, traced.compressed, precision="highest") / np.sqrt(head_dim)
    inside = np.repeat(traced.supervised, grid.per_block, axis=-1)[..., :windows]
    target = traced.aligned / np.maximum(traced.aligned.sum(axis=-1, keepdims=True), 1e-300)
    rest_target = np.where(inside, 0, target).sum(axis=-1)
    active = inside.any(axis=-1)
    safe = jnp.where(active[..., None] & begun, logits, jnp.where(begun, 0, -1e30))
    # Rows without any begun window do not exist: window 0 begins at token 0.
    p = jax.nn.softmax(safe, axis=-1)
    rest = jnp.where(active, jnp.sum(jnp.where(inside, 0, p), axis=-1), 1)
    log_target = np.log(np.where(inside & (target > 0), target, 1))
    terms = jnp.where(inside & (target > 0), target * (log_target - jnp.log(jnp.where(inside, p, 1))), 0)
    log_rest = np.log(np.where(rest_target > 0, rest_target, 1))
    kl = jnp.sum(terms, axis=-1) + rest_target * (log_rest - jnp.log(rest))
    return jnp.mean(jnp.where(active, kl, 0))


def differentiable_block_loss(
    student: Float[jax.Array, "length kv_heads head_dim"], traced: Trace, grid: Grid
) -> Float[jax.Array, ""]:
    """The weighted mean of the objective over blocks (11.8), pair by pair; only ``student`` is no constant."""
    kv_heads, length, pairs = traced.fine.shape
    group = traced.fine[0, -1].sum()
    total, weights = jnp.zeros(()), 0.0
    for head, query in np.ndindex(kv_heads, length):
        own = query // grid.block_size
        if own + 1 <= grid.num_selected_blocks:
            continue
        free = np.arange(grid.init_blocks, own - grid.local_blocks)
        # Fine key i ends with token i + 1.
        mass = np.bincount(np.arange(1, pairs + 1) // grid.block_size, traced.fine[head, query])[free] / group
        target = mass / mass.sum()
        windows = (grid.per_block * free[:, None] + np.arange(grid.per_block)).ravel()
        logits = jnp.dot(traced.compressed[head, windows], student[query, head], precision="highest")
        likelihood = jax.nn.softmax(logits / np.sqrt(student.shape[-1])).reshape(len(free), -1).sum(axis=1)
        total += mass.max() * jnp.sum(target * (np.log(target) - jnp.log(likelihood)))
        weights += mass.max()
    return total / weights
