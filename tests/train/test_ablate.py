"""``python -m sparda_jax.train.ablate``: rows that are trained and asked once, and what can't be."""

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import typer
from tokenizers import Tokenizer
from typer.testing import CliRunner, Result

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.pretrain.prepare import tokenize_documents
from sparda_jax.selection import Mode
from sparda_jax.train.ablate import plot
from sparda_jax.train.ablate import run as run_module
from sparda_jax.train.ablate import training as training_module
from sparda_jax.train.ablate.__main__ import app
from sparda_jax.train.ablate.answers import halve
from sparda_jax.train.ablate.cases import VARIANTS, Ablation, cases_of
from tests.serve.tiny_checkpoint import write_checkpoint
from tests.train.test_command import SPARSE, WORDS

VERSES = Path(__file__).parent.parent / "data" / "pretrain_text.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablate")
    write_checkpoint(folder, sparse_config=SPARSE)
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, 600))}) for _ in range(12)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def call(folder: Path, out: Path, *more: str) -> Result:
    given = ["--model", str(folder / "tiny"), "--data", str(folder / "texts.jsonl"), "--out", str(out), "--steps", "2"]
    sizes = ["--seq-len", "512", "--batch-size", "2", "--validation-rows", "1"]
    return CliRunner().invoke(app, [*more, *given, *sizes, "--commit", "c"])


class FakeQuestioner:
    """Knows every answer of sparda, half of the others."""

    asked: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, config: Any) -> None: ...

    def ask(self, case: Any, weights: Any, design: Any, kind: str, length: int) -> dict[str, Any]:
        self.asked.append((case.label, kind, length))
        recall = 1.0 if case.mode is Mode.SPARDA else 0.5
        assert (weights is None) == (case.variant is None)
        if weights is not None:
            assert weights.shape[2] == 32 * design.heads_per_group
        found = {"kind": kind, "length": length, "recall": recall, "interval": (recall - 0.1, recall)}
        return found | {"read_fraction": 0.2}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    monkeypatch.setattr(run_module, "Questioner", FakeQuestioner)
    FakeQuestioner.asked = []
    return FakeQuestioner.asked


@pytest.mark.slow
def test_variants_are_trained_and_asked_once(
    folder: Path, tmp_path: Path, asked: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--lengths", "512,1024", "--kinds", "single", "--prompts", "8"]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    first = call(folder, tmp_path / "out", "heads", "--rows", "2 heads", *sizes)
    assert first.exit_code == 0, first.output
    assert asked == [("2 heads", "single", 512), ("2 heads", "single", 1024)]

    (tmp_path / "out" / "answers" / "heads-2-sparda-single-1024.json").unlink()
    whole = call(folder, tmp_path / "out", "heads", *sizes, *files)
    assert whole.exit_code == 0, whole.output
    assert ("2 heads", "single", 512) not in asked[2:]
    assert ("2 heads", "single", 1024) in asked[2:]
    record = json.loads((tmp_path / "a.json").read_text())
    assert [row["label"] for row in record["rows"]] == ["1 head", "2 heads", "4 heads"]
    assert record["trained_with"]["steps"] == 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plot.main(tmp_path / "a.json", tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes() == (tmp_path / "a.png").read_bytes()
    with pytest.raises(typer.BadParameter, match="is no result file of an ablation"):
        plot.main(folder / "tiny" / "config.json", tmp_path / "b.png")
    for row in record["rows"]:
        assert row["steps"] == 2
        assert row["validation"]["layer_loss"] != row["begun"]["layer_loss"]
        assert [cell["length"] for cell in row["answers"]] == [512, 1024]
        assert row["trained"]["design"]["heads_per_group"] == int(row["label"][0])
    # Other heads, another loss; the last layer of a model is selected for by all of them.
    losses = [row["validation"]["loss"] for row in record["rows"]]
    assert len(set(losses)) == 3

    # Everything is there: nothing is loaded, trained or asked.
    monkeypatch.setattr(training_module, "load_model", None)
    monkeypatch.setattr(run_module, "Questioner", None)
    again = call(folder, tmp_path / "out", "heads", *sizes, *files)
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == record["rows"]
    other = call(folder, tmp_path / "out", "heads", *sizes, "--learning-rate", "1e-4")
    assert other.exit_code == 1
    assert "learning_rate=0.001, not 0.0001; give another --out" in other.stderr
    fewer = call(folder, tmp_path / "out", "heads", "--lengths", "512", "--kinds", "single", "--prompts", "4")
    assert fewer.exit_code == 1
    assert "give another --out" in fewer.stderr


@pytest.mark.slow
def test_a_variant_goes_on_where_it_was_stopped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kept activations, too: what a killed process had trained so far is not trained again."""
    more = ["rest", "--rows", "without", "--prompts", "0", "--save-every", "1", "--activations", str(tmp_path / "kept")]
    whole = call(folder, tmp_path / "whole", *more)
    assert whole.exit_code == 0, whole.output
    validate = training_module._validate
    calls = []

    def fail_at_the_end(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise OSError("killed")
        return validate(*given)

    monkeypatch.setattr(training_module, "_validate", fail_at_the_end)
    assert call(folder, tmp_path / "cut", *more).exit_code == 1
    resumed = call(folder, tmp_path / "cut", *more)
    assert resumed.exit_code == 0, resumed.output
    weights = [
        np.load(tmp_path / name / "variants" / "without-rest" / training_module.WEIGHTS) for name in ("whole", "cut")
    ]
    np.testing.assert_array_equal(weights[0], weights[1])


def test_the_predictors_need_no_training(folder: Path, tmp_path: Path, asked: list[tuple[str, str, int]]) -> None:
    rows = [
        {"name": way, "value": 100.0 * batch, "settings": {"batch": batch, "misses": 10.0}}
        for way in ("sparda", "infinigen")
        for batch in (4, 16)
    ]
    bench = dict.fromkeys(("command", "commit", "date", "method"), "x") | {"machine": {}, "versions": {}, "rows": rows}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    options = ["--model", str(folder / "tiny"), "--out", str(tmp_path / "out"), "--kinds", "single", "--lengths", "512"]
    done = CliRunner().invoke(app, ["predictor", *options, *files, "--throughput", str(tmp_path / "bench.json")])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "a.json").read_text())
    assert [row["mode"] for row in record["rows"]] == ["sparse", "sparda", "sparda-decode-only", "infinigen", "random"]
    assert record["throughput"]["rows"] == rows
    (tmp_path / "bench.json").write_text("{}")
    done = CliRunner().invoke(app, ["predictor", *options, "--throughput", str(tmp_path / "bench.json")])
    assert done.exit_code == 1
    assert "no result file of `bench decode --json`" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["heads"], "published has to be trained: give --data"),
        (["heads", "--rows", "3 heads"], "rows=3 heads: heads has 1 head, 2 heads, 4 heads"),
        (["heads", "--prompts", "-1"], "prompts=-1"),
        (["heads", "--throughput", "x"], "belongs to the ablation `predictor`"),
    ],
)
def test_what_can_not_be_run_is_told(folder: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    given = ["--model", str(folder / "tiny"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, *given], env={"COLUMNS": "300"})
    assert done.exit_code != 0
    assert said in done.output


def test_every_row_has_a_known_variant_and_a_label_of_its_own() -> None:
    for ablation in Ablation:
        cases = cases_of(ablation, 14)
        assert len({case.label for case in cases}) == len(cases) > 1
        assert {case.variant for case in cases} <= {None, *VARIANTS}


@pytest.mark.parametrize("target", [0.1, 0.5, 0.93])
def test_halving_comes_near(target: float) -> None:
    share, reached = halve(lambda x: x**3, target)
    assert reached == share**3
    assert abs(reached - target) < 0.01


@pytest.mark.slow
def test_by_confidence_reads_as_much_as_the_constant(tmp_path: Path) -> None:
    """The bundled model, asked in earnest."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "tokenizer").symlink_to(BUNDLED_MODEL)
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    texts = VERSES.read_text().strip().split("\n\n")
    np.save(data / "eval.npy", tokenize_documents(tokenizer, texts))
    sizes = ["--lengths", "2560", "--kinds", "single", "--prompts", "2", "--seed", "3"]
    files = ["--prompts-data", str(data), "--out", str(tmp_path / "out"), "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, ["topk", *sizes, *files])
    assert done.exit_code == 0, done.output
    constant, chosen = (row["answers"][0] for row in json.loads((tmp_path / "a.json").read_text())["rows"])
    assert 0 < chosen["share"] < 1
    assert abs(chosen["read_fraction"] / constant["read_fraction"] - 1) < 0.05
    assert chosen["most"] == 28
