"""The throughput that hit rates stand for: a step's time by misses, and the command over result files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sparda_jax.bench.__main__ import app
from sparda_jax.bench.predict import Measured, step_ms

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def step(misses: float, *, compute: float, per_miss: float, link: float) -> float:
    """A machine that computes beside its copies: the longer of both."""
    return max(compute + per_miss * misses, link * misses)


@pytest.mark.parametrize("link", [0.2, 0.5, 1.2, 3.0])
def test_a_machine_that_is_the_longer_of_two_lines(link: float) -> None:
    """Its own times come back, wherever the two lines cross, from three points."""
    machine = {"compute": 7.0, "per_miss": 0.1, "link": link}
    points = [Measured(misses=misses, ms=step(misses, **machine), link_ms=link * misses) for misses in (0.0, 2.0, 10.0)]
    for misses in (0.0, 0.7, 2.0, 5.0, 8.0, 10.0, 40.0):
        expected = step(misses, **machine)
        if misses > 10 and link < 0.5:
            expected = points[-1].ms  # there is no more to be known of computing
        assert step_ms(points, misses) == pytest.approx(expected)


def test_more_misses_never_take_less_time() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        ms, link = np.sort(rng.uniform(5, 8, 3)), rng.uniform(0, 1.5)
        points = [
            Measured(misses=m, ms=max(t, m * link), link_ms=m * link) for m, t in zip((0, 2.34, 10), ms, strict=True)
        ]
        found = [step_ms(points, misses) for misses in np.linspace(0, 30, 40)]
        assert np.all(np.diff(found) >= -1e-9)


def test_the_command_over_the_committed_files() -> None:
    files = [str(RESULTS / "h200-map.json"), "--hit-rates", str(RESULTS / "hit-rates.json")]
    done = CliRunner().invoke(app, ["predict", *files])
    assert done.exit_code == 0, done.output
    lines = {
        line.split("│")[1].strip(): line.split("│")[2:-1] for line in done.output.splitlines() if line.count("│") == 6
    }
    assert [float(text) for text in lines["missing of 96"]] == pytest.approx([18.5, 7.4, 3.5, 0.4], abs=0.06)
    tokens = [float(text.replace(",", "")) for text in lines["32"]]
    # At 1 x the link alone: 14.06 ms at 10 missing.
    assert tokens[0] == pytest.approx(32e3 / (14.06 * 1.85), rel=0.01)
    assert tokens == sorted(tokens)


def test_files_without_such_points_are_refused(tmp_path: Path) -> None:
    rates = ["--hit-rates", str(RESULTS / "hit-rates.json")]
    refused = CliRunner().invoke(app, ["predict", str(RESULTS / "h200-map.json"), *rates, "--context", "32768"])
    assert (
        refused.exit_code,
        "no batch with three numbers of slots that miss differently" in " ".join(refused.output.split()),
    ) == (2, True)
    refused = CliRunner().invoke(app, ["predict", str(RESULTS / "h200-train.json"), *rates])
    assert (refused.exit_code, "is no result of `bench map`" in " ".join(refused.output.split())) == (2, True)
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps({"rows": [{"value": 1, "name": "sparda", "settings": None}]}))
    refused = CliRunner().invoke(app, ["predict", str(odd), *rates])
    assert refused.exit_code == 2, refused.output


def test_points_of_equal_misses_count_once(tmp_path: Path) -> None:
    """`bench map --misses 0` has no others; and more slots than the hit rates reach to miss as many."""
    whole = json.loads((RESULTS / "h200-map.json").read_text())
    rates = ["--hit-rates", str(RESULTS / "hit-rates.json")]
    file = tmp_path / "map.json"
    expected = CliRunner().invoke(app, ["predict", str(RESULTS / "h200-map.json"), *rates]).output
    file.write_text(json.dumps(whole | {"rows": [row for row in whole["rows"] for _ in range(2)]}))
    assert CliRunner().invoke(app, ["predict", str(file), *rates]).output == expected
    for row in whole["rows"]:
        row["settings"]["misses"] = 0
    file.write_text(json.dumps(whole))
    refused = CliRunner().invoke(app, ["predict", str(file), *rates])
    assert (refused.exit_code, "that miss differently" in " ".join(refused.output.split())) == (2, True)


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> list[str]:
    """The committed files' command, over a map whose rows are changed."""
    record = json.loads((RESULTS / "h200-map.json").read_text())
    for row in record["rows"]:
        change(row)
    (folder / "map.json").write_text(json.dumps(record))
    return ["predict", str(folder / "map.json"), "--hit-rates", str(RESULTS / "hit-rates.json")]


def test_a_point_without_a_profile_leaves_the_others(tmp_path: Path) -> None:
    """`bench map` writes such a row where a profile can't be read; of batch 32 two points are left, so it goes."""

    def lose(row: dict[str, Any]) -> None:
        if (row["settings"]["batch"], row["settings"]["slots_are"]) == (32, "auto"):
            row["settings"] |= {"parts_ms": None, "limit": None}

    done = CliRunner().invoke(app, changed(tmp_path, lose))
    assert done.exit_code == 0, done.output
    assert "│ 16 " in " ".join(done.output.split())
    assert "│ 32 " not in " ".join(done.output.split())


def test_a_way_takes_the_hit_rates_of_its_mode(tmp_path: Path) -> None:
    found = [
        CliRunner().invoke(app, [*changed(tmp_path, lambda row, way=way: row.update(name=way)), "--way", way]).output
        for way in ("sparda", "sparda, in turn")
    ]
    assert [line for line in found[0].splitlines() if "│" in line] == [
        line for line in found[1].splitlines() if "│" in line
    ]


@pytest.mark.parametrize(
    ("name", "value"), [("tpot_ms", float("nan")), ("tpot_ms", 0), ("misses", float("inf")), ("batch", "x")]
)
def test_a_map_that_holds_no_numbers_is_refused(tmp_path: Path, name: str, value: object) -> None:
    refused = CliRunner().invoke(app, changed(tmp_path, lambda row: row["settings"].update({name: value})))
    assert (refused.exit_code, "is no result of `bench map`" in " ".join(refused.output.split())) == (2, True)
