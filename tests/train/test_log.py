"""What a run says: metrics of sums, JSON lines that survive a resume, TensorBoard's file, the console."""

import dataclasses
import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from sparda_jax.train._cache_hits import CacheHits
from sparda_jax.train.curves import check_plot, draw_curves
from sparda_jax.train.errors import TrainingError
from sparda_jax.train.event_file import EventFile
from sparda_jax.train.forward import LayerSums
from sparda_jax.train.log import METRICS_FILE, RunLog, read_metrics, validation_table
from sparda_jax.train.loss import SelectionQuality
from sparda_jax.train.metrics import QUALITY, Record, describe, not_finite


def sums(**found: list[float]) -> LayerSums:
    def of[T: SelectionQuality | CacheHits](kind: type[T]) -> T:
        return kind(**{f.name: jnp.asarray(found.get(f.name, [0.0, 0.0])) for f in dataclasses.fields(kind)})

    return LayerSums(
        loss=jnp.asarray([3.0, 8.0]),
        weight=jnp.asarray([10.0, 10.0]),
        pairs=jnp.asarray([15.0, 15.0]),
        quality=of(SelectionQuality),
        cache=of(CacheHits),
    )


def train_record(step: int, loss: float = 0.5) -> Record:
    values = {"layer_loss": [loss, loss], "loss": loss, "teacher_recall": 0.25, "grad_norm": 0.1, "tokens_per_s": 100.0}
    values |= {"mfu": None}
    return {"kind": "train", "step": step} | values


def validation_record(step: int) -> Record:
    names = ("loss", *QUALITY)
    record: Record = {"kind": "validation", "step": step}
    for name in names:
        record |= {name: 0.125, f"layer_{name}": [0.125, 0.125]}
    return record | {"layer_student_mass": [0.125, None]}


class TestMetrics:
    def test_quotients_and_averages(self) -> None:
        record = describe(
            sums(
                teacher_hits=[3, 0], teacher_blocks=[4, 0], selector_hits=[1, 1], selector_blocks=[2, 4],
                student_mass=[1, 1], selector_mass=[2, 3], teacher_mass=[4, 3], free_mass=[4, 4],
                chosen=[8, 4], hits=[4, 1], hits_of_twice=[6, 3],
            )
        )  # fmt: skip
        assert record["layer_loss"] == pytest.approx([0.3, 0.8])
        assert record["loss"] == pytest.approx(0.55)
        # Where nothing was to be chosen there is no recall, and the average is that of the others.
        assert record["layer_teacher_recall"] == [0.75, None]
        assert record["teacher_recall"] == 0.75
        assert record["layer_selector_recall"] == [0.5, 0.25]
        assert record["layer_student_mass"] == [0.25, 0.25]
        assert record["layer_selector_mass"] == [0.5, 0.75]
        assert record["teacher_mass"] == pytest.approx(0.875)
        assert record["layer_hit_rate"] == [0.5, 0.25]
        assert record["layer_hit_rate_of_twice"] == [0.75, 0.75]
        assert json.loads(json.dumps(record)) == record

    def test_not_finite(self) -> None:
        record = {"step": 3, "loss": float("nan"), "layer_loss": [1.0, float("inf"), None], "kind": "train"}
        assert not_finite(record) == ["loss", "layer_loss[1]"]


def run_log(out: Path, records: list[Record], first_step: int = 0, steps: int = 10) -> str:
    shown = io.StringIO()
    console = Console(file=shown, width=120)
    with RunLog(out, steps=steps, console=console, print_every=2) as log:
        log.begin(first_step)
        for record in records:
            log(record)
    return shown.getvalue()


class TestJsonLines:
    def test_a_resumed_run_repeats_nothing(self, tmp_path: Path) -> None:
        run_log(tmp_path, [validation_record(0), *map(train_record, range(1, 6)), validation_record(5)])
        run_log(tmp_path, [train_record(4, loss=0.25), train_record(5, loss=0.25)], first_step=3)
        found = list(read_metrics(tmp_path / METRICS_FILE))
        assert [(r["kind"], r["step"]) for r in found] == [("validation", 0), *(("train", s) for s in range(1, 6))]
        assert found[-1] == train_record(5, loss=0.25)

    def test_a_fresh_run_starts_a_new_file(self, tmp_path: Path) -> None:
        run_log(tmp_path, [train_record(1)])
        run_log(tmp_path, [train_record(1, loss=0.25)])
        assert list(read_metrics(tmp_path / METRICS_FILE)) == [train_record(1, loss=0.25)]

    def test_a_line_that_a_killed_process_did_not_finish(self, tmp_path: Path) -> None:
        run_log(tmp_path, [train_record(1), train_record(2)])
        file = tmp_path / METRICS_FILE
        file.write_text(file.read_text() + '{"kind": "tra')
        run_log(tmp_path, [train_record(3)], first_step=2)
        assert [r["step"] for r in read_metrics(file)] == [1, 2, 3]

    def test_metrics_that_are_gone(self, tmp_path: Path) -> None:
        run_log(tmp_path, [train_record(5)], first_step=4)
        assert [r["step"] for r in read_metrics(tmp_path / METRICS_FILE)] == [5]
        with pytest.raises(TrainingError, match="does not exist"):
            list(read_metrics(tmp_path / "elsewhere"))


class TestConsole:
    def test_lines_and_tables(self, tmp_path: Path) -> None:
        shown = run_log(tmp_path, [*map(train_record, range(1, 5)), validation_record(4)])
        lines = [line for line in shown.splitlines() if line.startswith("step ")]
        assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]
        assert "loss 0.5000, recall 25.0%, gradient 0.1, 100 tokens/s" in lines[0]
        assert "MFU" not in shown
        assert "MFU 41.0%" in run_log(tmp_path / "known", [train_record(2) | {"mfu": 0.41}])
        assert "validation after step 4" in shown
        assert "0.1250" in shown
        assert "4/10" in shown


def crc32c(data: bytes) -> int:
    """Bit by bit, from the polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fields(message: bytes) -> list[tuple[int, Any]]:
    """A protobuf message's fields in order."""

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    place, found = 0, []
    while place < len(message):
        key = varint()
        if key & 7 == 0:
            value: Any = varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            value = message[place : place + size]
            place += size
        found.append((key >> 3, value))
    return found


class TestEventFile:
    def test_checksum(self) -> None:
        assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C's definition

    def test_records(self, tmp_path: Path) -> None:
        events = EventFile(tmp_path / "events")
        events.write(3, {"train/loss": 0.5, "train_layer_loss/0": -1.25})
        events.write(70000, {"x": 2.0})
        events.close()
        (file,) = (tmp_path / "events").iterdir()
        assert "tfevents" in file.name
        data, place, found = file.read_bytes(), 0, []
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            assert struct.unpack_from("<I", data, place + 8)[0] == masked(data[place : place + 8])
            message = data[place + 12 : place + 12 + length]
            assert struct.unpack_from("<I", data, place + 12 + length)[0] == masked(message)
            found.append(dict(fields(message)))
            place += 16 + length
        assert found[0][3] == b"brain.Event:2"
        scalars = {}
        for event in found[1:]:
            for number, value in fields(event[5]):
                assert number == 1
                tag, simple = (dict(fields(value))[i] for i in (1, 2))
                scalars[event[2], tag.decode()] = struct.unpack("<f", simple)[0]
        assert scalars == {(3, "train/loss"): 0.5, (3, "train_layer_loss/0"): -1.25, (70000, "x"): 2.0}
        assert all(np.frombuffer(event[1], "<f8")[0] > 1.7e9 for event in found)

    def test_a_run_writes_every_number(self, tmp_path: Path) -> None:
        run_log(tmp_path, [train_record(1), validation_record(1)])
        (file,) = (tmp_path / "tensorboard").iterdir()
        data = file.read_bytes()
        for tag in (
            b"train/loss",
            b"train_layer_loss/1",
            b"validation/teacher_recall",
            b"validation_layer_student_mass/0",
        ):
            assert tag in data
        assert b"validation_layer_student_mass/1" not in data


def test_curves_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TrainingError, match=r"curves need matplotlib.*pip install matplotlib"):
        check_plot()


def test_curves_show_the_numbers(tmp_path: Path) -> None:
    pictures = []
    for name, records in (
        ("one", [validation_record(0), train_record(1), train_record(2)]),
        ("other", [validation_record(0), train_record(1), train_record(2, loss=0.75)]),
        ("without a choice", [{**train_record(1), "teacher_recall": None}]),
    ):
        run_log(tmp_path / name, records)
        draw_curves(tmp_path / name, tmp_path / f"{name}.png")
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert len(set(pictures)) == 3


def test_rows_without_a_block_to_choose_have_no_loss() -> None:
    """As all rows have that are no longer than a selection."""
    names = ("loss", *QUALITY)
    record = (
        {"kind": "validation", "step": 1} | dict.fromkeys(names) | {f"layer_{name}": [None, None] for name in names}
    )
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(validation_table(record))
    assert console.export_text().count("- ") >= 3 * 8
