"""What lies between two layers' attention, against float64; with --gpu in one kernel and at the 8B model's sizes.

On a CPU the kernel's parts are interpreted one by one, since the interpreter has no semaphores.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sparda_jax.pallas_kernels.backend import Backend, mosaic_interpreter
from sparda_jax.pallas_kernels.between_attentions import (
    LayerWeights,
    between_attentions,
    between_backend,
    from_features,
    padded_rows,
    to_features,
)
from tests.kernels.test_sparse_attention_decode import skip_without_hopper

EPS, SCALE = 1e-5, 0.3
BACKENDS = [Backend.REFERENCE, Backend.MOSAIC_GPU]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    hidden: int
    intermediate: int
    heads: tuple[int, int, int, int]


# Products with several parts and with one, and heads of each kind.
SMALL = Sizes(hidden=256, intermediate=384, heads=(2, 1, 1, 1))
LARGE = Sizes(hidden=4096, intermediate=16384, heads=(32, 2, 2, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    attended: jax.Array
    x: jax.Array
    weights: LayerWeights
    cos: jax.Array
    sin: jax.Array
    sizes: Sizes

    def run(self, backend: Backend) -> tuple[np.ndarray, list[np.ndarray]]:
        """The stream, lane by lane, and q, k, v and the Forecast; NaN in the rows that stand for no lane."""
        batch = self.x.shape[0]

        def padded(x: jax.Array) -> jax.Array:
            rows = to_features(x)
            return rows.at[:, batch:].set(jnp.nan)

        with mosaic_interpreter():
            stream, qkvf = between_attentions(
                padded(self.attended).T,
                padded(self.x),
                self.weights,
                padded(self.cos),
                padded(self.sin),
                batch=batch,
                heads=self.sizes.heads,
                eps=EPS,
                residual_scale=SCALE,
                backend=backend,
            )
            stream, qkvf = jax.block_until_ready((stream, qkvf))
        return np.asarray(from_features(stream, batch)), [np.asarray(x) for x in qkvf]


def make_case(sizes: Sizes, batch: int, seed: int, *, last: bool = False) -> Case:
    keys = iter(jax.random.split(jax.random.key(seed), 10))

    def bf16(*shape: int, scale: float = 1.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * scale).astype(jnp.bfloat16)

    hidden, inner, attended = sizes.hidden, sizes.intermediate, sizes.heads[0] * 128
    weights = LayerWeights(
        output=bf16(attended, hidden, scale=attended**-0.5),
        mlp_norm=bf16(hidden),
        gate_up=bf16(hidden, 2 * inner, scale=hidden**-0.5),
        down=bf16(inner, hidden, scale=inner**-0.5),
        attention_norm=None if last else bf16(hidden),
        qkvf=None if last else bf16(hidden, sum(sizes.heads) * 128, scale=hidden**-0.5),
    )
    angle = jax.random.uniform(next(keys), (batch, 64)) * 6
    return Case(
        attended=bf16(batch, attended),
        x=bf16(batch, hidden),
        weights=weights,
        cos=jnp.cos(angle),
        sin=jnp.sin(angle),
        sizes=sizes,
    )


def float64(case: Case) -> tuple[np.ndarray, list[np.ndarray]]:
    """The definition without any rounding."""

    def wide(x: jax.Array | None) -> np.ndarray:
        return np.asarray(x).astype(np.float64)

    def norm(x: np.ndarray, weight: jax.Array | None) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * wide(weight)

    w = case.weights
    x = wide(case.x) + SCALE * (wide(case.attended) @ wide(w.output))
    gate, up = np.split(norm(x, w.mlp_norm) @ wide(w.gate_up), 2, axis=-1)
    x = x + SCALE * ((gate / (1 + np.exp(-gate)) * up) @ wide(w.down))
    if w.qkvf is None:
        return x, []
    heads = (norm(x, w.attention_norm) @ wide(w.qkvf)).reshape(len(x), -1, 128)
    first, second = heads[..., :64], heads[..., 64:]
    cos, sin = wide(case.cos)[:, None], wide(case.sin)[:, None]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    ends = np.cumsum(case.sizes.heads)[:-1]
    q, k, _, f = np.split(turned, ends, axis=1)
    return x, [q, k, np.split(heads, ends, axis=1)[2], f]


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """As near as a few roundings to bf16 on the way permit."""
    assert found.dtype == ml_dtypes.bfloat16
    assert found.shape == expected.shape
    error = np.abs(found.astype(np.float64) - expected)
    assert np.max(error) <= 0.02 * np.max(np.abs(expected))
    assert np.mean(error) <= 0.006 * np.mean(np.abs(expected))


def check(case: Case, backend: Backend) -> None:
    stream, qkvf = case.run(backend)
    expected, expected_qkvf = float64(case)
    assert_close(stream, expected)
    assert len(qkvf) == len(expected_qkvf)
    for found, wanted in zip(qkvf, expected_qkvf, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(backend: Backend) -> None:
    """Three lanes in eight rows, the others NaN."""
    skip_without_hopper()
    check(make_case(SMALL, 3, 0), backend)


@pytest.mark.parametrize("backend", [Backend.REFERENCE, pytest.param(Backend.MOSAIC_GPU, marks=pytest.mark.slow)])
def test_behind_the_last_layer_there_are_no_projections(backend: Backend) -> None:
    skip_without_hopper()
    check(make_case(SMALL, 9, 1, last=True), backend)


@pytest.mark.slow
def test_a_lane_does_not_depend_on_the_others() -> None:
    skip_without_hopper()
    case = make_case(SMALL, 3, 2)
    others = dataclasses.replace(case, attended=case.attended.at[1:].set(jnp.nan), x=case.x.at[1:].set(jnp.inf))
    for found, same in zip(
        jax.tree.leaves(case.run(Backend.MOSAIC_GPU)), jax.tree.leaves(others.run(Backend.MOSAIC_GPU)), strict=True
    ):
        np.testing.assert_array_equal(found[0], same[0])


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4, 9, 16])
def test_the_8b_layer_in_one_kernel(batch: int) -> None:
    """Again and again, since what CTAs pass on to each other could come too late once in a while."""
    skip_without_hopper()
    case = make_case(LARGE, batch, batch)
    check(case, Backend.MOSAIC_GPU)
    first = jax.tree.leaves(case.run(Backend.MOSAIC_GPU))
    for _ in range(20):
        for found, same in zip(jax.tree.leaves(case.run(Backend.MOSAIC_GPU)), first, strict=True):
            np.testing.assert_array_equal(found, same)


def test_features_and_rows() -> None:
    x = jnp.arange(15.0).reshape(3, 5)
    assert [padded_rows(batch) for batch in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert to_features(x).shape == (5, 8)
    np.testing.assert_array_equal(from_features(to_features(x), 3), x)


def chosen(sizes: Sizes, batch: int, dtype: jnp.dtype = jnp.bfloat16) -> Backend:
    case = make_case(sizes, 1, 0)
    weights = jax.tree.map(lambda x: x.astype(dtype), case.weights)
    with mosaic_interpreter():
        return between_backend(weights, batch, sizes.heads)


def test_the_kernel_takes_small_batches_in_bf16() -> None:
    assert between_backend(make_case(SMALL, 1, 0).weights, 1, SMALL.heads) is (
        Backend.REFERENCE if jax.default_backend() == "cpu" else Backend.MOSAIC_GPU
    )
    assert chosen(SMALL, 1) is Backend.MOSAIC_GPU
    assert chosen(SMALL, 16) is Backend.MOSAIC_GPU
    assert chosen(SMALL, 17) is Backend.REFERENCE
    assert chosen(SMALL, 1, jnp.float32) is Backend.REFERENCE
    # 130 heads would need 130 CTAs at once.
    assert chosen(dataclasses.replace(SMALL, heads=(2, 64, 63, 1)), 1) is Backend.REFERENCE


def test_the_kernel_shares_no_gpu_with_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert chosen(SMALL, 1) is Backend.MOSAIC_GPU
    (tmp_path / "control").touch()
    assert chosen(SMALL, 1) is Backend.REFERENCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"x": case.x[:, :128]}, "hidden"),
        (lambda case: {"attended": case.attended[:, :128]}, "attended"),
        (lambda case: {"sizes": dataclasses.replace(case.sizes, heads=(2, 1, 1, 2))}, "does not have the columns"),
    ],
)
def test_operands_that_do_not_fit(change, message: str) -> None:
    case = make_case(SMALL, 2, 0)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(case, **change(case)).run(Backend.REFERENCE)


def test_a_batch_that_the_rows_do_not_hold() -> None:
    case = make_case(SMALL, 2, 0)
    with pytest.raises(ValueError, match="rows=16"):
        between_attentions(
            to_features(case.attended).T,
            to_features(case.x),
            case.weights,
            to_features(case.cos),
            to_features(case.sin),
            batch=9,
            heads=SMALL.heads,
            eps=EPS,
            residual_scale=SCALE,
        )
