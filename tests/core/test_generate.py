"""The runner: greedy tokens as the oracle's, buckets that leave no trace, lanes that do not disturb each other."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import sparda_jax.generate as generate
from sparda_jax.config import ConfigError
from sparda_jax.generate import Runner
from sparda_jax.generation_stats import GenerationStats, PhaseStats
from sparda_jax.in_flight import Lanes
from sparda_jax.logprobs import Logprobs
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from tests import oracle
from tests.core.support import LAYERS, kind_of, load, oracle_mode, skew_for, tokens, toy

DENSE_LEN, NEW = 450, 12
# One that crosses dense_len in its fourth step, one that stays dense, one that is sparse from the start.
LENGTHS = (446, 40, 600)
MODES = (Mode.SPARSE, Mode.SPARDA)


@functools.cache
def runner(mode: Mode) -> Runner:
    return Runner(toy("threshold").decoder, mode=mode)


def prompt(length: int, seed: int = 5) -> list[int]:
    return tokens(1000, seed)[:length].tolist()


def finish(lanes: Lanes, count: int) -> np.ndarray:
    """The first `count` tokens of every lane, [count, batch]."""
    found: list[np.ndarray] = []
    while len(found) < count:
        new = lanes.advance()
        if new is not None:
            found.append(new)
    return np.stack(found)


@functools.cache
def oracle_greedy(mode: Mode, length: int, count: int = NEW) -> tuple[list[int], list[oracle.OracleResult]]:
    """Its tokens, and the results of the prefill and of each step that processed one of them."""
    model = toy("threshold")
    results = [oracle.forward(model.weights, model.config, prompt(length), oracle_mode(mode))]
    found = [int(results[-1].logits[-1].argmax())]
    while len(found) < count:
        results.append(oracle.decode(results[-1].state, found[-1]))
        found.append(int(results[-1].logits[-1].argmax()))
    return found, results


@functools.cache
def batch_run(mode: Mode) -> tuple[np.ndarray, list[GenerationStats]]:
    lanes = runner(mode).start_batch([prompt(n) for n in LENGTHS], [SamplingParams(max_tokens=NEW)] * 3)
    return finish(lanes, NEW), lanes.stats


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_the_oracles(mode: Mode):
    """A ragged batch, dense and sparse requests side by side."""
    found, _ = batch_run(mode)
    for lane, length in enumerate(LENGTHS):
        assert found[:, lane].tolist() == oracle_greedy(mode, length)[0]


def oracle_logprobs(logits: np.ndarray) -> np.ndarray:
    """float64 log_softmax."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_penalties_count_prompt_and_answer():
    """Each token is the best of the oracle's logits, adjusted one token after the other; a neighbour is left alone."""
    model = toy("threshold")
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.6}
    held = oracle_greedy(Mode.SPARDA, LENGTHS[1])[0][0]
    params = [
        SamplingParams(max_tokens=NEW, **penalties),
        SamplingParams(max_tokens=NEW, min_tokens=NEW, stop_token_ids=(held,), logit_bias=((9, -3.0),)),
        SamplingParams(max_tokens=NEW),
    ]
    found = finish(runner(Mode.SPARDA).start_batch([prompt(n) for n in LENGTHS], params), NEW)
    for lane, length in enumerate(LENGTHS[:2]):
        result = oracle.forward(model.weights, model.config, prompt(length), oracle_mode(Mode.SPARDA))
        answer: list[int] = []
        for token in found[:, lane].tolist():
            logits = result.logits[-1].copy()
            if lane == 0:
                known = sorted({*prompt(length), *answer})
                logits[known] = np.where(logits[known] > 0, logits[known] / 1.5, logits[known] * 1.5)
                for old in answer:
                    logits[old] -= 0.6
                logits[sorted(set(answer))] -= 0.4
            else:
                logits[held], logits[9] = -np.inf, logits[9] - 3
            assert token == logits.argmax()
            answer.append(token)
            result = oracle.decode(result.state, token)
    assert found[:, 0].tolist() != oracle_greedy(Mode.SPARDA, LENGTHS[0])[0]
    assert held not in found[:, 1]
    assert found[:, 2].tolist() == oracle_greedy(Mode.SPARDA, LENGTHS[2])[0]


def test_log_probabilities_are_the_oracles():
    """Of the new tokens and of the prompts', whose chunks are scored in pieces; who does not ask gets none."""
    model = toy("threshold")
    params = [
        SamplingParams(max_tokens=3, logprobs=4, prompt_logprobs=2),
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=3, prompt_logprobs=0, logit_bias=((7, 50.0),), logprobs=0),
    ]
    lanes = runner(Mode.SPARDA).start_batch([prompt(n) for n in LENGTHS], params)
    steps = []
    for _ in range(3):
        token = finish(lanes, 1)[0]
        steps.append((token, list(lanes.logprobs)))
    assert [row[1][1] for row in steps] == [None] * 3
    assert lanes.prompt_logprobs(1) is None
    for lane, likeliest in ((0, 2), (2, 0)):
        result = oracle.forward(model.weights, model.config, prompt(LENGTHS[lane]), oracle_mode(Mode.SPARDA))
        of_prompt, found = oracle_logprobs(result.logits), lanes.prompt_logprobs(lane)
        assert found is not None
        assert found.ids.shape == (LENGTHS[lane] - 1, likeliest + 1)
        np.testing.assert_array_equal(found.ids[:, 0], prompt(LENGTHS[lane])[1:])
        exact = np.take_along_axis(of_prompt[:-1], found.ids, axis=1)
        np.testing.assert_allclose(found.values, exact, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(found.ids[:, 1:], np.argsort(-of_prompt[:-1], axis=1)[:, :likeliest])
        for new, rows in steps:
            exact = oracle_logprobs(result.logits[-1])
            row = rows[lane]
            assert row is not None
            assert row.ids[0, 0] == new[lane]
            np.testing.assert_allclose(row.values[0], exact[row.ids[0]], rtol=1e-3, atol=1e-3)
            result = oracle.decode(result.state, int(new[lane]))
    assert {int(new[2]) for new, _ in steps} == {7}


@pytest.mark.parametrize("size", [64, 300, 600])
def test_chunks_of_any_size_are_scored_in_pieces(size: int):
    """The last piece of a chunk that is no multiple of a piece begins before its own rows."""
    run = runner(Mode.SPARDA)
    rng = np.random.default_rng(size)
    config = toy("threshold").decoder.config
    stream = rng.standard_normal((2, size, config.hidden_size)).astype(np.float32)
    targets = rng.integers(0, config.vocab_size, size - 7).astype(np.int32)
    pieces = run.score(jnp.asarray(stream), 1, targets)
    found = Logprobs.concatenate([piece.to_host().rows(rows, 1) for piece, rows in pieces], 1)
    exact = oracle_logprobs(np.asarray(run.model.logits(jnp.asarray(stream[1])), np.float64))[: len(targets)]
    np.testing.assert_array_equal(found.ids[:, 0], targets)
    np.testing.assert_allclose(found.values[:, 0], exact[np.arange(len(targets)), targets], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.values[:, 1], exact.max(axis=1), rtol=1e-4, atol=1e-4)


def count_blocks(results: list[oracle.OracleResult], first: int) -> tuple[list[int], int]:
    """Per layer (KV head, token, block) triples that the oracle read, and those that were visible."""
    read, visible, position = [0] * LAYERS, 0, first
    for result in results:
        rows = np.arange(position, position + len(result.logits))
        position += len(rows)
        here = 2 * int((rows // 64 + 1).sum())
        visible += here
        for layer, ids in enumerate(result.selections):
            read[layer] += here if ids is None else int((ids >= 0).sum())
    return read, visible


@pytest.mark.parametrize("mode", MODES)
def test_stats_count_what_the_oracle_reads(mode: Mode):
    _, stats = batch_run(mode)
    for lane, length in enumerate(LENGTHS):
        _, results = oracle_greedy(mode, length)
        assert stats[lane].mode == mode.value
        for phase, part, first in (
            (stats[lane].prefill, results[:1], 0),
            (stats[lane].decode, results[1:], length),
        ):
            read, visible = count_blocks(part, first)
            assert phase.blocks_read == read
            assert phase.blocks_visible == visible
            assert phase.read_fraction == pytest.approx(sum(read) / (LAYERS * visible))
        assert (stats[lane].prefill.tokens, stats[lane].decode.tokens) == (length, NEW - 1)
    assert stats[2].decode.read_fraction < 0.65
    assert stats[1].decode.read_fraction == 1


def test_stats_as_a_dictionary():
    stats = batch_run(Mode.SPARDA)[1][2]
    found = stats.to_dict()
    assert found["mode"] == "sparda"
    assert found["decode"]["blocks_read"] == stats.decode.blocks_read
    assert found["prefill"]["read_fraction"] == stats.prefill.read_fraction
    empty = PhaseStats(tokens=0, blocks_read=[0, 0], blocks_visible=0)
    assert empty.read_fraction == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_request_alone_gets_the_same(mode: Mode):
    batch, stats = batch_run(mode)
    for lane, length in enumerate(LENGTHS):
        sequence = runner(mode).start(prompt(length), SamplingParams(max_tokens=NEW))
        found = []
        while len(found) < NEW:
            token = sequence.advance()
            found += [] if token is None else [token]
        assert found == batch[:, lane].tolist()
        assert sequence.stats == stats[lane]
        assert (sequence.prompt_tokens, sequence.prefilled) == (length, length)


def test_a_bucket_that_grows_in_mid_decode_leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    """1016 tokens and 24 more: from a cache of 1024 to one of 2048, against a run that has 2048 from the start."""
    ids = [*prompt(1000), *prompt(16, 6)]

    def run() -> tuple[np.ndarray, GenerationStats, Lanes]:
        lanes = runner(Mode.SPARDA).start_batch([ids], [SamplingParams(max_tokens=24)])
        return finish(lanes, 24), lanes.stats[0], lanes

    found, stats, lanes = run()
    assert lanes._cache is not None
    assert lanes._cache.capacity == 2048
    monkeypatch.setattr(generate, "MIN_CAPACITY", 2048)
    expected, expected_stats, lanes = run()
    np.testing.assert_array_equal(found, expected)
    assert stats == expected_stats
    assert len(np.unique(found)) > 3


def test_prefill_in_chunks_over_growing_buckets(monkeypatch: pytest.MonkeyPatch):
    """64 tokens a call, caches of 256 (no selection needed), 512 and 1024: the same tokens and the same counts."""
    expected, stats = batch_run(Mode.SPARDA)
    monkeypatch.setattr(generate, "MIN_CAPACITY", 256)
    monkeypatch.setattr(runner(Mode.SPARDA), "prefill_chunks", (64,))
    lanes = runner(Mode.SPARDA).start_batch([prompt(n) for n in LENGTHS], [SamplingParams(max_tokens=NEW)] * 3)
    calls = 0
    while lanes.prefilled < max(LENGTHS):
        assert (lanes.advance() is None) == (lanes.prefilled < max(LENGTHS))
        calls += 1
        assert lanes.prefilled == min(64 * calls, 600)
    assert calls == 10
    np.testing.assert_array_equal(finish(lanes, NEW - 1), expected[1:])
    assert lanes.stats == stats


def test_finished_lanes_rest_and_disturb_nobody():
    expected, _ = batch_run(Mode.SPARDA)
    lanes = runner(Mode.SPARDA).start_batch([prompt(n) for n in LENGTHS], [SamplingParams(max_tokens=NEW)] * 3)
    found = finish(lanes, 4)
    lanes.finish(0)
    before = lanes.stats[0].decode.tokens
    later = finish(lanes, NEW - 4)
    assert np.all(later[:, 0] == -1)
    assert lanes.stats[0].decode.tokens == before == 3
    np.testing.assert_array_equal(np.concatenate([found, later])[:, 1:], expected[:, 1:])
    np.testing.assert_array_equal(found, expected[:4])


def test_sequences_that_take_turns_do_not_mix():
    expected, _ = batch_run(Mode.SPARDA)
    sequences = [runner(Mode.SPARDA).start(prompt(n), SamplingParams(max_tokens=NEW)) for n in LENGTHS]
    found: list[list[int]] = [[], [], []]
    while any(len(f) < 6 for f in found):
        for sequence, f in zip(sequences, found, strict=True):
            token = sequence.advance()
            f += [] if token is None else [token]
    for lane, f in enumerate(found):
        assert f[:6] == expected[:6, lane].tolist()


def test_sampled_tokens_do_not_depend_on_the_batch():
    params = [SamplingParams(max_tokens=NEW, temperature=1.2, top_p=0.98, seed=s) for s in (3, 4, 5)]
    lanes = runner(Mode.SPARDA).start_batch([prompt(n) for n in LENGTHS], params)
    batch = finish(lanes, NEW)
    for lane in (0, 2):
        alone = runner(Mode.SPARDA).start_batch([prompt(LENGTHS[lane])], [params[lane]])
        np.testing.assert_array_equal(finish(alone, NEW)[:, 0], batch[:, lane])
    assert np.any(batch != batch_run(Mode.SPARDA)[0])


@pytest.mark.parametrize("mode", [Mode.DENSE, Mode.INFINIGEN, Mode.RANDOM, Mode.SPARDA_DECODE_ONLY])
def test_the_other_modes_run(mode: Mode):
    """Through the runner too: dense and InfiniGen against the oracle, the rest by how much they read."""
    model = toy(kind_of(mode))
    calibration = prompt(300) if mode is Mode.INFINIGEN else None
    run = Runner(model.decoder, mode=mode, calibration=calibration)
    if mode is Mode.INFINIGEN:
        run._skew = skew_for(mode)
    lanes = run.start_batch([prompt(620)], [SamplingParams(max_tokens=6)])
    found = finish(lanes, 6)[:, 0].tolist()
    fraction = lanes.stats[0].decode.read_fraction
    assert fraction == (1 if mode is Mode.DENSE else pytest.approx(0.6))
    if mode is Mode.RANDOM:
        return
    result = oracle.forward(model.weights, model.config, prompt(620), oracle_mode(mode))
    for token in found:
        assert token == result.logits[-1].argmax()
        result = oracle.decode(result.state, token)


@pytest.mark.parametrize("max_model_len", [512, 1024])
def test_longrope_factors_follow_the_longest_sequence_served(max_model_len: int):
    """One list for all requests: a short prompt gets the long factors where others may (docs/semantics.md 1.4, Q13)."""
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 512,
    }
    config = oracle.toy_config(num_hidden_layers=1, rope_scaling=scaling)
    weights = oracle.toy_weights(config, seed=3)
    run = Runner(load(config, weights).decoder, mode=Mode.DENSE, max_model_len=max_model_len)
    found = finish(run.start_batch([prompt(300)], [SamplingParams(max_tokens=6)]), 6)[:, 0].tolist()
    greedy = {}
    for table_len in (512, 1024):
        result, greedy[table_len] = oracle.forward(weights, config, prompt(300), "dense", table_len=table_len), []
        while len(greedy[table_len]) < 6:
            greedy[table_len].append(int(result.logits[-1].argmax()))
            result = oracle.decode(result.state, greedy[table_len][-1])
    assert found == greedy[max_model_len]
    assert greedy[512] != greedy[1024]


def test_buckets():
    run = runner(Mode.SPARDA)
    assert [run.capacity_for(n) for n in (1, 1024, 1025, 2048, 2049, 4096)] == [1024, 1024, 2048, 2048, 4096, 4096]
    small = Runner(toy().decoder, max_model_len=100)
    assert small.capacity_for(100) == 128
    odd = Runner(toy().decoder, max_model_len=1500)
    assert (odd.capacity_for(1000), odd.capacity_for(1500)) == (1024, 1536)


def test_chunks_fit_the_rest_and_the_memory(monkeypatch: pytest.MonkeyPatch):
    run = runner(Mode.SPARDA)
    assert run.prefill_chunks == generate.PREFILL_CHUNKS["cpu"]
    monkeypatch.setattr(run, "prefill_chunks", (64, 256, 1024))
    assert [run.chunk_for(1, n, 1024) for n in (1, 64, 65, 256, 257, 5000)] == [64, 64, 256, 256, 1024, 1024]
    # 4 bytes x batch 2 x 8 heads x capacity 1024 are 64 KiB a row.
    monkeypatch.setattr(generate, "MAX_CHUNK_BYTES", 256 * 2**16)
    assert [run.chunk_for(2, n, 1024) for n in (1, 65, 5000)] == [64, 256, 256]
    monkeypatch.setattr(generate, "MAX_CHUNK_BYTES", 1)
    assert run.chunk_for(2, 5000, 1024) == 64


GREEDY = SamplingParams(max_tokens=8)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ([[]], "prompt is empty"),
        ([[5], []], "prompt is empty"),
        ([[5, 96]], r"token ids 5\.\.96, outside vocab_size=96"),
        ([[5, 1.5]], "prompt holds float64 values"),
        ([[-1]], r"token ids -1\.\.-1, outside vocab_size=96"),
        ([[5] * 93], "prompt of 93 tokens and max_tokens=8 exceed max_model_len=100.*--max-model-len"),
    ],
)
def test_bad_prompts_are_named(prompts: list[list[int]], message: str):
    run = Runner(toy().decoder, max_model_len=100)
    with pytest.raises(ValueError, match=message):
        run.start_batch(prompts, [GREEDY] * len(prompts))


def test_a_prompt_that_just_fits_is_taken():
    run = Runner(toy().decoder, max_model_len=100)
    lanes = run.start_batch([[5] * 92], [GREEDY])
    assert finish(lanes, 8).shape == (8, 1)


def test_bad_runners_are_named():
    with pytest.raises(ConfigError, match="mode=infinigen needs calibration tokens"):
        Runner(toy("wide").decoder, mode=Mode.INFINIGEN)
    with pytest.raises(ConfigError, match="max_model_len=1 is not supported"):
        Runner(toy().decoder, max_model_len=1)
