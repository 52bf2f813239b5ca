"""The softmax over fine keys: every backend against the definition with whole matrices in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.backend import H200
from sparda_jax.pallas_kernels.fine_softmax import FineScores, fine_softmax, has_kernels

STRIDE, BLOCK, TILE = 16, 64, 64
BACKENDS = ["reference", "triton"]


def definition(q: np.ndarray, fine: np.ndarray, first: np.ndarray, last: np.ndarray) -> list[np.ndarray]:
    z = np.einsum("bqhgd,bhfd->bhgqf", q, fine) / np.sqrt(q.shape[-1])
    index = np.arange(fine.shape[2])
    seen = ((index >= first[..., None]) & (index <= last[..., None]))[:, None, None]
    peak = np.max(np.where(seen, z, -1e300), axis=-1, keepdims=True)
    weights = np.where(seen, np.exp(np.where(seen, z - peak, 0)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    p = (weights / np.where(total > 0, total, 1)).sum(axis=2)
    strides, blocks = (p.reshape(*p.shape[:-1], -1, size) for size in (STRIDE, BLOCK))
    return [strides.max(axis=-1), strides[..., 0], blocks.sum(axis=-1)]


def case(length: int, q_len: int, *, seed: int, group: int = 3, scale: float = 1.0) -> tuple[jax.Array, ...]:
    """Queries that see a range of keys each, some of them none, and some all."""
    rng = np.random.default_rng(seed)
    q = scale * rng.standard_normal((2, q_len, 2, group, 16))
    fine = rng.standard_normal((2, 2, length, 16))
    ends = np.sort(rng.integers(0, length, (2, 2, q_len)), axis=0)
    ends[:, 0, ::5] = [[length - 1], [3]]
    ends[:, 1, 2 : q_len // 2] = [[0], [length - 1]]
    dtype = jnp.bfloat16
    return jnp.asarray(q, dtype), jnp.asarray(fine, dtype), *(jnp.asarray(e, jnp.int32) for e in ends)


def run(operands: tuple[jax.Array, ...], backend: str) -> FineScores:
    return fine_softmax(*operands, stride=STRIDE, block_size=BLOCK, tile=TILE, backend=backend)


def check(operands: tuple[jax.Array, ...], backend: str, rtol: float = 2e-5) -> None:
    found = run(operands, backend)
    exact = definition(*(np.asarray(x, np.float64) for x in operands[:2]), *(np.asarray(x) for x in operands[2:]))
    for ours, theirs in zip((found.largest, found.first, found.mass), exact, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_ranges(backend: str) -> None:
    """More than one tile of keys and one of rows, neither full."""
    check(case(192, 150, seed=0), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits(backend: str) -> None:
    """Keys that a query does not see overflow beside its denominator; float32 keeps less of an exponent of 1000."""
    check(case(128, 40, seed=1, scale=300.0), backend, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [192, 4096])
def test_compiled(length: int) -> None:
    check(case(length, 700, seed=2, group=16), "triton")


def test_where_kernels_are() -> None:
    assert not has_kernels(jnp.bfloat16, 128, 16, 64)
    with jax.sharding.use_abstract_mesh(H200):
        assert has_kernels(jnp.bfloat16, 128, 16, 64)
        assert not has_kernels(jnp.float32, 128, 16, 64)
        assert not has_kernels(jnp.bfloat16, 96, 16, 64)


def test_refusals() -> None:
    q, fine, first, last = case(128, 8, seed=3)
    with pytest.raises(ValueError, match="length=128, tile=48"):
        fine_softmax(q, fine, first, last, stride=STRIDE, block_size=BLOCK, tile=48)
    with pytest.raises(ValueError, match="must be int32"):
        fine_softmax(q, fine, first.astype(jnp.int16), last, stride=STRIDE, block_size=BLOCK, tile=TILE)
    wide = q.astype(jnp.float32), fine.astype(jnp.float32)
    with pytest.raises(ValueError, match="does not take"):
        fine_softmax(*wide, first, last, stride=STRIDE, block_size=BLOCK, tile=TILE, backend="triton")
