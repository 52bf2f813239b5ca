"""Dense and block-sparse attention as one masked softmax (docs/semantics.md section 6)."""

import numpy as np
from jaxtyping import Bool, Float, Int

from tests.oracle.numerics import EXACT, Numerics


def causal_mask(q_len: int, kv_len: int) -> Bool[np.ndarray, "q_len kv_len"]:
    """bool [q_len, kv_len], aligned at the bottom right: the last query sees every key."""
    return np.arange(kv_len) <= np.arange(q_len)[:, None] + kv_len - q_len


def block_mask(
    ids: Int[np.ndarray, "kv_heads q_len k"], kv_len: int, block_size: int = 64
) -> Bool[np.ndarray, "kv_heads q_len kv_len"]:
    """bool [Hk, T, kv_len]: tokens of the blocks in `ids [Hk, T, k]`. Order and duplicates don't matter, -1 is none."""
    kv_heads, t, _ = ids.shape
    chosen = np.zeros((kv_heads, t, -(-kv_len // block_size) + 1), bool)
    np.put_along_axis(chosen, np.where(ids < 0, chosen.shape[-1] - 1, ids), True, axis=-1)
    return np.repeat(chosen[..., :-1], block_size, axis=-1)[..., :kv_len]


def attend(
    q: Float[np.ndarray, "q_len heads head_dim"],
    k: Float[np.ndarray, "kv_len kv_heads head_dim"],
    v: Float[np.ndarray, "kv_len kv_heads head_dim"],
    allowed: Bool[np.ndarray, "*kv_heads q_len kv_len"],
    numerics: Numerics = EXACT,
) -> Float[np.ndarray, "q_len heads head_dim"]:
    """softmax(q·k / sqrt(D)) v over the allowed keys: `q [T, H, D]`, `k, v [S, Hk, D]` -> [T, H, D].

    `allowed` is bool, [T, S] or [Hk, T, S]; each row must allow a key. In bf16 the probabilities are rounded before
    they meet v, and the division by their sum comes last, as in FlashAttention-2.
    """
    (t, heads, dim), kv_heads = q.shape, k.shape[1]
    group = heads // kv_heads
    allowed = np.broadcast_to(allowed, (kv_heads, t, len(k)))
    out = np.empty_like(q)
    for h in range(heads):
        m = h // group
        z = (q[:, h] @ k[:, m].T) / np.sqrt(dim).astype(q.dtype)
        z = np.where(allowed[m], z, -np.inf)
        p = np.exp(z - z.max(axis=-1, keepdims=True))
        out[:, h] = (numerics.round(p) @ v[:, m]) / p.sum(axis=-1, keepdims=True)
    return numerics.round(out)


def dense_attention(
    q: Float[np.ndarray, "q_len heads head_dim"],
    k: Float[np.ndarray, "kv_len kv_heads head_dim"],
    v: Float[np.ndarray, "kv_len kv_heads head_dim"],
    numerics: Numerics = EXACT,
) -> Float[np.ndarray, "q_len heads head_dim"]:
    """Causal attention over everything; shapes as in `attend`."""
    return attend(q, k, v, causal_mask(len(q), len(k)), numerics)


def block_sparse_attention(
    q: Float[np.ndarray, "q_len heads head_dim"],
    k: Float[np.ndarray, "kv_len kv_heads head_dim"],
    v: Float[np.ndarray, "kv_len kv_heads head_dim"],
    ids: Int[np.ndarray, "kv_heads q_len k"],
    block_size: int = 64,
    numerics: Numerics = EXACT,
) -> Float[np.ndarray, "q_len heads head_dim"]:
    """Causal attention over the blocks `ids [Hk, T, k]` (-1: none); other shapes as in `attend`."""
    allowed = block_mask(ids, len(k), block_size) & causal_mask(len(q), len(k))
    return attend(q, k, v, allowed, numerics)
