"""`bench step`: layers, waits and hidden copies of steps made by hand, and of two that an H200 ran."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from jax.profiler import ProfileData
from typer.testing import CliRunner

from sparda_jax.bench import _step_parts as parts
from sparda_jax.bench import _step_plot
from sparda_jax.bench.__main__ import app
from sparda_jax.bench._step_profile import Event, Kind, ProfileError, decode_steps, kind_of, read_profile

DATA = Path(__file__).parent / "data"
LAYERS = 5


def made(way: str, *, fetch: float = 100.0, at: float = 0.0, layers: int = LAYERS, two: bool = False) -> list[Event]:
    """A step whose kernels take round times: 130 µs of a layer; a fetch in turn before attention, or ahead of it."""
    events, now, ready = [], at, at

    def run(name: str, length: float) -> None:
        nonlocal now
        events.append(Event(name=name, start=now, end=now + length))
        now += length

    for layer in range(layers):
        run("gemm_fusion_dot_7", 10)
        run("kernel__1", 20)
        run("plan_residency", 5)
        # Ahead, the last layer has nothing to fetch; in turn, layer 0 has it all.
        copies = layer < layers - 1 if way == "sparda" else layer > 0
        before, after = ready, now
        if copies and fetch:  # one at a time, over one link
            ready = max(now, ready) + fetch
            events.append(Event(name="copy_records_mosaic_gpu_kernel", start=ready - fetch, end=ready))
            after = ready
        now = max(now, before if way == "sparda" else after)
        run("append_token", 5)
        run("slot_attention_parts_mosaic_gpu_kernel", 28)
        if two:  # beside the first half of attention
            events.append(Event(name="fusion_9", start=now - 10, end=now - 4))
        run("slot_attention_combine_mosaic_gpu_kernel", 2)
        run("gemm_fusion_dot_1", 10)
        run("gemm_fusion_dot_2", 30)
        run("gemm_fusion_dot_3", 20)
    run("gemm_fusion_dot_general", 150)
    return sorted(events, key=lambda event: (event.start, event.end))


def test_a_fetch_that_is_shorter_than_a_layer_is_hidden() -> None:
    drawn = parts.picture([made("sparda")])
    assert [layer.index for layer in drawn.layers] == [1, 2, 3]
    assert drawn.layer_us == 130
    assert (drawn.wait, drawn.idle_us, drawn.hidden) == (0, 0, 1)
    per_layer = {Kind.ATTENTION: 30, Kind.PRODUCT: 70, Kind.SELECTION: 20, Kind.PLAN: 5, Kind.APPEND: 5, Kind.SMALL: 0}
    assert {kind: drawn.per_layer(kind) for kind in per_layer} == per_layer
    assert drawn.per_layer(Kind.FETCH) == drawn.fetching == 100
    assert drawn.period is None


def test_a_longer_fetch_is_waited_for_by_what_is_left_of_it() -> None:
    drawn = parts.picture([made("sparda", fetch=150)])
    # From a plan to the next attention but one: 130 µs of kernels that don't need it.
    assert drawn.layer_us == pytest.approx(150)
    assert drawn.wait == pytest.approx(20)
    assert drawn.hidden == pytest.approx(130 / 150)


def test_a_fetch_in_turn_is_waited_for_from_end_to_end() -> None:
    drawn = parts.picture([made("sparse")], 1, 2)
    assert (drawn.layer_us, drawn.wait, drawn.idle_us, drawn.hidden) == (230, 100, 0, 0)
    assert [part.label for part in drawn.parts if part.kind is Kind.FETCH] == ["for layer 1", "for layer 2"]
    in_layer_0 = parts.picture([made("sparse")], 0, 0)
    assert (in_layer_0.layer_us, in_layer_0.wait) == (130, 0)
    assert in_layer_0.hidden is None


def test_a_step_without_fetches_has_nothing_to_wait_for() -> None:
    drawn = parts.picture([made("sparda", fetch=0)])
    assert (drawn.layer_us, drawn.wait, drawn.idle_us, drawn.hidden) == (130, 0, 0, None)
    assert drawn.per_layer(Kind.FETCH) == 0


def test_a_pause_that_no_fetch_ends_is_idle_though_one_runs() -> None:
    late = 16.0
    step = made("sparda")
    attends = [event.start for event in step if "parts" in event.name][2]
    moved = [
        event if event.start < attends or event.kind is Kind.FETCH else
        Event(name=event.name, start=event.start + late, end=event.end + late)
        for event in step
    ]  # fmt: skip
    drawn = parts.picture([moved], 2, 2)
    assert (drawn.wait, drawn.idle_us, drawn.layer_us) == (0, late, 130 + late)
    # A fetch that began in the pause is waited for since then only.
    copy = Event(name="MemcpyH2D", start=attends + 4, end=attends + late - 1)
    drawn = parts.picture([sorted([*moved, copy], key=lambda event: event.start)], 2, 2)
    assert (drawn.wait, drawn.idle_us) == (late - 4, 4)


def test_waits_and_kernels_fill_the_time_whatever_the_streams_do() -> None:
    """Against a clock of tenths of µs, on random kernels that overlap."""
    rng = np.random.default_rng(0)
    step = []
    for event in made("sparda", fetch=150):
        start = round(event.start + rng.integers(-40, 40) / 10, 1)
        end = max(start + 0.5, round(event.end + rng.integers(-30, 30) / 10, 1))
        step.append(Event(name=event.name, start=start, end=end))
    step.sort(key=lambda event: event.start)
    drawn = parts.picture([step], 1, 3)
    begin, end = drawn.span
    ticks = np.arange(round(10 * begin), round(10 * end)) / 10 + 0.05

    def within(spans: Iterable[tuple[float, float]]) -> np.ndarray:
        return np.sum([(start < ticks) & (ticks < stop) for start, stop in spans], axis=0)

    busy = within([(event.start, event.end) for event in step if event.kind is not Kind.FETCH]) > 0
    lost = within(drawn.waits) + within(drawn.idle)
    np.testing.assert_array_equal(lost, ~busy)
    copying = within([(event.start, event.end) for event in step if event.kind is Kind.FETCH]) > 0
    assert drawn.hidden == pytest.approx((busy & copying).sum() / copying.sum())
    assert drawn.wait > 0


def test_products_are_named_and_what_runs_beside_a_kernel_has_its_own_row() -> None:
    drawn = parts.picture([made("sparda", two=True)], 2, 2)
    labels = [part.label for part in drawn.parts if part.kind is Kind.PRODUCT]
    assert labels == ["q k v", "output", "gate, up", "down"]
    assert {part.kind for part in drawn.parts if part.row} == {Kind.SMALL}
    # Of fetches that began before, what lies within.
    first, second = (part for part in drawn.parts if part.kind is Kind.FETCH)
    assert (first.label, first.start - drawn.span[0], first.end - first.start) == ("for layer 2", 0, 5)
    assert (second.label, second.start - drawn.span[0]) == ("for layer 3", 35)


def test_of_two_fetches_at_once_both_are_drawn_and_the_time_counts_once() -> None:
    step = made("sparda")
    begin = parts.layers_of(step)[2].start + 50
    copy = Event(name="copy_records__1", start=begin, end=begin + 40)
    drawn = parts.picture([sorted([*step, copy], key=lambda event: event.start)], 2, 2)
    assert [part.row for part in drawn.parts if part.kind is Kind.FETCH] == [0, 0, 1]
    assert (drawn.per_layer(Kind.FETCH), drawn.fetching, drawn.hidden) == (140, 100, 1)


def test_the_step_is_the_median_of_those_that_fetch() -> None:
    fetches, starts = (0, 2, 170, 150, 160, 300), (0, 1000, 2000, 4000, 5500, 8000)
    steps = [made("sparda", fetch=fetch, at=at) for fetch, at in zip(fetches, starts, strict=True)]
    drawn = parts.picture(steps)
    assert drawn.layer_us == pytest.approx(160)
    assert drawn.period == pytest.approx(2000)


def test_layers_that_are_not_there_are_refused() -> None:
    for first, last in ((3, 4), (2, 1)):
        with pytest.raises(ProfileError, match=f"layers {first} to {last}: the profile has 0 to 3"):
            parts.picture([made("sparda")], first, last)
    with pytest.raises(ProfileError, match="two layers in one CUDA graph"):
        parts.picture([made("sparda", layers=1)])


def excerpt(way: str) -> list[Event]:
    """Some layers of a step that an H200 ran."""
    record = json.loads((DATA / f"decode_step_{way}.json").read_text())
    return [Event(name=name, start=start, end=end) for name, start, end in record]


@pytest.mark.parametrize(
    ("way", "layer_us", "wait", "hidden"),
    [("sparda", (220, 240), (20, 30), 0.9), ("sparse", (430, 440), (205, 215), 0)],
)
def test_steps_of_an_h200(way: str, layer_us: tuple[int, int], wait: tuple[int, int], hidden: float) -> None:
    """At batch 16: SparDA waits for what a layer doesn't hide, sparse for whole fetches."""
    drawn = parts.picture([excerpt(way)], 0, 1)
    assert layer_us[0] < drawn.layer_us < layer_us[1]
    assert wait[0] < drawn.wait < wait[1]
    assert drawn.hidden == pytest.approx(hidden, abs=0.03)
    assert drawn.idle_us < 1
    assert drawn.per_layer(Kind.ATTENTION) == pytest.approx(34, abs=2)
    assert drawn.per_layer(Kind.PRODUCT) == pytest.approx(123, abs=5)


def test_sparda_and_synchronous_sparse_on_one_time_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that the README shows: `sparse` is longer by what it waits."""
    saved = []
    monkeypatch.setattr(_step_plot, "save", lambda drawing, path: saved.append((drawing, path)))
    drawn = [(way, parts.picture([excerpt(way)], 0, 1)) for way in ("sparda", "sparse")]
    _step_plot.draw(drawn, tmp_path / "both.svg", "both")
    ((drawing, path),) = saved
    above, below = drawing.axes
    assert path == tmp_path / "both.svg"
    assert above.get_xlim() == below.get_xlim()
    assert [axes.get_subplotspec().rowspan.start for axes in (above, below)] == [0, 1]
    assert [axes.get_title(loc="left").partition(":")[0] for axes in (above, below)] == ["sparda", "sparse"]
    ends = [max(line.get_xdata()[0] for line in axes.lines) for axes in (above, below)]
    assert ends == pytest.approx([2 * one.layer_us for _, one in drawn])
    waited = [2 * one.wait for _, one in drawn]
    assert ends[1] - ends[0] == pytest.approx(waited[1] - waited[0], abs=40)
    assert all(
        [label.get_text() for label in axes.get_yticklabels()] == ["compute", "copy", "wait"] for axes in drawing.axes
    )


def test_kinds_of_kernels() -> None:
    names = {
        Kind.ATTENTION: ["slot_attention_parts", "slot_attention_combine_mosaic_gpu_kernel"],
        Kind.PRODUCT: [
            "mosaic_gpu_between_attentions",
            "gemm_fusion_dot_general_49",
            "nvjet_hsh_128x64",
            "void cutlass::Kernel2<x>",
        ],
        Kind.SELECTION: ["kernel", "kernel__2", "forecast_scores", "infllm_scores__1", "top_blocks"],
        Kind.PLAN: ["plan_residency__1"],
        Kind.APPEND: ["append_token", "finish_window", "write_token"],
        Kind.FETCH: ["copy_records_mosaic_gpu_kernel", "MemcpyH2D"],
        Kind.SMALL: ["loop_add_fusion_3", "fusion_441", "wrapped_convert", "MemcpyD2H", "some_kernel"],
    }
    assert {name: kind_of(name) for kind in names for name in names[kind]} == {
        name: kind for kind in names for name in names[kind]
    }


def xplane(steps: list[list[Event]], *, graph: bool = True) -> str:
    """A profile as text, as XLA's profiler lays it out: fetches on a stream of their own; no two launches alike."""
    names = sorted({event.name for step in steps for event in step})
    ids = {name: index + 1 for index, name in enumerate(names)}
    lines: dict[str, list[str]] = {"Stream #14(Compute)": [], "Stream #15(Compute)": []}
    for launch, step in enumerate(steps):
        for place, event in enumerate(step):
            number = 100 + launch if graph else 1000 * launch + place
            stat = f"stats {{ metadata_id: 1 int64_value: {number} }}"
            lines["Stream #15(Compute)" if event.kind is Kind.FETCH else "Stream #14(Compute)"].append(
                f"events {{ metadata_id: {ids[event.name]} offset_ps: {round(1e6 * event.start)} "
                f"duration_ps: {round(1e6 * (event.end - event.start))} {stat} }}"
            )
    known = [f'event_metadata {{ key: {ids[n]} value {{ id: {ids[n]} name: "{n}" }} }}' for n in names]
    streams = [f'lines {{ name: "{name}" timestamp_ns: 5000 {" ".join(found)} }}' for name, found in lines.items()]
    stats = [
        f'stat_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
        for key, name in ((1, "correlation_id"), (2, "gpu_device_name"))
    ]
    device = 'stats { metadata_id: 2 str_value: "NVIDIA H200" }'
    return f'planes {{ name: "/device:GPU:0" {" ".join([*known, *stats, device, *streams])} }}'


def test_profile_is_read_launch_by_launch() -> None:
    step = made("sparda")
    other = [Event(name="gemm_fusion_dot", start=3000, end=3001)]
    data = ProfileData.from_text_proto(xplane([made("sparda", at=5000), step, other]))
    found = decode_steps(data, Path("here"))
    assert found.made_on == "NVIDIA H200, jax unknown"
    assert [len(one) for one in found.steps] == [len(step)] * 2
    assert [event.name for event in found.steps[0]] == [event.name for event in step]
    np.testing.assert_allclose([event.start for event in found.steps[0]], [event.start + 5 for event in step])
    assert parts.picture(found.steps).period == pytest.approx(5000)


def test_profiles_without_a_step_are_refused(tmp_path: Path) -> None:
    kernel_by_kernel = ProfileData.from_text_proto(xplane([made("sparda")], graph=False))
    with pytest.raises(ProfileError, match="XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true"):
        decode_steps(kernel_by_kernel, tmp_path)
    with pytest.raises(ProfileError, match="shows 0 GPUs"):
        decode_steps(ProfileData.from_text_proto('planes { name: "/host:CPU" }'), tmp_path)
    with pytest.raises(ProfileError, match="holds 0 profiles"):
        read_profile(tmp_path / "nowhere")
    (tmp_path / "a.xplane.pb").write_bytes(b"no profile")
    with pytest.raises(ProfileError, match="is no profile"):
        read_profile(tmp_path)
    (tmp_path / "b.xplane.pb").write_bytes(b"")
    with pytest.raises(ProfileError, match="holds 2 profiles"):
        read_profile(tmp_path)


def test_command_draws_and_prints(tmp_path: Path) -> None:
    for way in ("sparda", "sparse"):
        text = xplane([made(way, at=at) for at in (0, 2000)])
        (tmp_path / way).mkdir()
        (tmp_path / way / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    command = ["step", str(tmp_path / "sparda"), str(tmp_path / "sparse"), "--out", str(tmp_path / "step.1")]
    done = CliRunner().invoke(app, [*command, "--layers", "1-2"])
    assert done.exit_code == 0, done.output
    lines = {
        cells[1].strip(): cells[2:4] for cells in (line.split("│") for line in done.output.splitlines()) if cells[1:]
    }
    assert [float(cell) for cell in lines["waits for a fetch"]] == [0, 100]
    assert [float(cell) for cell in lines["a layer"]] == [130, 230]
    assert [cell.strip() for cell in lines["of the fetches' time, hidden"]] == ["100%", "0%"]
    assert [float(cell) for cell in lines["from step to step, whole"]] == [2000, 2000]
    assert (tmp_path / "step.1.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "step.1.svg").read_text()
    assert "sparda: 130 µs a layer, 0 of them waiting" in svg
    assert "sparse: 230 µs a layer, 100 of them waiting" in svg
    for wrong, message in (("2-x", "give one layer"), ("3-9", "the profile has 0 to 3")):
        refused = CliRunner().invoke(app, [*command, "--layers", wrong])
        assert (refused.exit_code, message in " ".join(refused.output.split())) == (2, True), refused.output
