"""The map benchmark: which points a machine holds, what they miss, where a step's time goes, and rows of a toy."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from sparda_jax.bench import map as bench
from sparda_jax.bench.__main__ import app
from sparda_jax.bench._decode_cases import Case
from sparda_jax.bench._map_parts import step_time
from sparda_jax.bench._map_points import Curve, Point, capacity, demand_of, points
from sparda_jax.bench._report import write_json
from sparda_jax.bench._step_profile import Event, Kind
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.cache.pinning import GIB
from sparda_jax.machine import Bound, Limits
from sparda_jax.model import Decoder
from sparda_jax.shapes import SHAPES
from tests.core.support import toy
from tests.test_bench_step import made

CONFIG = SHAPES["minicpm4.1-8b"]
HIT_RATES = Path(__file__).parents[1] / "docs" / "results" / "hit-rates.json"


def limits(device: float, host: float) -> Limits:
    """Of a machine with so many GiB."""
    return Limits(
        device=Bound(bytes=int(device * GIB), source="a test"), host=(Bound(bytes=int(host * GIB), source="a test"),)
    )


def test_points_of_the_8b_shape() -> None:
    """Beside 128 GiB of host memory 28 sequences of 128K fit; of them not every block has a slot in 132 GiB."""
    curve = Curve.read(HIT_RATES, "sparda")
    for batch, most in ((16, 2048), (28, 1804)):
        demand = demand_of(CONFIG, "sparda", 131072, batch)
        found = list(points(demand, "sparda", ["least", "2x", "auto"], 10, curve, limits(132, 127)))
        assert [(point.slots, point.case.slots, point.case.room) for point in found if isinstance(point, Point)] == [
            ("least", 160, 320), ("2x", 320, 320), ("auto", most, None)
        ]  # fmt: skip
        misses = [point.case.misses for point in found if isinstance(point, Point)]
        assert misses[0] == 10
        # Of the file: 24 slots for 24 blocks miss 4.62, 36 1.85, 48 0.86 and 96 0.1.
        share = {1.5: 1.85 / 24, 2: 0.863 / 24, 4: 0.101 / 24}
        at_160 = share[1.5] + (share[2] - share[1.5]) * (160 / 96 - 1.5) / 0.5
        at_320 = share[2] + (share[4] - share[2]) * (320 / 96 - 2) / 2
        assert misses[1] == pytest.approx(10 * at_320 / at_160, rel=0.01)
        assert misses[2] == 0
    (left_out,) = points(demand_of(CONFIG, "sparda", 131072, 32), "sparda", ["least"], 10, curve, limits(132, 127))
    assert isinstance(left_out, str)
    assert "batch 32, 160 slots (least): host memory" in left_out
    (left_out,) = points(demand_of(CONFIG, "sparda", 131072, 16), "sparda", ["1900"], 10, curve, limits(75, 127))
    assert isinstance(left_out, str)
    assert "1900 slots (1900): device memory" in left_out
    (left_out,) = points(demand_of(CONFIG, "sparda", 131072, 1), "sparda", ["100"], 10, curve, limits(75, 127))
    assert left_out == "sparda, 131072 tokens, batch 1, 100 slots (100): a step needs 128"


def test_packed_records_double_the_sequences() -> None:
    kept = KvHostDtype.INT8
    (point,) = points(demand_of(CONFIG, "sparda", 131072, 55, kept), "sparda", ["least"], 10, None, limits(132, 127))
    assert isinstance(point, Point)
    assert (point.case.kv_host_dtype, point.case.slots) == (kept, 160)
    assert capacity(demand_of(CONFIG, "sparda", 131072, 1, kept), "sparda", limits(132, 127)).most == 55


def test_a_context_that_no_server_has_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="--context 1 with --batch 1: "):
        demand_of(CONFIG, "sparda", 1, 1)


def test_slots_that_are_the_same_are_one_point_and_the_largest_shares_nothing() -> None:
    demand = demand_of(CONFIG, "sparse", 16384, 1)
    found = list(points(demand, "sparse", ["least", "auto", "256", "2x", "200"], 4, None, limits(75, 64)))
    # A sequence of 16K has 256 blocks.
    assert [(point.slots, point.case.slots, point.case.room) for point in found if isinstance(point, Point)] == [
        ("least", 160, 200), ("auto", 256, None), ("200", 200, 200)
    ]  # fmt: skip
    assert [point.case.misses for point in found if isinstance(point, Point)] == [4, 0, 4]


def test_texts_that_miss_nothing_with_the_least_slots() -> None:
    found = points(
        demand_of(CONFIG, "sparda", 131072, 4),
        "sparda",
        ["least", "2x"],
        10,
        Curve(slots=(1, 2), missing=(0, 0)),
        limits(132, 127),
    )
    assert [point.case.misses for point in found if isinstance(point, Point)] == [10, 0]


def test_capacity_names_the_memory_that_ends_it() -> None:
    found = [
        capacity(demand_of(CONFIG, "sparda", 131072, 1), "sparda", limits(*sizes)) for sizes in ((132, 127), (30, 255))
    ]
    assert (found[0].most, found[0].ended_by) == (28, "host memory")
    assert found[1].ended_by == "device memory"
    assert 0 < found[1].most < 28


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("{}", "sparda", "is no result file of `bench overlap`"),
        ("nothing", "sparda", "is no result file of `bench overlap`"),
        (
            '{"rows": [{"name": "missing", "backend": "sparda", "settings": '
            '{"layer": "all", "of_selected": 1, "hit_rate": NaN}}]}',
            "sparda",
            "is no result file of `bench overlap`",
        ),
        (None, "infinigen", "has no mode infinigen: give another file, or --slots least"),
    ],
)
def test_a_file_without_the_curve_is_refused(tmp_path: Path, text: str | None, mode: str, message: str) -> None:
    file = HIT_RATES
    if text is not None:
        file = tmp_path / "rates.json"
        file.write_text(text)
    with pytest.raises(typer.BadParameter, match=message):
        Curve.read(file, mode)


@pytest.mark.parametrize("fetch", [100.0, 150.0, 0.0])
def test_parts_of_a_step_add_up(fetch: float) -> None:
    """Five layers of 130 µs and logits of 150; a fetch of 150 µs makes three of the four waits."""
    steps = [made("sparda", fetch=fetch, at=at, two=True) for at in (0, 2000, 4000)]
    found = step_time(steps)
    assert found.whole == pytest.approx(2.0)
    assert (found.products, found.attention, found.selection) == pytest.approx((0.5, 0.15, 0.1))
    waited = max(fetch - 130, 0) * 3 + max(fetch - 130, 0)
    assert found.others == pytest.approx(0.05)
    assert found.waiting == pytest.approx(waited / 1e3, abs=0.001)
    assert found.idle == pytest.approx(2.0 - 0.8 - found.waiting)
    assert found.copying == pytest.approx(4 * fetch / 1e3)
    assert found.limit == "launches"  # idle for most of the time


def test_what_limits_a_step() -> None:
    tight = {"sparda": made("sparda"), "in turn": made("sparse", fetch=300)}
    assert step_time([tight["sparda"]]).limit == "weights"
    assert step_time([tight["in turn"]]).limit == "link"
    found = step_time([made("sparda", layers=40)])
    assert found.copying < 0.9 * found.whole
    busy = dataclasses.replace(found, copying=0.95 * found.whole)
    assert (found.limit, busy.limit) == ("weights", "link")
    assert dataclasses.replace(found, attention=9.0).limit == "records and keys"


def test_each_moment_counts_once_whatever_runs_beside() -> None:
    """Against a clock of tenths of µs, on random kernels that overlap."""
    rng = np.random.default_rng(1)
    step = []
    for event in made("sparda", fetch=140):
        start = round(event.start + rng.integers(-60, 60) / 10, 1)
        step.append(
            Event(name=event.name, start=start, end=round(max(start, event.end + rng.integers(-40, 60) / 10), 1))
        )
    step.sort(key=lambda event: event.start)
    found = step_time([step])
    kernels = [event for event in step if event.kind is not Kind.FETCH]
    begin, end = min(event.start for event in kernels), max(event.end for event in kernels)
    ticks = np.arange(round(10 * begin), round(10 * end)) / 10 + 0.05
    left = np.ones(len(ticks), bool)
    for kind, part in (
        (Kind.PRODUCT, found.products),
        (Kind.ATTENTION, found.attention),
        (Kind.SELECTION, found.selection),
    ):
        mine = np.zeros(len(ticks), bool)
        for event in step:
            mine |= (event.kind is kind) & (event.start < ticks) & (ticks < event.end)
        assert part == pytest.approx((mine & left).sum() / 1e4)
        left &= ~mine
    assert found.whole == pytest.approx((end - begin) / 1e3)


def test_rows_of_points_that_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy("deep").decoder
    few = Case(way="sparda", batch=2, context=64 * 100, misses=2)
    least = few.slots_per_lane(model.config)
    few = dataclasses.replace(few, slots=least, room=least + 9)
    more = dataclasses.replace(few, misses=0.5, slots=least + 9)
    compiled = []
    compile_step = bench.compile_step

    def counted(model, case, **options):
        compiled.append((case, options))
        return compile_step(model, case, **options)

    monkeypatch.setattr(bench, "compile_step", counted)
    found = [Point(case=few, slots="least"), Point(case=more, slots="2x")]
    rows = list(bench.measured(model, found, published=False))
    assert compiled == [(few, {"profiled": True})]
    assert [row.settings["slots_are"] for row in rows] == ["least", "2x"]
    for row, case in zip(rows, (few, more), strict=True):
        said = row.settings
        assert (said["slots"], said["context"], said["batch"]) == (case.slots, case.context, 2)
        assert said["misses"] == pytest.approx(case.misses, abs=0.05)
        assert row.value == pytest.approx(2 / said["tpot_ms"] * 1e3, rel=0.01)
        floor = max(bench.floors(model.config, dataclasses.replace(case, misses=said["misses"])))
        assert row.floor == pytest.approx(2 / floor, rel=0.01)
        assert said["x_floor"] == pytest.approx(row.times(row.floor), abs=0.001)
        # A CPU's profile shows no kernels.
        assert said["parts_ms"] is said["limit"] is said["paper_tokens_per_s"] is None


def test_the_picture_has_a_panel_for_each_context(tmp_path: Path) -> None:
    files = []
    for batch, paper in ((16, 705.3), (64, None)):
        rows = [
            bench.Row(
                name="sparda",
                backend="auto",
                settings={
                    "batch": batch, "context": context, "slots": slots, "slots_are": kind, "paper_tokens_per_s": paper,
                    "kv_host_dtype": kept,
                },
                value=1000.0 + batch,
                unit="tokens/s",
                floor=2000.0,
            )
            for context, kept in ((65536, "auto"), (131072, "auto"), (131072, "int8"))
            for kind, slots in (("least", 160), ("auto", 1804))
        ]  # fmt: skip
        files.append(tmp_path / f"{batch}.json")
        write_json(files[-1], rows, what="a map", method="none", commit="c", device="d", details={"picture": "map"})
    picture = tmp_path / "map.svg"
    done = CliRunner().invoke(app, ["plot", *map(str, files), str(picture)])
    assert done.exit_code == 0, done.output
    assert "12 rows" in done.output
    text = picture.read_text()
    for said in (
        "sparda, 64K tokens",
        "sparda, 128K tokens",
        "sparda, 128K tokens, int8 on the host",
        "slots: least",
        "slots: auto",
        "paper, H100",
        "<!-- 64 -->",
    ):
        assert said in text, said


def test_the_command_writes_row_by_row_and_says_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the measuring, on the geometry of the 8B model with one layer."""
    file, written = tmp_path / "map.json", []

    def measured(model: Decoder, found: Sequence[Point], *, published: bool) -> Iterator[bench.Row]:
        assert (model.config.num_layers, published) == (1, False)
        for point in found:
            written.append(json.loads(file.read_text())["rows"] if file.exists() else [])
            settings = {"batch": point.case.batch, "slots_are": point.slots, "pools": point.case.pools}
            yield bench.Row(name=point.case.way, backend="auto", settings=settings, value=1.0, unit="tokens/s")

    monkeypatch.setattr(bench, "measured", measured)
    monkeypatch.setattr(bench, "Decoder", lambda config, **_: SimpleNamespace(config=config))
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "gpu")
    options = ["--layers", "1", "--context", "131072", "--batch", "2,4000", "--slots", "least,auto", "--host-gib", "8"]
    command = ["map", *options, "--hit-rates", str(HIT_RATES), "--json", str(file), "--commit", "c"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    said = json.loads(file.read_text())
    assert [row["settings"] for row in said["rows"]] == [
        {"batch": 2, "slots_are": "least", "pools": 1},
        {"batch": 2, "slots_are": "auto", "pools": 1},
    ]
    assert [len(rows) for rows in written] == [0, 1]
    assert (said["picture"], said["host_memory"], said["commit"]) == ("map", "8.00 GiB", "c")
    (capacity,) = said["capacity"]
    assert (capacity["context"], capacity["ended_by"]) == (131072, "host memory")
    assert capacity["most"] < 64
    assert len(said["left_out"]) == 2
    output = " ".join(done.output.split())
    assert "left out: sparda, 131072 tokens, batch 4000, 160 slots (least): host memory" in output
    assert f"sparda, 131072 tokens: {capacity['most']} sequences fit, then host memory ends" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "few"], "--slots 'few': give least, auto, a number"),
        (["--slots", "2x,0"], "--slots '0'"),
        (["--misses", "-1"], "--misses -1"),
        (["--misses", "nan"], "--misses nan: it must be a finite number"),
        (["--host-gib", "inf"], "--host-gib inf: it must be a finite number"),
        (["--way", "dense"], "--way 'dense'"),
        (["--pools", "0"], "--pools 0"),
        (["--kv-host-dtype", "int4"], "--kv-host-dtype 'int4'"),
        (["--hit-rates", "nowhere.json"], "--hit-rates nowhere.json is no result file"),
        (["--slots", "least", "--hit-rates", "nowhere.json"], "needs an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_measured_is_told(arguments: list[str], message: str) -> None:
    refused = CliRunner().invoke(app, ["map", "--hit-rates", str(HIT_RATES), *arguments])
    assert (refused.exit_code, message in " ".join(refused.output.replace("│", " ").split())) == (2, True), (
        refused.output
    )


def test_more_pools_than_may_be_pinned_are_refused() -> None:
    point = Point(case=Case(way="sparda", batch=16, context=131072, misses=10, pools=32), slots="least")
    with pytest.raises(
        typer.BadParameter, match=r"--pools 32: JAX may pin 64\.00 GiB, too little for so many of 2\.00 GiB"
    ):
        bench._check_pools([point], CONFIG, limits(132, 127))
    bench._check_pools(
        [dataclasses.replace(point, case=dataclasses.replace(point.case, pools=2))], CONFIG, limits(132, 127)
    )
