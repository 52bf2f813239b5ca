"""Attention of a prefill chunk over selected blocks: every backend against float64.

On a CPU the kernels are interpreted. With --gpu the same cases run compiled, on longer chunks.
"""

import functools
import inspect
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sparda_jax.pallas_kernels.backend import H200, Backend, mosaic_interpreter
from sparda_jax.pallas_kernels.block_sparse_attention import block_sparse_attention_prefill, mosaic_gpu

BLOCK = 64
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True, kw_only=True)
class Geometry:
    kv_heads: int
    group: int
    head_dim: int
    blocks: int


# The last has groups that fill no power of two, and more blocks than bits in a word.
GEOMETRIES = (
    Geometry(kv_heads=1, group=16, head_dim=128, blocks=6),
    Geometry(kv_heads=2, group=3, head_dim=64, blocks=34),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    chosen: np.ndarray
    start: np.ndarray
    lengths: np.ndarray

    @property
    def masks(self) -> np.ndarray:
        """The choice as words of bits."""
        blocks = self.chosen.shape[-1]
        padded = np.pad(self.chosen, [(0, 0)] * 3 + [(0, -blocks % 32)])
        return np.packbits(padded, axis=-1, bitorder="little").view("<u4")

    def arrays(self) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(x) for x in (self.q, self.k, self.v, self.masks, self.start, self.lengths))


def make_case(
    rng: np.random.Generator,
    geometry: Geometry,
    q_len: int,
    spans: list[tuple[int, int]],
    dtype: type = BF16,
    density: float = 0.4,
) -> Case:
    """A random choice of blocks, the token's own among it; bits without meaning are random, and what is not read NaN.

    Args:
        spans: start and length of each sequence.
    """
    g = geometry
    lanes = len(spans)
    start, lengths = (np.array(x, np.int32) for x in zip(*spans, strict=True))
    shape = (lanes, g.kv_heads, g.blocks * BLOCK, g.head_dim)
    k, v = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    chosen = rng.random((lanes, g.kv_heads, q_len, g.blocks)) < density
    positions = start[:, None] + np.arange(q_len)
    own = np.minimum(positions // BLOCK, g.blocks - 1)
    np.put_along_axis(chosen, own[:, None, :, None].repeat(g.kv_heads, 1), True, axis=-1)
    for b, h in np.ndindex(lanes, g.kv_heads):
        real = positions[b] < lengths[b]
        read = chosen[b, h, real].any(0).repeat(BLOCK) & (np.arange(shape[2]) < lengths[b])
        k[b, h, ~read] = v[b, h, ~read] = np.nan
    q = rng.standard_normal((lanes, q_len, g.kv_heads * g.group, g.head_dim)).astype(dtype)
    return Case(q=q, k=k, v=v, chosen=chosen, start=start, lengths=lengths)


def attention_float64(case: Case) -> np.ndarray:
    out = np.zeros(case.q.shape)
    kv_heads = case.k.shape[1]
    group = case.q.shape[2] // kv_heads
    for b, i, h in np.ndindex(case.q.shape[0], case.q.shape[1], kv_heads):
        position = case.start[b] + i
        if position >= case.lengths[b]:
            continue
        read = np.flatnonzero(case.chosen[b, h, i].repeat(BLOCK))
        read = read[read <= position]
        if not len(read):
            continue
        heads = slice(h * group, (h + 1) * group)
        k, v = (x[b, h, read].astype(np.float64) for x in (case.k, case.v))
        logits = case.q[b, i, heads].astype(np.float64) @ k.T / np.sqrt(k.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[b, i, heads] = weights @ v / weights.sum(-1, keepdims=True)
    return out


def skip_without_hopper() -> None:
    if jax.default_backend() == "gpu" and jax.devices()[0].compute_capability != "9.0":
        pytest.skip("Mosaic kernels need a Hopper GPU")


def run(case: Case, backend: Backend) -> np.ndarray:
    if backend is Backend.MOSAIC_GPU and jax.default_backend() == "cpu":
        q, k, v, masks, *lengths = case.arrays()
        with mosaic_interpreter():
            masks = masks.view(jnp.int32)
            out = jax.block_until_ready(
                mosaic_gpu.attention(q, k, v, masks, *lengths, stages=2, consumers=2, weights_in_shared=True)
            )
    else:
        out = block_sparse_attention_prefill(*case.arrays(), block_size=BLOCK, backend=backend)
    assert out.dtype == case.q.dtype
    return np.asarray(out)


def assert_close(found: np.ndarray, case: Case) -> None:
    """Within 2e-2 and a rounding, and on average as near as bf16 probabilities and outputs permit."""
    expected = attention_float64(case)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2**-7, atol=2e-2)
    error = np.abs(found.astype(np.float64) - expected)
    assert np.mean(error) <= 4e-3 * max(np.mean(np.abs(expected)), 1e-6)


class PrefillAttention:
    """What every backend has to fulfil; subclasses say where they run and how long the chunks are."""

    q_len = 13

    @pytest.fixture(params=list(Backend))
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return request.param

    @pytest.mark.parametrize("index", range(len(GEOMETRIES)))
    def test_ragged_chunks_against_float64(self, backend: Backend, index: int):
        """From the start, across a block's end, up to the capacity, and without a token; NaN where nothing is read."""
        g, n = GEOMETRIES[index], self.q_len
        end = g.blocks * BLOCK
        spans = [(0, n), (60, 60 + n - 4), (end - n, end), (100, 100)]
        case = make_case(np.random.default_rng(index), g, n, spans, density=0.1 if g.blocks > 32 else 0.4)
        found = run(case, backend)
        assert_close(found, case)
        np.testing.assert_array_equal(found[1, n - 4 :], 0)
        np.testing.assert_array_equal(found[3], 0)

    def test_every_block_is_dense_attention(self, backend: Backend):
        """All bits set, also those of blocks after the token's own, whose keys are NaN."""
        g = GEOMETRIES[0]
        start = g.blocks * BLOCK - self.q_len - 70
        case = make_case(np.random.default_rng(2), g, self.q_len, [(start, start + self.q_len)], density=1.1)
        assert_close(run(case, backend), case)

    def test_tokens_without_blocks_give_zeros(self, backend: Backend):
        """A token between others that selected some, and a whole chunk of them."""
        g, n = GEOMETRIES[0], self.q_len
        case = make_case(np.random.default_rng(3), g, n, [(130, 130 + n), (130, 130 + n)])
        case.chosen[0, :, 5] = False
        case.chosen[1] = False
        case.k[1], case.v[1] = np.nan, np.nan
        found = run(case, backend)
        assert_close(found, case)
        np.testing.assert_array_equal(found[0, 5], 0)
        np.testing.assert_array_equal(found[1], 0)

    def test_later_tokens_change_nothing(self, backend: Backend):
        """Other keys, values, queries and choices from one token on leave the bits of the outputs before it."""
        g, n, changed = GEOMETRIES[0], self.q_len, 11
        rng = np.random.default_rng(4)
        case = make_case(rng, g, n, [(60, 60 + n)])
        k, v, q = np.nan_to_num(case.k), np.nan_to_num(case.v), case.q.copy()
        case = replace(case, k=k, v=v)
        other = make_case(rng, g, n, [(60, 60 + n)])
        k, v, chosen = k.copy(), v.copy(), case.chosen.copy()
        k[:, :, 60 + changed :], v[:, :, 60 + changed :] = 7, -7
        q[:, changed:], chosen[:, :, changed:] = other.q[:, changed:], other.chosen[:, :, changed:]
        later = replace(case, q=q, k=k, v=v, chosen=chosen)
        before, after = run(case, backend), run(later, backend)
        np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
        assert_close(after, later)

    def test_large_logits_do_not_overflow(self, backend: Backend):
        g, n = GEOMETRIES[0], self.q_len
        case = make_case(np.random.default_rng(5), g, n, [(200, 200 + n)])
        case.q[...] = (case.q.astype(np.float32) * 1000).astype(BF16)
        found, expected = run(case, backend).astype(np.float64), attention_float64(case)
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2e-2)


class TestInterpreted(PrefillAttention):
    """On the CPU: the reference as it is, the kernels interpreted."""


@pytest.mark.gpu
class TestCompiled(PrefillAttention):
    """On a GPU, with more tiles than it has processors."""

    q_len = 333

    @pytest.fixture(params=list(Backend))
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        if request.param is Backend.MOSAIC_GPU:
            skip_without_hopper()
        return request.param

    @pytest.mark.parametrize("variant", [{"consumers": 1, "stages": 2}, {"consumers": 2}, {"stages": 2}], ids=str)
    def test_launches_do_not_change_the_bits(self, variant: dict):
        """A row's sums are taken block after block, whatever else its tile holds."""
        skip_without_hopper()
        case = make_case(np.random.default_rng(6), GEOMETRIES[0], 384, [(0, 384)])
        q, k, v, masks, *lengths = case.arrays()
        operands = (q, k, v, masks.view(jnp.int32), *lengths)
        plain = np.asarray(mosaic_gpu.attention(*operands))
        assert_close(plain, case)
        for _ in range(20):
            np.testing.assert_array_equal(np.asarray(mosaic_gpu.attention(*operands, **variant)), plain)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON, None])
def test_float32(backend: Backend | None):
    case = make_case(np.random.default_rng(7), GEOMETRIES[0], 9, [(60, 69), (300, 305)], np.float32)
    found = block_sparse_attention_prefill(*case.arrays(), block_size=BLOCK, backend=backend)
    np.testing.assert_allclose(np.asarray(found), attention_float64(case), rtol=0, atol=1e-5)


def test_what_the_kernels_take():
    """On other operands the rule falls back, and naming the backend is an error."""
    shapes = {"q": (1, 8, 32, 128), "k": (1, 2, 128, 128), "v": (1, 2, 128, 128), "masks": (1, 2, 8, 1)}

    def trace(changed: dict[str, tuple[int, ...]], dtype: type = BF16, block: int = BLOCK, backend: str | None = None):
        sizes = (shapes | changed).items()
        arguments = [jax.ShapeDtypeStruct(s, np.uint32 if name == "masks" else dtype) for name, s in sizes]
        arguments += [jax.ShapeDtypeStruct((1,), np.int32)] * 2
        call = functools.partial(block_sparse_attention_prefill, block_size=block, backend=backend)
        with jax.sharding.use_abstract_mesh(H200):
            return str(jax.make_jaxpr(call)(*arguments))

    assert "mpmd_map" in trace({})
    wide = {name: (*shape[:3], 256) for name, shape in shapes.items() if name != "masks"}
    for changed, dtype, block in (({}, np.float32, 64), (wide, BF16, 64), ({}, BF16, 32)):
        program = trace(changed, dtype, block)
        assert "pallas_call" in program
        assert "mpmd_map" not in program
        with pytest.raises(ValueError, match="does not take these operands: use one of reference, triton"):
            trace(changed, dtype, block, "mosaic_gpu")
    odd = {name: (*shape[:3], 96) for name, shape in shapes.items() if name != "masks"}
    assert "pallas_call" not in trace(odd)
    with pytest.raises(ValueError, match="does not take these operands: use one of reference"):
        trace(odd, backend="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masks": np.zeros((1, 2, 8, 1), np.int32)}, "masks are int32: they must be uint32"),
        ({"masks": np.zeros((1, 1, 8, 1), np.uint32)}, "has kv_heads=1, and k has kv_heads=2"),
        ({"v": np.zeros((1, 2, 128, 128), np.float32)}, "must have the same dtype"),
        ({"v": np.zeros((1, 2, 64, 128), BF16)}, "has capacity=64, and k has capacity=128"),
        ({"q": np.zeros((1, 8, 31, 128), BF16)}, "heads=31 must be a multiple of kv_heads=2"),
        ({"start": np.zeros(1, np.uint8)}, "start is uint8: it must be int32"),
        ({"lengths": np.ones(2, np.int32)}, r"lengths\[2\] has batch=2, and q has batch=1"),
        ({"block_size": 48}, "block_size=48 must divide capacity=128"),
        ({"block_size": 2}, "name 32 blocks of 2, and capacity=128: use 2 words"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str):
    arguments = {
        "q": np.zeros((1, 8, 32, 128), BF16),
        "k": np.zeros((1, 2, 128, 128), BF16),
        "v": np.zeros((1, 2, 128, 128), BF16),
        "masks": np.zeros((1, 2, 8, 1), np.uint32),
        "start": np.zeros(1, np.int32),
        "lengths": np.ones(1, np.int32),
        "block_size": BLOCK,
    } | change
    block_size = arguments.pop("block_size")
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(block_sparse_attention_prefill)(
            **{name: jnp.asarray(x) for name, x in arguments.items()}, block_size=block_size
        )
