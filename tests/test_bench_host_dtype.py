"""What `bench host-dtype` compares: answers of lanes all of whose blocks were on the host, and logits along them."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sparda_jax.bench._host_dtype_runs import decode, enter, lanes_for, prefill
from sparda_jax.bench.host_dtype import Differences, compare, measure
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.generate import Runner
from sparda_jax.pretrain.tasks import EvalPrompt
from sparda_jax.selection import Mode
from sparda_jax.streaming import NEWEST
from tests.core.support import tokens
from tests.decode.support import CAPACITY, CONFIG, LENGTHS, MODEL, SEEDS, WIDTH, decoded

MOST = 9


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(MODEL, mode=Mode.SPARDA, max_model_len=CAPACITY)


def prompt(number: int) -> list[int]:
    return tokens(1000, SEEDS[number])[: LENGTHS[number]].tolist()


@pytest.mark.slow
def test_exact_records_change_nothing_and_packed_ones_the_logits(runner: Runner) -> None:
    filled = [prefill(runner, prompt(number)) for number in (0, 1)]
    exact_lanes, packed_lanes = (lanes_for(runner, 2, kind) for kind in (KvHostDtype.AUTO, KvHostDtype.INT8))
    # One prompt's third token ends it: the other one goes on.
    ends = [int(decoded(Mode.SPARDA, 1)[0][1])]
    assert ends[0] not in decoded(Mode.SPARDA, 0)[0][:MOST]
    exact = decode(exact_lanes, filled, ends=ends, most=MOST)
    for lane, length in ((0, MOST), (1, 3)):
        assert exact.tokens[lane][1:] == decoded(Mode.SPARDA, lane)[0][: length - 1].tolist()
    forced = decode(packed_lanes, filled, ends=ends, most=MOST, forced=exact.tokens)
    assert forced.tokens == exact.tokens
    found = Differences()
    compare(forced, exact, found)
    steps = [(step, lane) for lane, count in ((0, MOST - 1), (1, 2)) for step in range(count)]
    assert found.positions == len(steps) == found.settings()["positions"]
    pairs = [[run.logits[step][lane].astype(np.float64) for run in (forced, exact)] for step, lane in steps]
    errors, divergences, same = [], [], 0
    for ours, theirs in pairs:
        q, p = (np.exp(x) / np.exp(x).sum() for x in (ours, theirs))
        errors.append(np.abs(ours - theirs))
        divergences.append(math.fsum(p * np.log(p / q)))
        same += int(ours.argmax() == theirs.argmax())
    assert found.total == pytest.approx(np.sum(errors))
    assert found.largest == np.max(errors) > 0
    assert found.spread == pytest.approx(sum(theirs.std() for _, theirs in pairs))
    assert found.divergence == pytest.approx(sum(divergences), rel=1e-6)
    assert found.largest_divergence == pytest.approx(max(divergences), rel=1e-6)
    assert found.same_top == same
    # Afterwards the same lanes take other prompts.
    again = decode(exact_lanes, filled[:1], ends=[], most=4)
    assert again.tokens[0] == exact.tokens[0][:4]
    enter(packed_lanes, filled)
    packed_lanes.step()
    copied = np.asarray(packed_lanes.copies)
    assert (copied == WIDTH - NEWEST).mean() > 0.8, "nearly all that the first step reads is fetched"


def test_a_row_says_what_was_counted(runner: Runner) -> None:
    """Of a tokenizer that spells ids out; the first value is in the first answer, the other one in none."""
    spelled = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)), eos_token_id=None)
    config = SimpleNamespace(eos_token_ids=())
    model = cast(Any, SimpleNamespace(config=config, tokenizer=spelled, runner=runner))
    values = [(str(decoded(Mode.SPARDA, 0)[0][5]),), ("never",)]
    asked = [
        EvalPrompt(messages=[], ids=np.array(prompt(number)), expected=value, depth=0.5)
        for number, value in enumerate(values)
    ]
    # Its answers have 96 tokens, and so must the toy have room.
    rows = {(row.name, row.backend): row for row in measure(model, asked, length=700, batch=2)}
    assert list(rows) == [
        ("needle recall", "auto"),
        *[(name, kind) for kind in ("int8", "fp8") for name in ("needle recall", "KL of auto")],
    ]
    auto = rows["needle recall", "auto"]
    assert (auto.value, auto.settings["right"]) == (0.5, "1/2")
    assert auto.settings["record_bytes"] == 2 * CONFIG.sparse.block_size * CONFIG.head_dim * 4
    assert rows["KL of auto", "int8"].settings["positions"] == 2 * 95
    assert (rows["KL of auto", "int8"].value or 0) > 0
