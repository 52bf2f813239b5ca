"""Block selection in prefill: the definition, the Triton kernels, sets as bits, and the published selection."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.pallas_kernels.block_selection import (
    Scorer,
    bits_to_ids,
    bits_to_mask,
    mask_to_bits,
    select_blocks_prefill,
)
from sparda_jax.pallas_kernels.block_selection.triton_prefill_top import top_bits
from tests.kernels.prefill_select_cases import Geometry, exact_choice
from tests.kernels.prefill_select_suite import SelectBlocksPrefill, SelectBlocksPrefillCompiled
from tests.oracle.golden import allowed_by_ties, load_golden, tie_rows


class TestReference(SelectBlocksPrefill):
    backend = "reference"


class TestTriton(SelectBlocksPrefill):
    backend = "triton"


@pytest.mark.gpu
class TestTritonCompiled(SelectBlocksPrefillCompiled):
    backend = "triton"


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("blocks", "num_selected"), [(70, 12), pytest.param(300, 80, marks=pytest.mark.slow), (40, 4)])
def test_the_choice_from_given_scores(blocks: int, num_selected: int, parts: int):
    """Ties, infinities, signed zeros and one level; what does not compete is NaN."""
    rng = np.random.default_rng(blocks)
    normal = rng.standard_normal((11, blocks)).astype(np.float32)
    g = Geometry(q_len=11, group=1, head_dim=64, windows=4 * blocks, num_selected=num_selected)
    contents = (
        normal[0],
        np.round(normal[1]),
        np.full(blocks, 0.5),
        np.where(normal[3] > 0, 0.0, -0.0),
        np.where(normal[4] > 1, np.inf, normal[4]),
        np.where(normal[5] > 0, -np.inf, normal[5]),
        np.full(blocks, -np.inf),
        np.full(blocks, np.inf),
        normal[8] * 1e-30,
        np.clip(normal[9], -3, 3) * 1e38,
        -np.abs(normal[10]),
    )
    scores = np.stack(contents).astype(np.float32)
    for own in (blocks - 1, blocks - 2, num_selected, num_selected - 1, 0):
        ids = np.arange(blocks)
        given = np.where((ids >= 1) & (ids < own - 2), scores, np.nan)
        parts_given = given
        if parts == 2:
            lower, later = np.where(np.isnan(given), np.nan, -np.inf), rng.random(given.shape) < 0.5
            after = np.pad(np.where(later, given, lower), ((0, 0), (1, 0)), constant_values=np.nan)[:, :-1]
            parts_given = np.stack([np.where(later, lower, given), after])
        operands = jnp.asarray(parts_given, jnp.float32).reshape(1, 1, parts, 11, blocks), *tokens(64 * own, 11)
        bits = top_bits(*operands, **g.limits)
        found = np.asarray(bits_to_mask(bits.astype(jnp.uint32), blocks))[0, 0]
        for row in range(11):
            expected = exact_choice(np.nan_to_num(given[row, : own + 1], nan=0, posinf=np.inf, neginf=-np.inf), g)
            np.testing.assert_array_equal(found[row, : own + 1], expected)
            assert not found[row, own + 1 :].any()


def tokens(start: int, num_new: int) -> tuple[jnp.ndarray, ...]:
    return tuple(jnp.full(1, n, jnp.int32) for n in (start, num_new, 0))


def test_sets_as_bits():
    mask = np.random.default_rng(0).random((3, 5, 70)) < 0.3
    bits = mask_to_bits(jnp.asarray(mask))
    assert bits.shape == (3, 5, 3)
    assert bits.dtype == jnp.uint32
    np.testing.assert_array_equal(np.asarray(bits_to_mask(bits, 70)), mask)
    for width in (70, 100, 20):
        ids = np.asarray(bits_to_ids(bits, width))
        for row in np.ndindex(3, 5):
            expected = np.flatnonzero(mask[row])[:width]
            np.testing.assert_array_equal(ids[row], np.pad(expected, (0, width - len(expected)), constant_values=-1))


@pytest.mark.parametrize(("kind", "scorer"), [("g16", Scorer.INFLLM), ("sparda", Scorer.FORECAST)])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_golden_prefill(kind: str, scorer: Scorer, backend: str):
    """The published kernels' own prefill of 1000 tokens: their choice where it neither ties nor goes to the future."""
    golden, rows = load_golden("prefill_T1000"), np.arange(1000)
    pooled, expected = golden[f"pooled_{kind}"], golden[f"topk_{kind}"]
    keys = np.pad(golden["compressed_k"].swapaxes(0, 1), ((0, 0), (0, 3), (0, 0)), constant_values=np.nan)[None]
    if scorer is Scorer.FORECAST:
        queries = golden["q_forecast"][:, :, None]
    else:
        rows = golden["q_rows"]
        queries = np.full((1000, 2, 16, 128), np.nan, np.float32)
        queries[rows] = golden["q"].reshape(-1, 2, 16, 128)
    limits = {"init_blocks": 1, "local_blocks": 2, "num_selected": 6}
    operands = jnp.asarray(queries, jnp.bfloat16)[None], jnp.asarray(keys, jnp.bfloat16), *tokens(0, 1000)[:2]
    bits = select_blocks_prefill(*operands, scorer=scorer, backend=backend, **limits)
    ids, query_block = np.asarray(bits_to_ids(bits, 6))[0][:, rows], rows // 64
    pooled = np.where(np.arange(pooled.shape[-1]) > query_block[:, None], -np.inf, pooled[:, rows])
    assert ((ids >= 0).sum(axis=-1) == np.minimum(query_block + 1, 6)).all()
    assert allowed_by_ties(pooled, ids, query_block, 6).mean() > 0.98
    full = (expected[:, rows] >= 0).sum(axis=-1) == np.minimum(query_block + 1, 6)
    settled = ~(tie_rows(pooled, 6) & (query_block >= 6)) & full
    assert settled.mean() > 0.75
    assert (ids == expected[:, rows])[settled].all(axis=-1).mean() > 0.98


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": np.zeros((1, 5, 2, 1, 64), np.float16)}, "queries are float16 and compressed_k float32"),
        ({"compressed_k": np.zeros((1, 3, 8, 64), np.float32)}, "has kv_heads=3, and queries has kv_heads=2"),
        ({"start": np.zeros(2, np.int32)}, r"start\[2\] has batch=2, and queries has batch=1"),
        ({"num_new": np.zeros(1, np.float32)}, "num_new is float32: it must be int32"),
        ({"local_blocks": 0}, "local_blocks=0 must be at least 1"),
        ({"num_selected": 2}, "num_selected=2 must hold the 3 blocks that are always selected"),
        ({"queries": np.zeros((1, 5, 2, 3, 64), np.float32)}, "not a group of 3: use infllm"),
        ({"scorer": "cosine"}, "scorer='cosine' is unknown: use one of forecast, infllm"),
        ({"backend": "triton"}, "backend='triton' of block_selection does not take these operands: use one of ref"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {
        "queries": np.zeros((1, 5, 2, 1, 64), np.float32),
        "compressed_k": np.zeros((1, 2, 8, 64), np.float32),
        "start": np.zeros(1, np.int32),
        "num_new": np.zeros(1, np.int32),
        "scorer": Scorer.FORECAST,
        "init_blocks": 1,
        "local_blocks": 1,
        "num_selected": 4,
    }
    arguments |= change
    operands = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(select_blocks_prefill)(**operands)
