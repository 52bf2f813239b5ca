"""`bench overlap`: sets against plain Python, the replay against a clock walked by hand, and the command end to end."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sparda_jax.assets import BUNDLED_MODEL
from sparda_jax.bench import _overlap_rows as measuring
from sparda_jax.bench import _overlap_sets as sets
from sparda_jax.bench.__main__ import app
from sparda_jax.bench._overlap_replay import replay, selections
from sparda_jax.checkpoint import load_model
from sparda_jax.config import SparseConfig
from sparda_jax.generate import Runner
from sparda_jax.selection import Mode
from tests.core.support import tokens, toy, write_checkpoint
from tests.kernels.clock_oracle import Clock

SPARSE = SparseConfig(window_size=128, topk=5, dense_len=-1)  # 7 blocks, of which 4 are forced
BLOCK, WIDTH = SPARSE.block_size, SPARSE.num_selected_blocks
FIRST = sets.first_choice(SPARSE)
TOKENS = FIRST + 300


def forced_of(position: int) -> set[int]:
    own = position // BLOCK
    return {0, *range(max(own - 2, 0), own + 1)}


def random_ids(count: int, seed: int, keep: float = 0.8) -> np.ndarray:
    """Selections of the tokens from 0 on, ascending, -1 padded; a token keeps some of the one before."""
    rng = np.random.default_rng(seed)
    ids, last = np.full((count, WIDTH), -1), set()
    for position in range(count):
        own, chosen = position // BLOCK, forced_of(position)
        candidates = sorted(set(range(own + 1)) - chosen)
        kept = [block for block in candidates if block in last and rng.random() < keep]
        others = [int(block) for block in rng.permutation(candidates) if block not in kept]
        chosen |= {*(kept + others)[: WIDTH - len(chosen)]}
        ids[position, : len(chosen)] = sorted(chosen)
        last = chosen
    return ids


def as_sets(ids: np.ndarray) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in ids]


def test_sets_are_those_of_plain_python() -> None:
    ids = random_ids(FIRST + 700, seed=0)
    blocks, positions = -(-len(ids) // BLOCK), np.arange(len(ids))
    mask, fixed = sets.membership(ids, blocks), sets.forced(positions, blocks, SPARSE)
    chosen = as_sets(ids)
    assert [set(np.flatnonzero(row)) for row in mask] == chosen
    assert np.flatnonzero(sets.membership(np.array([[-1, 2, 5, -1]]), 6)).tolist() == [2, 5]
    assert [set(np.flatnonzero(row)) for row in fixed] == [forced_of(p) for p in positions.tolist()]
    for distance in (1, 3, 200):
        found = sets.shared(mask[FIRST:], (mask & ~fixed)[FIRST:], distance)
        free = {p: chosen[p] - forced_of(p) for p in range(FIRST + distance, len(ids))}
        np.testing.assert_allclose(found, [len(free[p] & chosen[p - distance]) / len(free[p]) for p in free])
    whole = range(0, len(ids) - 11, 12)
    assert sets.unions(mask).tolist() == [len(set().union(*chosen[p : p + 12])) for p in whole]


def test_independent_unions_are_the_mean_of_draws() -> None:
    """Two groups, one of them across the edge of a block."""
    positions = np.arange(24) + 10 * BLOCK - 19
    rng, draws = np.random.default_rng(1), 2000
    total = np.zeros(2)
    for _ in range(draws):
        for group in range(2):
            union: set[int] = set()
            for position in positions[12 * group : 12 * group + 12].tolist():
                candidates = sorted(set(range(position // BLOCK + 1)) - forced_of(position))
                union |= forced_of(position) | {*rng.choice(candidates, 3, replace=False).tolist()}
            total[group] += len(union)
    np.testing.assert_allclose(sets.independent_unions(positions, SPARSE), total / draws, atol=0.05)


def test_only_tokens_with_a_choice_count() -> None:
    """The first that leaves a visible block out, and none that would be dense in decode."""
    assert FIRST // BLOCK + 1 == WIDTH + 1
    assert (FIRST - 1) // BLOCK + 1 == WIDTH
    assert sets.first_choice(dataclasses.replace(SPARSE, dense_len=900)) == 899


@pytest.mark.parametrize("slots", [WIDTH, 10])
def test_replay_copies_what_the_clock_copies(slots: int) -> None:
    ids = np.stack([random_ids(TOKENS, seed=2, keep=0.2), random_ids(TOKENS, seed=3, keep=0.9)])
    found = replay(ids[None], slots, BLOCK)[0]
    assert found.shape == ids.shape[:2]
    for head, copied in enumerate(found.tolist()):
        clock, chosen = Clock(slots), as_sets(ids[head])
        assert copied == [len(clock.step(sorted(c), p // BLOCK, p // BLOCK)[1]) for p, c in enumerate(chosen)]
        assert sum(copied[FIRST:]) > 0
        if slots == WIDTH:  # such a cache holds what the token before selected, and no more
            new = [len(chosen[p] - chosen[p - 1] - {p // BLOCK}) for p in range(FIRST + 1, len(chosen))]
            assert copied[FIRST + 1 :] == new


def test_replay_needs_slots_for_a_step() -> None:
    with pytest.raises(ValueError, match="slots=6 must hold the 7 blocks"):
        replay(np.full((1, 1, 5, 7), -1), 6, BLOCK)


def test_rows_join_texts_and_layers() -> None:
    def close(found: float | None, expected: float) -> None:
        assert found == pytest.approx(expected, abs=1e-4)

    ids = [np.stack([random_ids(TOKENS, seed=s) for s in some]) for some in ((4, 5, 6, 7), (8, 9, 10, 11))]
    texts = [measuring.measure(selected.reshape(2, 2, TOKENS, WIDTH), SPARSE) for selected in ids]
    rows = {}
    for row in measuring.rows("sparda", texts, SPARSE):
        rows[row.name, row.settings.get("distance", row.settings.get("slots")), row.settings["layer"]] = row
    shares = np.concatenate([text.shared[4] for text in texts], axis=-1)
    row = rows["shared free blocks", 4, 1]
    close(row.value, shares[1].mean())
    close(row.settings["p5"], np.percentile(shares[1], 5))
    close(row.settings["texts"][1], texts[1].shared[4][1].mean())
    close(rows["shared free blocks", 4, "all"].value, shares.mean())
    second = ids[1].reshape(2, 2, TOKENS, WIDTH)[1:]
    np.testing.assert_array_equal(texts[1].missing[7], replay(second, 7, BLOCK)[:, :, FIRST:])
    missing = rows["missing", 7, 1]
    assert missing.value is not None
    close(missing.settings["hit_rate"], 1 - missing.value / 7)
    close(missing.settings["last_quarter"], np.mean([text.missing[7][0, :, 225:] for text in texts]))
    # Where every block has a slot, it comes in as a token's own block, and nothing is ever fetched.
    assert {slots for name, slots, _ in rows if name == "missing"} == {7, 10, 12}
    assert rows["missing", 12, "all"].value == 0
    assert ("missing", 7, 0) not in rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy checkpoint with the bundled tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("toy")
    config = dict(toy().config) | {"vocab_size": 4096}
    weights = dict(toy().weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.resize(weights[name], (4096, weights[name].shape[1]))
    write_checkpoint(folder, config, weights)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / file, folder / file)
    rng = np.random.default_rng(0)
    words = ["stone", "river", "letter", "house", "green", "seven", "walks", "under", "market", "night"]
    (folder / "text.txt").write_text(" ".join(rng.choice(words, 900)) + "\n")
    (folder / "short.txt").write_text("A short text.")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    return folder


def test_selections_do_not_depend_on_chunks(folder: Path) -> None:
    """In chunks that don't divide the text, as in one; and the wrong lengths are refused."""
    runner = Runner(load_model(folder), mode=Mode.SPARDA)
    found = selections(runner, tokens(700))
    runner.prefill_chunks = (1024,)
    np.testing.assert_array_equal(found, selections(runner, tokens(700)))
    assert found.shape == (2, 2, 700, 6)
    assert (found[:, :, 64 * 6 :] >= 0).all()
    for count in (384, 4097):
        with pytest.raises(ValueError, match=f"tokens={count} must be more than 384, and at most 4096"):
            selections(runner, np.zeros(count, np.int32))


def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> tuple[int, str]:
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["overlap", *options.split()], env={"COLUMNS": "300"})
    return done.exit_code, done.output


def test_command_writes_rows_and_a_picture(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    options = "--model . --text text.txt --text text.txt --tokens 704 --json out/rows.json --plot rows.png --commit abc"
    code, output = invoke(folder, monkeypatch, options)
    assert code == 0, output
    record = json.loads((folder / "out/rows.json").read_text())
    assert record["commit"] == "abc"
    assert {row["backend"] for row in record["rows"]} == {"sparda", "sparse"}
    assert {row["name"] for row in record["rows"]} == {"shared free blocks", "union of neighbours", "missing"}
    assert all(len(set(row["settings"]["texts"])) == 1 for row in record["rows"])
    assert "missing, by slots" in output
    assert (folder / "rows.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--text text.txt --modes dense", "--modes 'dense': give one of sparda, sparse, random"),
        ("--text text.txt --tokens 640", "--tokens 640: give 641 to 4096"),
        ("--text text.txt --tokens 4097", "--tokens 4097: give 641 to 4096"),
        ("--text short.txt --tokens 704", "--text short.txt has 5 tokens: give a longer one, or a smaller --tokens"),
        ("--text latin.txt --tokens 704", "--text latin.txt is not UTF-8"),
        ("--text none.txt --tokens 704", "--text none.txt can't be read: No such file or directory"),
        ("--text text.txt --plot rows.pdf", "rows.pdf has to end in .png or .svg"),
        ("--text text.txt --json /", "--json / can't be written"),
        ("--text text.txt --model nowhere", "nowhere is no folder"),
        ("--tokens 704", "Missing option '--text'"),
    ],
)
def test_what_can_not_be_measured_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: str, message: str
) -> None:
    code, output = invoke(folder, monkeypatch, f"--model . {options}")
    assert code == 2, output
    assert message in output
