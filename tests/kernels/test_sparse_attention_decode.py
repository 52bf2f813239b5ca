"""Attention of one token over records in slots: every backend against float64, and bit for bit against itself.

On a CPU the kernels are interpreted. With --gpu the same cases run compiled, on larger lists.
"""

import contextlib
import functools
import inspect
from dataclasses import dataclass
from types import ModuleType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sparda_jax.pallas_kernels.backend import H200, Backend, mosaic_interpreter
from sparda_jax.pallas_kernels.sparse_attention import mosaic_gpu, sparse_attention_decode, triton
from tests.oracle.golden import load_golden

BLOCK = 64
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True, kw_only=True)
class Geometry:
    kv_heads: int
    group: int
    head_dim: int
    width: int


# The second width is no multiple of the kernels' groups of list positions, the last is that of MiniCPM4.1.
GEOMETRIES = (
    Geometry(kv_heads=1, group=16, head_dim=128, width=8),
    Geometry(kv_heads=1, group=1, head_dim=64, width=13),
    Geometry(kv_heads=2, group=5, head_dim=128, width=8),
)
MINICPM = Geometry(kv_heads=2, group=16, head_dim=128, width=96)
# Both sides of every boundary: one token, a 16-row tile, a block, two blocks.
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130]


@dataclass(frozen=True, kw_only=True)
class Case:
    q: np.ndarray
    slots: np.ndarray
    slot_ids: np.ndarray
    lengths: np.ndarray


def make_case(
    rng: np.random.Generator, geometry: Geometry, counts: list[int], lengths: list[int], dtype: type = BF16
) -> Case:
    """Random records in random slots. What must not be read is NaN: other slots, rows of the tail beyond the length."""
    g = geometry
    lanes = len(counts)
    num_slots = lanes * g.kv_heads * g.width + 3
    slots = np.full((num_slots, 2 * BLOCK, g.head_dim), np.nan, dtype)
    slot_ids = np.full((lanes, g.kv_heads, g.width), -1, np.int32)
    free = rng.permutation(num_slots)
    for b, h in np.ndindex(lanes, g.kv_heads):
        mine, free = free[: counts[b]], free[counts[b] :]
        slot_ids[b, h, : counts[b]] = mine
        slots[mine] = rng.standard_normal((counts[b], 2 * BLOCK, g.head_dim))
        if counts[b]:
            rows = (lengths[b] - 1) % BLOCK + 1
            slots[mine[-1], rows:BLOCK] = np.nan
            slots[mine[-1], BLOCK + rows :] = np.nan
    q = rng.standard_normal((lanes, g.kv_heads, g.group, g.head_dim)).astype(dtype)
    return Case(q=q, slots=slots, slot_ids=slot_ids, lengths=np.array(lengths, np.int32))


def lane_of(case: Case, lane: int) -> Case:
    one = slice(lane, lane + 1)
    return Case(q=case.q[one], slots=case.slots, slot_ids=case.slot_ids[one], lengths=case.lengths[one])


def attention_float64(case: Case) -> np.ndarray:
    out = np.zeros(case.q.shape)
    for b, h in np.ndindex(case.slot_ids.shape[:2]):
        listed = case.slot_ids[b, h][case.slot_ids[b, h] >= 0]
        if not len(listed):
            continue
        tokens = (len(listed) - 1) * BLOCK + (case.lengths[b] - 1) % BLOCK + 1
        records = case.slots[listed].astype(np.float64)
        k, v = (x.reshape(-1, x.shape[-1])[:tokens] for x in (records[:, :BLOCK], records[:, BLOCK:]))
        logits = case.q[b, h].astype(np.float64) @ k.T / np.sqrt(k.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[b, h] = weights @ v / weights.sum(-1, keepdims=True)
    return out


def skip_without_hopper() -> None:
    """On a GPU that can't run Mosaic kernels; on a CPU they are interpreted."""
    if jax.default_backend() == "gpu" and jax.devices()[0].compute_capability != "9.0":
        pytest.skip("Mosaic kernels need a Hopper GPU")


def arrays(case: Case) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(x) for x in (case.q, case.slots, case.slot_ids, case.lengths))


def run(case: Case, backend: Backend) -> np.ndarray:
    with mosaic_interpreter() if backend is Backend.MOSAIC_GPU else contextlib.nullcontext():
        out = sparse_attention_decode(*arrays(case), backend=backend)
        out = jax.block_until_ready(out)
    assert out.dtype == case.q.dtype
    return np.asarray(out)


def assert_close(found: np.ndarray, case: Case) -> None:
    """Within 2e-2, and on average as near as bf16 probabilities and outputs permit."""
    expected = attention_float64(case)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=2e-2)
    # A result of size 1 is rounded by up to 2^-9; the probabilities' roundings average out over the keys.
    error = np.abs(found.astype(np.float64) - expected)
    assert np.mean(error) <= 4e-3 * max(np.mean(np.abs(expected)), 1e-6)


class DecodeAttention:
    """What every backend has to fulfil; subclasses say where they run and how large the lists are."""

    geometries = GEOMETRIES
    lanes = 5

    @pytest.fixture(params=list(Backend))
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return request.param

    @pytest.fixture(params=list(Backend))
    def batch_invariant(self, request: pytest.FixtureRequest) -> Backend:
        """A backend whose results must not depend on what else is in the batch."""
        return request.param

    @pytest.mark.parametrize("index", range(len(GEOMETRIES)))
    def test_ragged_lists_against_float64(self, backend: Backend, index: int):
        """A full list, one record, an empty list, and one that ends within; NaN in everything that is unused."""
        g = self.geometries[index]
        case = make_case(np.random.default_rng(index), g, [g.width, 1, 0, g.width - 3], [640, 7, 0, 8000])
        found = run(case, backend)
        assert_close(found, case)
        np.testing.assert_array_equal(found[2], 0)

    def test_lengths_around_every_boundary(self, backend: Backend):
        g = self.geometries[0]
        counts = [-(-length // BLOCK) for length in LENGTHS]
        case = make_case(np.random.default_rng(1), g, counts, LENGTHS)
        assert_close(run(case, backend), case)

    def test_more_lanes_in_the_result_than_in_the_batch(self, backend: Backend):
        case = make_case(np.random.default_rng(7), self.geometries[0], [8, 3], [512, 130])
        with mosaic_interpreter() if backend is Backend.MOSAIC_GPU else contextlib.nullcontext():
            found = jax.block_until_ready(sparse_attention_decode(*arrays(case), result_lanes=8, backend=backend))
        assert found.shape[0] == 8
        np.testing.assert_array_equal(np.asarray(found)[:2], run(case, backend))

    def test_slot_numbers_do_not_change_the_bits(self, backend: Backend):
        rng = np.random.default_rng(2)
        case = make_case(rng, self.geometries[0], [8, 3], [512, 130])
        order = rng.permutation(len(case.slots))
        moved = Case(
            q=case.q,
            slots=case.slots[np.argsort(order)],
            slot_ids=np.where(case.slot_ids < 0, -1, order[case.slot_ids]).astype(np.int32),
            lengths=case.lengths,
        )
        np.testing.assert_array_equal(run(case, backend), run(moved, backend))

    def test_alone_and_in_a_batch_the_bits_are_equal(self, batch_invariant: Backend):
        g = self.geometries[0]
        counts = [g.width, g.width - 1, 0, 2, *[g.width] * (self.lanes - 4)]
        case = make_case(np.random.default_rng(3), g, counts, [512, 400, 0, 100, *range(449, 445 + self.lanes)])
        together = run(case, batch_invariant)
        for b in (0, 1, 3):
            np.testing.assert_array_equal(run(lane_of(case, b), batch_invariant)[0], together[b])

    @pytest.mark.parametrize("scale", [300, 1e6])
    def test_large_logits_do_not_overflow(self, backend: Backend, scale: float):
        """Logits from +-3000 on: the softmax is nearly one-hot, and exp of any of them alone would overflow."""
        case = make_case(np.random.default_rng(4), self.geometries[0], [5, 8], [300, 512])
        case.q[...] = (case.q.astype(np.float32) * scale).astype(BF16)
        found, expected = run(case, backend).astype(np.float64), attention_float64(case)
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2e-2)

    def test_equal_keys_give_the_mean_of_the_values(self, backend: Backend):
        case = make_case(np.random.default_rng(5), self.geometries[0], [3, 8], [150, 512])
        for b, h in np.ndindex(case.slot_ids.shape[:2]):
            listed = case.slot_ids[b, h][case.slot_ids[b, h] >= 0]
            case.slots[listed, :BLOCK] = case.slots[listed[0], :1]
        found, expected = run(case, backend).astype(np.float64), attention_float64(case)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize("kernels", [triton, mosaic_gpu], ids=["triton", "mosaic_gpu"])
    def test_more_parts_than_are_added_at_once(self, kernels: ModuleType):
        """As in lists of several hundred records: 37 parts. Only two are empty, or all, or all but one more than 16."""
        if kernels is mosaic_gpu:
            skip_without_hopper()
        g = Geometry(kv_heads=1, group=2, head_dim=64, width=37)
        case = make_case(np.random.default_rng(10), g, [35, 0, 17], [3000, 0, 1050])
        with mosaic_interpreter() if kernels is mosaic_gpu else contextlib.nullcontext():
            found = np.asarray(kernels.slot_attention(*arrays(case), part=1))
        assert_close(found, case)

    def test_golden(self, backend: Backend):
        """Dense over the first 2043 of 2048 keys, against the reference's own kernel."""
        step = load_golden("decode")
        records = np.full((64 * 2 + 5, 2 * BLOCK, 128), np.nan, BF16)
        slot_ids = np.random.default_rng(6).permutation(len(records))[: 2 * 2 * 32].reshape(2, 2, 32).astype(np.int32)
        for b, h in np.ndindex(2, 2):
            for half, name in enumerate(("k", "v")):
                tokens = np.full((2048, 128), np.nan, np.float32)
                tokens[:2043] = step[name][b, :2043, h]
                rows = slice(half * BLOCK, (half + 1) * BLOCK)
                records[slot_ids[b, h], rows] = tokens.reshape(32, BLOCK, 128)
        q = step["q"].reshape(2, 2, 16, 128).astype(BF16)
        case = Case(q=q, slots=records, slot_ids=slot_ids, lengths=np.full(2, 2043, np.int32))
        found = run(case, backend).astype(np.float32).reshape(2, 1, 32, 128)
        np.testing.assert_allclose(found, step["fa_kvcache"], rtol=2**-7, atol=0.002)


class TestInterpreted(DecodeAttention):
    """On the CPU: the reference as it is, the kernels interpreted."""

    def test_ctas_do_not_change_the_bits(self):
        """Six parts, the last of one record: all by one CTA, and by three CTAs.

        The first of these adds four parts, a run, itself. In the second list the last part takes a huge value of
        the part before away again, so that a sum in another order, or one that rounds elsewhere, shows in what remains.
        """
        g = Geometry(kv_heads=1, group=8, head_dim=64, width=11)
        case = make_case(np.random.default_rng(8), g, [11, 11], [698, 650])
        begin, end = case.slot_ids[1, 0, [8, 10]]
        case.slots[end, 0] = case.slots[begin, 0]
        case.slots[begin, BLOCK], case.slots[end, BLOCK] = 2**23, -(2**23)
        with mosaic_interpreter():
            one, three = (
                np.asarray(mosaic_gpu.slot_attention(*arrays(case), part=2, max_ctas=max_ctas)) for max_ctas in (2, 6)
            )
            # Lists that are longer than usual: two CTAs in place of one, and their runs in another order of CTAs.
            longer = np.asarray(mosaic_gpu.slot_attention(*arrays(case), part=2, max_ctas=2, usual=7))
        assert_close(one[:1], lane_of(case, 0))
        np.testing.assert_array_equal(one, three)
        np.testing.assert_array_equal(one, longer)


@pytest.mark.gpu
class TestCompiled(DecodeAttention):
    """On a GPU, with MiniCPM4.1's lists, and more of them than fit the GPU with a CTA for each part."""

    geometries = (MINICPM, *GEOMETRIES[1:])
    lanes = 20

    @pytest.fixture(params=list(Backend))
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        if request.param is Backend.MOSAIC_GPU:
            skip_without_hopper()
        return request.param

    @pytest.fixture(params=[Backend.TRITON, Backend.MOSAIC_GPU])
    def batch_invariant(self, request: pytest.FixtureRequest) -> Backend:
        if request.param is Backend.MOSAIC_GPU:
            skip_without_hopper()
        return request.param

    @pytest.mark.parametrize(
        "variant",
        [
            {"max_ctas": 64},
            {"max_ctas": 1024},
            {"max_ctas": 528, "stages": 2},
            {"usual": 48},
            {"usual": 1},
        ],
        ids=str,
    )
    def test_launches_do_not_change_the_bits(self, variant: dict):
        """From one CTA for half a list to one for each part, on 16 ragged lists."""
        skip_without_hopper()
        counts = [MINICPM.width] * 14 + [50, 0]
        case = make_case(np.random.default_rng(9), MINICPM, counts, [*range(6081, 6095), 3200, 0])
        plain = np.asarray(mosaic_gpu.slot_attention(*arrays(case)))
        assert_close(plain, case)
        for _ in range(20):
            np.testing.assert_array_equal(np.asarray(mosaic_gpu.slot_attention(*arrays(case), **variant)), plain)


@functools.cache
def float32_case() -> Case:
    return make_case(np.random.default_rng(7), GEOMETRIES[0], [8, 0, 3], [500, 0, 129], np.float32)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.TRITON, None])
def test_float32(backend: Backend | None):
    case = float32_case()
    found = sparse_attention_decode(*arrays(case), backend=backend)
    np.testing.assert_allclose(np.asarray(found), attention_float64(case), rtol=0, atol=1e-5)


def test_what_the_hopper_kernels_take():
    """On other operands the rule falls back to Triton, and naming the backend is an error."""
    shapes = {"q": (1, 2, 16, 128), "slots": (4, 2 * BLOCK, 128), "slot_ids": (1, 2, 8), "lengths": (1,)}

    def trace(changed: dict[str, tuple[int, ...]], dtype: type = BF16, backend: str | None = None) -> str:
        arguments = [
            jax.ShapeDtypeStruct(shape, dtype if name in ("q", "slots") else np.int32)
            for name, shape in (shapes | changed).items()
        ]
        with jax.sharding.use_abstract_mesh(H200):
            return str(jax.make_jaxpr(functools.partial(sparse_attention_decode, backend=backend))(*arguments))

    assert "mpmd_map" in trace({})
    group, head_dim, block = (1, 2, 17, 128), (1, 2, 16, 256), (4, BLOCK, 128)
    for changed, dtype in (
        ({}, np.float32),
        ({"q": group}, BF16),
        ({"q": head_dim, "slots": (4, 2 * BLOCK, 256)}, BF16),
        ({"slots": block}, BF16),
    ):
        program = trace(changed, dtype)
        assert "pallas_call" in program
        assert "mpmd_map" not in program
        with pytest.raises(ValueError, match="does not take these operands: use one of reference, triton"):
            trace(changed, dtype, "mosaic_gpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": np.zeros((4, 127, 128), BF16)}, "no records"),
        ({"slots": np.zeros((4, 128, 128), np.float32)}, "same dtype"),
        ({"slots": np.zeros((4, 128, 64), BF16)}, r"slots\[4, 128, 64\] has head_dim=64, and q has head_dim=128"),
        ({"slots": np.zeros((0, 128, 128), BF16)}, "slots must be at least 1"),
        ({"slots": np.zeros((4, 128), BF16)}, r"slots\[4, 128\] must have the axes \[slots, rows, head_dim\]"),
        ({"q": np.zeros((1, 2, 16, 128), np.int32)}, "q is int32: it must be a floating dtype"),
        ({"slot_ids": np.zeros((1, 1, 8), np.int32)}, "has kv_heads=1, and q has kv_heads=2"),
        ({"slot_ids": np.zeros((1, 2, 0), np.int32)}, "width must be at least 1"),
        ({"slot_ids": np.zeros((1, 2, 8), np.uint8)}, "slot_ids is uint8: it must be int32"),
        ({"lengths": np.ones(2, np.int32)}, r"lengths\[2\] has batch=2, and q has batch=1: they must be equal"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, np.ndarray], message: str):
    arguments = {
        "q": np.zeros((1, 2, 16, 128), BF16),
        "slots": np.zeros((4, 128, 128), BF16),
        "slot_ids": np.zeros((1, 2, 8), np.int32),
        "lengths": np.ones(1, np.int32),
    } | change
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(sparse_attention_decode)(**{name: jnp.asarray(x) for name, x in arguments.items()})
