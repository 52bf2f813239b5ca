"""The prefill benchmark on a toy model: whole prompts, parts, floors that add up, selections that overlap as asked."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from sparda_jax.bench import prefill as bench
from sparda_jax.bench.__main__ import app
from sparda_jax.bench._prefill_cases import FLOPS_PER_SECOND, Overlap, work
from sparda_jax.bench._prefill_parts import parts
from sparda_jax.pallas_kernels.block_selection import bits_to_mask, mask_to_bits
from sparda_jax.selection import Mode
from tests.core.support import toy

SHAPE = bench.SHAPES["minicpm4.1-8b"]


def test_a_prompt_is_prefilled_and_counted() -> None:
    model = bench.random_model(toy().decoder.config, has_forecast=True, dtype=jnp.float32)
    case = bench.Case(mode=Mode.SPARDA, batch=2, capacity=1024, chunk=128, overlap=None)
    program = bench.Prefill(model, case)
    assert program.compile() > 0
    found = program.measure(600)
    assert found.tokens == 1200
    assert len(found.chunks) == 5
    assert found.seconds == pytest.approx(sum(found.chunks))
    # Blocks 0 to 9, of which tokens behind the sixth block read six; the last one has 24 tokens.
    visible = 64 * sum(range(1, 10)) + 24 * 10
    assert found.read == pytest.approx((64 * (21 + 6 * 3) + 24 * 6) / visible)
    row = bench._row(model.config, case, 600, found, 1.0, whole=False)
    assert row.value == pytest.approx(1200 / found.seconds)
    assert row.target is None
    late = program.measure(600, until=time.perf_counter())
    assert 0 < late.tokens < 1200
    assert bench._row(model.config, case, 600, late, 1.0, whole=True).value is None
    with pytest.raises(ValueError, match="length=1025 must not exceed the cache's capacity=1024"):
        program.measure(1025)


@pytest.mark.slow
def test_parts_of_a_layer() -> None:
    rows = [*parts(toy().decoder, [Mode.SPARDA, Mode.DENSE], 1024, 128, [50])]
    assert [row.name for row in rows] == ["products and MLP", *["selection, sparda", "attention", "attention"] * 3]
    assert all(row.value and row.floor and row.unit == "ms" for row in rows)
    assert [row.settings["end"] for row in rows[1::3]] == [256, 512, 1024]
    assert [row.settings["overlap"] for row in rows[-2:]] == ["50 %", "all"]


@pytest.mark.parametrize(("percent", "least", "most"), [(0, 0, 6), (90, 88, 92), (100, 99, 100)])
def test_neighbours_share_what_is_asked_for(percent: float, least: float, most: float) -> None:
    """Deep in a sequence, where a random block is rarely the same."""
    positions = 64 * 1900 + jnp.arange(256)[None]
    real = np.zeros((1, 2, 256, 2048), bool)
    real[:, :, :250, 0] = True
    choose = jax.jit(Overlap(config=SHAPE, percent=percent))
    bits = choose(positions, mask_to_bits(jnp.asarray(real)))
    mask, own = np.asarray(bits_to_mask(bits, 2048))[0], np.asarray(positions)[0] // 64
    assert not mask[:, 250:].any()
    mask = mask[:, :250]
    assert (mask.sum(axis=-1) == 96).all()
    for token in range(250):
        assert mask[:, token, 0].all()
        assert mask[:, token, own[token] - 32 : own[token] + 1].all()
        assert not mask[:, token, own[token] + 1 :].any()
    within = mask[:, 1:64, 1 : own[0] - 32] & mask[:, :63, 1 : own[0] - 32]
    assert least <= 100 * within.sum(axis=-1).mean() / 62 <= most
    # Where everything is selected, the selection stays.
    early = choose(positions % 64, mask_to_bits(jnp.asarray(real)))
    np.testing.assert_array_equal(np.asarray(bits_to_mask(early, 2048)), real)


def test_floors_of_the_8b_shape() -> None:
    """Weights of 7.6 billion; two operations each, and four for each channel of a head and key."""
    sparda, sparse, dense = (work(SHAPE, mode, 0, 131072) for mode in (Mode.SPARDA, Mode.SPARSE, Mode.DENSE))
    assert sparda.products == pytest.approx(2 * 131072 * 32 * 4096 * ((64 + 6) * 128 + 3 * 16384))
    assert sparse.products < sparda.products < 1.01 * sparse.products
    assert dense.attention == pytest.approx(32 * 4 * 32 * 128 * 131072**2 / 2, rel=1e-4)
    assert sparda.attention == sparse.attention == pytest.approx(32 * 4 * 32 * 128 * 131072 * 6112, rel=0.03)
    assert sparse.selection == 16 * sparda.selection == pytest.approx(32 * 2 * 32 * 128 * 131072**2 / 32, rel=1e-4)
    assert dense.selection == 0
    assert sparda.seconds == (sparda.products + sparda.selection + sparda.attention) / FLOPS_PER_SECOND
    halves = [work(SHAPE, Mode.SPARDA, begin, begin + 65536) for begin in (0, 65536)]
    for field in dataclasses.fields(sparda):
        together = sum(getattr(half, field.name) for half in halves)
        assert together == pytest.approx(getattr(sparda, field.name))


def test_without_a_gpu_it_says_so() -> None:
    done = CliRunner().invoke(app, ["prefill"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "needs an NVIDIA GPU, and JAX sees none here" in done.output
