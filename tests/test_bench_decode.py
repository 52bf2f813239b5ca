"""The decode benchmark on a toy model: it measures steps that miss what it says, between floors that add up."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import typer

from sparda_jax.bench import decode as bench
from sparda_jax.decode import Fetch
from tests.core.support import toy

CASE = bench.Case(way="sparda", batch=2, context=64 * 180, misses=2, spare_slots=2)


@pytest.mark.parametrize("way", ["sparda", "sparse", "infinigen"])
def test_steps_miss_what_is_asked_for(way: str) -> None:
    model = toy("deep").decoder
    seconds, compiling, missed = bench.measure(model, dataclasses.replace(CASE, way=way))
    assert missed == CASE.misses
    assert seconds > 0
    assert compiling > 0


def test_lists_are_ascending_and_hold_the_forced_blocks() -> None:
    config = toy("deep").config
    sparse = toy("deep").decoder.config.sparse
    blocks, start = 180, 179 * 64
    choose = bench.lists_with(2, toy("deep").decoder.config, blocks, start)
    width = sparse.num_selected_blocks
    lists = np.asarray(choose(1, jnp.array([start + 3, start + 9]), jnp.zeros((2, 2, width + 1), jnp.int32)))
    assert (lists[..., width] == -1).all()
    assert (np.diff(lists[..., :width]) > 0).all()
    forced = {*range(sparse.init_blocks), *range(blocks - 1 - sparse.local_blocks, blocks)}
    assert all(forced < set(row) for row in lists[..., :width].reshape(-1, width).tolist())
    assert config["num_hidden_layers"] == 3
    with pytest.raises(typer.BadParameter, match="--misses 9"):
        bench.lists_with(9, toy("deep").decoder.config, blocks, start)


def test_floors_of_the_8b_shape() -> None:
    """15.8 GB of weights; for each lane, head and layer 96 records and 2 MB of keys read, and 10 records copied."""
    hbm, copies = bench.floors(
        bench.SHAPES["minicpm4.1-8b"], bench.Case(way="sparda", batch=16, context=131072, misses=10)
    )
    assert hbm == pytest.approx((15.83e9 + 32 * 16 * 2 * (96 * 32768 + 2.097e6)) / 4.3e12, rel=0.005)
    assert copies == pytest.approx(31 * 16 * 2 * 10 * 32768 / 54e9)


def test_ways_are_what_they_are_called() -> None:
    assert {name: fetch for name, (_, fetch) in bench.WAYS.items()} == {
        "sparda": Fetch.AHEAD,
        "sparda, in turn": Fetch.IN_TURN,
        "sparse": Fetch.IN_TURN,
        "infinigen": Fetch.AHEAD,
    }
