"""The decode benchmark on a toy model: it measures steps that miss what it says, between floors that add up."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from sparda_jax.bench import _decode_cases as cases
from sparda_jax.bench import _decode_steps as steps
from sparda_jax.bench._step_profile import ProfileError, read_profile
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.config import SparseConfig
from sparda_jax.decode_plan import Fetch
from sparda_jax.shapes import SHAPES
from tests.core.support import toy

CASE = cases.Case(way="sparda", batch=2, context=64 * 180, misses=2)


@pytest.mark.parametrize("way", ["sparda", "sparse", "infinigen"])
def test_steps_miss_what_is_asked_for(way: str, tmp_path: Path) -> None:
    model = toy("deep").decoder
    profile = tmp_path / "profile" if way == "sparda" else None
    found = steps.measure(model, dataclasses.replace(CASE, way=way), profile=profile)
    if profile:  # is written, and shows no GPU here
        with pytest.raises(ProfileError, match="shows 0 GPUs"):
            read_profile(profile)
    width = model.config.sparse.num_selected_blocks
    assert found.misses == found.settings()["misses"] == CASE.misses
    assert found.stats.hit_rate == pytest.approx(1 - found.misses / width)
    assert found.stats.steps == cases.SAMPLES * cases.STEPS
    assert found.stats.launches == cases.SAMPLES * (cases.STEPS - 1)
    assert found.resident is not None
    assert found.settings()["exposed_wait_ms"] == round(1e3 * (found.seconds - found.resident), 3)
    assert min(found.seconds, found.resident, found.compiling) > 0
    assert found.compared is None


def test_a_step_compiled_from_shapes_takes_its_pools_for_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Traced(Exception):
        pass

    def spy(
        graphdef: object, plan: object, weights: object, state: object, pools: tuple, *rest: object, **more: object
    ):
        raise Traced(*(jax.typeof(pool).memory_space for pool in pools))

    monkeypatch.setattr(steps, "step_and_sample", spy)
    with pytest.raises(Traced) as traced:
        steps.compile_step(toy("deep").decoder, CASE)
    assert traced.value.args == (jax.memory.Space.Host,) * 3


def test_natural_misses_are_those_of_the_selection() -> None:
    model = toy("deep").decoder
    sparse, compared_heads = model.config.sparse, 2 * model.config.num_kv_heads
    found = steps.measure(model, dataclasses.replace(CASE, misses=None))
    assert found.compared is not None
    assert 0 < found.misses < sparse.num_selected_blocks
    assert found.compared.steps == cases.WARMUP
    free = sparse.num_selected_blocks - sparse.init_blocks - sparse.local_blocks - 1
    assert (found.compared.picked.sum(1) == cases.WARMUP * compared_heads * free).all()
    # Two of 180 blocks, chosen by random queries: hardly any is the same.
    assert found.settings()["recall"] < 0.5 < found.settings()["wasted"] <= 1


def test_dense_steps_miss_all_but_the_tail() -> None:
    found = steps.measure(toy("deep").decoder, cases.Case(way="dense", batch=2, context=64 * 20, misses=2))
    assert found.misses == 19
    assert found.stats.hit_rate == pytest.approx(1 / 20)
    assert found.stats.steps == cases.SAMPLES * cases.STREAMED_STEPS
    assert found.resident is found.compared is found.settings()["exposed_wait_ms"] is None


def window(sparse: SparseConfig, blocks: int, begin: int) -> set[int]:
    """So many blocks from the one that is ``begin`` behind the first free one, which follows the last free one."""
    free = [*range(sparse.init_blocks, blocks - 1 - sparse.local_blocks)]
    width = sparse.num_selected_blocks - sparse.init_blocks - sparse.local_blocks - 1
    return {free[(begin + place) % len(free)] for place in range(width)}


@pytest.mark.parametrize("misses", [2, 9, 0.4])
def test_lists_are_ascending_and_hold_the_forced_blocks_and_a_window(misses: float) -> None:
    config = toy("deep").decoder.config
    sparse = config.sparse
    blocks, start = 180, 179 * 64
    choose = cases.lists_with(misses, config, blocks, start)
    width = sparse.num_selected_blocks
    forced = {*range(sparse.init_blocks), *range(blocks - 1 - sparse.local_blocks, blocks)}
    moved = []
    for step in range(56):
        position = jnp.array([start + step, start + max(step - 3, 0)])
        lists = np.asarray(choose(1, position, jnp.zeros((2, 2, width + 1), jnp.int32)))
        assert (lists[..., width] == -1).all()
        assert (np.diff(lists[..., :width]) > 0).all()
        for lane, head in np.ndindex(2, 2):
            number = 89 + 37 * lane + 17 * head
            moved.append(math.floor(max(step - 3 * lane, 0) * misses + number % 64 / 64))
            assert {*lists[lane, head, :width].tolist()} == forced | window(sparse, blocks, number + moved[-1])
    # Whole blocks are whole, and of parts not every list takes its own at the same step.
    assert moved[-1] == pytest.approx(52 * misses, abs=1)


def test_misses_that_the_slots_would_hold_are_refused() -> None:
    config = toy("deep").decoder.config
    sparse = config.sparse
    span = 100 - 1 - sparse.local_blocks - sparse.init_blocks
    case = dataclasses.replace(CASE, context=6400, misses=2, slots=span)
    cases.check_misses(case, config)
    cases.check_misses(dataclasses.replace(case, misses=1, slots=100), config)  # never comes back
    for slots in (span + 1, 100):
        with pytest.raises(typer.BadParameter, match=f"--misses 2: .* {slots} slots"):
            cases.check_misses(dataclasses.replace(case, slots=slots), config)
    cases.check_misses(dataclasses.replace(case, misses=None, slots=100), config)
    with pytest.raises(typer.BadParameter, match="--misses 3: of a selection only 2 blocks are free"):
        cases.check_misses(dataclasses.replace(case, misses=3), config)


def test_cases_that_differ_in_slots_in_use_and_misses_share_a_program() -> None:
    """In 56 steps of 2 blocks the window comes back; the case with few slots is measured in the room of the other."""
    model = toy("deep").decoder
    few = cases.Case(way="sparda", batch=2, context=64 * 100, misses=2)
    slots = few.slots_per_lane(model.config)
    room = slots + 20
    program = steps.compile_step(model, dataclasses.replace(few, slots=room))
    for case in (dataclasses.replace(few, room=room), dataclasses.replace(few, misses=1.25, slots=room)):
        found = steps.measure(model, case, program=program)
        assert found.misses == pytest.approx(case.misses, abs=0.01)
        assert found.compiling == program.seconds


@pytest.mark.slow
def test_slots_that_there_is_only_room_for_hold_nothing() -> None:
    model = toy("deep").decoder
    natural = cases.Case(way="sparda", batch=2, context=64 * 100, misses=None)
    room = natural.slots_per_lane(model.config) + 20
    alone, roomy = (steps.measure(model, case).misses for case in (natural, dataclasses.replace(natural, room=room)))
    assert alone == roomy > steps.measure(model, dataclasses.replace(natural, slots=room)).misses


def test_floors_of_the_8b_shape() -> None:
    """15.8 GB of weights; for each lane, head and layer 96 records and 2 MB of keys read, and 10 records copied."""
    hbm, copies = cases.floors(SHAPES["minicpm4.1-8b"], cases.Case(way="sparda", batch=16, context=131072, misses=10))
    assert hbm == pytest.approx((15.83e9 + 32 * 16 * 2 * (96 * 32768 + 2.097e6)) / 4.3e12, rel=0.005)
    assert copies == pytest.approx(31 * 16 * 2 * 10 * 32768 / 54e9)


def test_packed_records_halve_the_floor_of_the_copies() -> None:
    case = cases.Case(way="sparda", batch=16, context=131072, misses=10, kv_host_dtype=KvHostDtype.INT8)
    hbm, copies = cases.floors(SHAPES["minicpm4.1-8b"], case)
    assert copies == pytest.approx(31 * 16 * 2 * 10 * (16384 + 512) / 54e9)
    exact = dataclasses.replace(case, kv_host_dtype=KvHostDtype.AUTO)
    assert hbm == cases.floors(SHAPES["minicpm4.1-8b"], exact)[0]


def test_steps_over_packed_records_miss_what_is_asked_for() -> None:
    model = toy("deep").decoder
    found = steps.measure(model, dataclasses.replace(CASE, kv_host_dtype=KvHostDtype.FP8))
    assert found.misses == CASE.misses
    # 128 rows of 16: 32 rows of words, and 8 of scales.
    assert found.stats.record_bytes == 40 * 16 * 4


def test_floors_of_dense_are_whole_layers() -> None:
    case = cases.Case(way="dense", batch=4, context=131072, misses=2047)
    hbm, copies = cases.floors(SHAPES["minicpm4.1-8b"], case)
    assert hbm == pytest.approx((15.83e9 + 32 * 4 * 2 * 2048 * 32768) / 4.3e12, rel=0.005)
    assert copies == pytest.approx(31 * 4 * 2 * 2047 * 32768 / 54e9)


def test_ways_are_what_they_are_called() -> None:
    assert {name: fetch for name, (_, fetch) in cases.WAYS.items()} == {
        "sparda": Fetch.AHEAD,
        "sparda, in turn": Fetch.IN_TURN,
        "sparse": Fetch.IN_TURN,
        "infinigen": Fetch.AHEAD,
        "dense": Fetch.STREAM,
    }


@pytest.mark.slow
def test_with_a_slot_for_every_block_nothing_is_fetched() -> None:
    found = steps.measure(toy("deep").decoder, dataclasses.replace(CASE, misses=None, slots=180))
    assert found.misses == found.stats.copied.sum() == 0
    assert found.stats.hit_rate == 1
