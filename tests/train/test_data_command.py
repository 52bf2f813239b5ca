"""From texts over the retokeniser to a run on MDS shards of two domains, by the commands."""

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from sparda_jax.train.__main__ import app
from sparda_jax.train.log import METRICS_FILE, read_metrics
from tests.train.test_command import WORDS, arguments, error_of, folder

__all__ = ["folder"]


def test_a_mixture_of_retokenised_domains(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    for domain in ("book", "web"):
        lines = [json.dumps({"text": " ".join(rng.choice(WORDS, rng.integers(200, 600)))}) for _ in range(20)]
        (tmp_path / f"{domain}.jsonl").write_text("\n".join(lines))
    sources = [str(tmp_path / "book.jsonl"), str(tmp_path / "web.jsonl")]
    made = CliRunner().invoke(
        app, ["retokenise", *sources, str(tmp_path / "data"), "--tokenizer", str(folder / "tiny")]
    )
    assert made.exit_code == 0, made.output

    def train(out: str, *more: str, data: Path = tmp_path / "data") -> list[str]:
        command = arguments(
            folder, tmp_path / out, "--steps", "2", "--save-every", "2", "--validation-rows", "2", *more
        )
        command[command.index("--data") + 1] = str(data)
        return command

    result = CliRunner().invoke(app, train("mixed", "--mix", "book=3", "--mix", "web=1"))
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "mixture: book 75.0% of" in said
    assert ", web 25.0% of" in said
    records = list(read_metrics(tmp_path / "mixed" / METRICS_FILE))
    assert [(r["kind"], r["step"]) for r in records] == [
        ("validation", 0),
        ("train", 1),
        ("train", 2),
        ("validation", 2),
    ]

    other = CliRunner().invoke(app, train("mixed", "--resume", "--mix", "book=1", "--mix", "web=1"))
    assert "another run" in error_of(other)
    unknown = CliRunner().invoke(app, train("fresh", "--mix", "book=1", "--mix", "arxiv=1"))
    assert "which are book, web" in error_of(unknown)
    # Where data of token ids lie does not count, only what they hold.
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    again = CliRunner().invoke(
        app, train("mixed", "--resume", "--mix", "web=1", "--mix", "book=3", data=tmp_path / "elsewhere")
    )
    assert again.exit_code == 0, again.output
    assert "nothing to train: 2 steps are done" in again.output
