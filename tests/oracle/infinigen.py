"""InfiniGen selection scores: a few channels of skewed queries and keys (docs/semantics.md section 7.3)."""

import numpy as np
from jaxtyping import Float, Int

from tests.oracle.numerics import EXACT, Numerics


def calibrate(
    q: Float[np.ndarray, "length heads head_dim"], k: Float[np.ndarray, "length kv_heads head_dim"]
) -> Float[np.ndarray, "kv_heads head_dim head_dim"]:
    """Skewing bases A [Hk, D, D] of one layer from the calibration prompt's post-RoPE `q [T, H, D]`, `k [T, Hk, D]`.

    Columns are right singular vectors of the group's mean query, in ascending order of the product of the singular
    values of query and key. Order and sign of the columns change no score.
    """
    (t, heads, dim), kv_heads = q.shape, k.shape[1]
    mean_q = q.reshape(t, kv_heads, heads // kv_heads, dim).mean(axis=2)
    bases = []
    for m in range(kv_heads):
        # R of a QR decomposition has the singular values and right vectors of the whole, and is small.
        _, sq, vq = np.linalg.svd(np.linalg.qr(mean_q[:, m], mode="r"), full_matrices=True)
        sk = np.linalg.svd(np.linalg.qr(k[:, m], mode="r"), compute_uv=False)
        # A prompt shorter than D has fewer singular values than channels: the missing ones are 0.
        product = np.zeros(dim)
        product[: min(len(sq), len(sk))] = (sq * sk)[:dim]
        basis = np.empty((dim, dim), q.dtype)
        basis[:, np.argsort(product, kind="stable")] = vq.T
        bases.append(basis)
    return np.stack(bases)


def choose_channels(
    q: Float[np.ndarray, "length heads head_dim"],
    basis: Float[np.ndarray, "kv_heads head_dim head_dim"],
    num_channels: int,
) -> Int[np.ndarray, "kv_heads channels"]:
    """The channels [Hk, num_channels], ascending, where a prompt's skewed queries are largest in the 1-norm.

    `q [T, H, D]` post-RoPE queries of the prompt, `basis [Hk, D, D]`; summed over tokens and the heads of a group.
    """
    (t, heads, dim), kv_heads = q.shape, len(basis)
    grouped = q.reshape(t, kv_heads, heads // kv_heads, dim)
    weight = np.abs(np.einsum("tmgd,mdc->tmgc", grouped, basis, optimize=True)).sum(axis=(0, 2))
    return np.sort(np.argsort(-weight, axis=-1, kind="stable")[:, :num_channels], axis=-1)


def partial_keys(
    k: Float[np.ndarray, "length kv_heads head_dim"],
    basis: Float[np.ndarray, "kv_heads head_dim head_dim"],
    channels: Int[np.ndarray, "kv_heads channels"],
    numerics: Numerics = EXACT,
) -> Float[np.ndarray, "length kv_heads channels"]:
    """The chosen channels of the skewed keys: `k [T, Hk, D]` -> [T, Hk, num_channels]."""
    skewed = np.einsum("tmd,mdc->tmc", k, basis, optimize=True)
    return numerics.round(np.take_along_axis(skewed, channels[None], axis=-1))


def token_score(
    q_hat: Float[np.ndarray, "1 heads head_dim"],
    basis: Float[np.ndarray, "kv_heads head_dim head_dim"],
    channels: Int[np.ndarray, "kv_heads channels"],
    partial: Float[np.ndarray, "length kv_heads channels"],
    numerics: Numerics = EXACT,
) -> Float[np.ndarray, "kv_heads 1 length"]:
    """Scores [Hk, 1, S] of every token for one decode step.

    `q_hat [1, H, D]`: this layer's query projection of the previous layer's attention input, rotated. `partial
    [S, Hk, c]`: the partial keys, zero for the current token, whose entry is written only after scoring. Summed over
    heads before any softmax; there is none.
    """
    (_, heads, dim), kv_heads = q_hat.shape, len(basis)
    grouped = q_hat.reshape(kv_heads, heads // kv_heads, dim)
    skewed = np.einsum("mgd,mdc->mgc", grouped, basis, optimize=True)
    chosen = np.take_along_axis(skewed, channels[:, None], axis=-1)
    score = np.einsum("mgc,tmc->mt", chosen, partial, optimize=True) / np.sqrt(channels.shape[1])
    return numerics.round_score(score[:, None].astype(q_hat.dtype))
