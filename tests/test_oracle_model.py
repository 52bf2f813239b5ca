"""The oracle's whole model: exact identities (docs/semantics.md section 13: 4, 6, 15, 23, 29-34, 47, 49)."""

import numpy as np
import pytest

from tests import oracle

PROMPT, LENGTH = 450, 490
FREE_MODES = ("sparse", "sparda", "sparda_decode_only", "infinigen")


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(3, 96, 1000)


@pytest.fixture(scope="module")
def config() -> dict:
    return oracle.toy_config()


@pytest.fixture(scope="module")
def weights(config: dict) -> dict[str, np.ndarray]:
    return oracle.toy_weights(config, seed=3)


def chosen(ids: np.ndarray) -> list[list[set[int]]]:
    """Per KV head and row, the set of valid blocks."""
    return [[set(row[row >= 0].tolist()) for row in head] for head in ids]


def test_residual_scales_of_an_empty_model():
    """Nothing but embedding, final norm and head: the scales of the muP parametrisation are what is left."""
    config = oracle.toy_config(num_hidden_layers=1)
    weights = oracle.toy_weights(config)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"] = np.zeros_like(weights[f"model.layers.0.{name}.weight"])
    ids = np.array([3, 4, 5])
    x = 12 * weights["model.embed_tokens.weight"].astype(np.float64)[ids]
    norm = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights["model.norm.weight"].astype(np.float64)
    expected = norm / (128 / 64) @ weights["lm_head.weight"].astype(np.float64).T
    found = oracle.forward(weights, config, ids, "dense")
    np.testing.assert_allclose(found.logits, expected, rtol=1e-10, atol=1e-12)


def test_residual_scale_of_attention(config, weights):
    """Token 0 attends to itself: the first layer adds scale_depth / sqrt(layers) of Wo v."""
    found = oracle.forward(
        weights | {"model.layers.0.mlp.down_proj.weight": np.zeros((128, 192))}, config, [7], "sparse"
    )
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    x = 12 * w["model.embed_tokens.weight"][7]
    n = x / np.sqrt((x**2).mean() + 1e-6) * w["model.layers.0.input_layernorm.weight"]
    v = (w["model.layers.0.self_attn.v_proj.weight"] @ n).reshape(2, 1, 16).repeat(4, axis=1).ravel()
    expected = x + 1.4 / np.sqrt(2) * (w["model.layers.0.self_attn.o_proj.weight"] @ v)
    np.testing.assert_allclose(found.hidden[1][0], expected, rtol=1e-10, atol=1e-12)


def test_tied_head_uses_the_embedding(config, weights):
    tied = oracle.forward(weights, config | {"tie_word_embeddings": True}, [5, 6], "dense")
    untied = oracle.forward(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, config, [5, 6], "dense")
    np.testing.assert_array_equal(tied.logits, untied.logits)


@pytest.mark.parametrize("mode", ["dense", "sparse", "sparda"])
def test_decode_equals_prefill(mode, config, weights, tokens):
    """Token by token over window and block boundaries, and with the same blocks chosen."""
    whole = oracle.forward(weights, config, tokens[:LENGTH], mode)
    start = oracle.forward(weights, config, tokens[:PROMPT], mode)
    np.testing.assert_allclose(start.logits, whole.logits[:PROMPT], rtol=0, atol=1e-9)
    steps = oracle.decode_many(start.state, tokens[PROMPT:LENGTH])
    np.testing.assert_allclose(np.concatenate([s.logits for s in steps]), whole.logits[PROMPT:], rtol=0, atol=1e-9)
    if mode == "dense":
        assert whole.selections == [None, None]
        return
    for i in range(2):
        sets = chosen(whole.routing(i).ids)
        for n, step in enumerate(steps):
            assert chosen(step.routing(i).ids) == [[head[PROMPT + n]] for head in sets]
        assert all(len(row) == min(r // 64 + 1, 6) for head in sets for r, row in enumerate(head))


@pytest.mark.parametrize("mode", FREE_MODES)
def test_all_selected_equals_dense(mode, config, weights, tokens):
    """6 blocks hold 384 tokens; one more block and the modes part."""
    dense = oracle.forward(weights, config, tokens[:380], "dense")
    sparse = oracle.forward(weights, config, tokens[:380], mode)
    np.testing.assert_allclose(sparse.logits, dense.logits, rtol=0, atol=1e-9)
    step, dense_step = oracle.decode(sparse.state, 9), oracle.decode(dense.state, 9)
    np.testing.assert_allclose(step.logits, dense_step.logits, rtol=0, atol=1e-9)
    longer = oracle.forward(weights, config, tokens[:600], mode)
    dense = oracle.forward(weights, config, tokens[:600], "dense")
    assert np.abs(longer.logits - dense.logits)[384:].max() > 0.01


@pytest.mark.parametrize("mode", ["dense", "sparse", "sparda"])
def test_later_tokens_change_nothing_before_them(mode, config, weights, tokens):
    other = tokens[:600].copy()
    other[470:] = np.random.default_rng(9).integers(3, 96, 130)
    a, b = (oracle.forward(weights, config, ids, mode) for ids in (tokens[:600], other))
    np.testing.assert_allclose(a.logits[:470], b.logits[:470], rtol=0, atol=1e-9)
    assert np.abs(a.logits[470:] - b.logits[470:]).max() > 0.1
    for x, y in zip(a.selections, b.selections, strict=True):
        if x is not None and y is not None:
            np.testing.assert_array_equal(x[:, :470], y[:, :470])


def test_forecast_goes_to_the_next_layer(tokens):
    """Layer 0 asks with q_curr, layer l with what layer l-1 predicted; the last prediction goes nowhere."""
    config = oracle.toy_config(num_hidden_layers=3)
    weights = oracle.toy_weights(config, seed=3)
    base = oracle.forward(weights, config, tokens[:600], "sparda")

    def changed(name: str) -> list[bool]:
        rng = np.random.default_rng(1)
        other = weights | {name: rng.standard_normal(weights[name].shape)}
        found = oracle.forward(other, config, tokens[:600], "sparda", forced=base.selections)
        return [bool((a != b).any()) for a, b in zip(found.selections, base.selections, strict=True)]

    assert changed("model.layers.0.self_attn.q_curr_proj.weight") == [True, False, False]
    assert changed("model.layers.0.self_attn.q_future_proj.weight") == [False, True, False]
    assert changed("model.layers.1.self_attn.q_future_proj.weight") == [False, False, True]
    assert changed("model.layers.2.self_attn.q_future_proj.weight") == [False, False, False]


def test_forecast_equal_to_the_query_scores_like_it(tokens):
    """One query head per KV head, q_curr = q_proj: the Forecast is the query, RoPE included, so the ranking is its."""
    config = oracle.toy_config(num_attention_heads=2, num_hidden_layers=1, head_dim=16)
    weights = oracle.toy_weights(config)
    weights["model.layers.0.self_attn.q_curr_proj.weight"] = weights["model.layers.0.self_attn.q_proj.weight"]
    sparse, sparda = (oracle.forward(weights, config, tokens[:PROMPT], mode) for mode in ("sparse", "sparda"))
    sparse, sparda = oracle.decode(sparse.state, 5), oracle.decode(sparda.state, 5)
    np.testing.assert_array_equal(sparse.routing(0).score.argsort(-1), sparda.routing(0).score.argsort(-1))
    exp = np.exp(sparda.routing(0).score / 4)
    np.testing.assert_allclose(sparse.routing(0).score, exp / exp.sum(-1, keepdims=True), rtol=1e-9)


def test_decode_only_mode(config, weights, tokens):
    """Prefill is the sparse baseline's; the decode step selects as SparDA does on the same state."""
    sparse, late = (oracle.forward(weights, config, tokens[:600], mode) for mode in ("sparse", "sparda_decode_only"))
    for a, b in zip(sparse.selections, late.selections, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(sparse.logits, late.logits)
    step = oracle.decode(late.state, 9)
    for i in range(2):
        found = step.routing(i)
        prediction = step.q_curr if i == 0 else step.forecasts[0]
        assert prediction is not None
        np.testing.assert_allclose(found.score[:, 0], np.einsum("md,jmd->mj", prediction[0], found.k1), rtol=1e-10)


def test_prompts_without_a_compressed_key(config, weights, tokens):
    found = oracle.forward(weights, config, tokens[:20], "sparda")
    np.testing.assert_array_equal(found.routing(0).ids, 0)
    steps = oracle.decode_many(found.state, tokens[20:50])
    dense = oracle.forward(weights, config, tokens[:50], "dense")
    np.testing.assert_allclose(np.concatenate([s.logits for s in steps]), dense.logits[20:], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("dense_len", "length", "is_dense"), [(450, 449, True), (450, 450, False), (-1, 1, False)])
@pytest.mark.parametrize("mode", ["sparse", "sparda", "infinigen"])
def test_dense_len(mode, dense_len, length, is_dense, weights, tokens):
    config = oracle.toy_config(sparse_config={"dense_len": dense_len})
    found = oracle.forward(weights, config, tokens[:length], mode)
    assert (found.selections[0] is None) == (is_dense and mode != "infinigen")


def test_decode_crosses_dense_len(weights, tokens):
    """The step whose token makes the length reach dense_len is sparse, over keys of the dense part too."""
    config = oracle.toy_config(sparse_config={"dense_len": 455})
    start = oracle.forward(weights, config, tokens[:PROMPT], "sparda")
    steps = oracle.decode_many(start.state, tokens[PROMPT:460])
    assert [step.selections[0] is None for step in steps] == [True] * 4 + [False] * 6
    k1, state = steps[4].routing(1).k1, steps[4].state
    np.testing.assert_array_equal(k1, oracle.compress_keys(state.layers[1].k))


def test_quirk_q3_lets_short_sequences_of_a_batch_name_future_blocks(config, weights, tokens):
    clean = oracle.forward(weights, config, tokens[:PROMPT], "sparse", batch_max_len=1000)
    alone = oracle.forward(weights, config, tokens[:PROMPT], "sparse")
    compat = oracle.forward(weights, config, tokens[:PROMPT], "sparse", batch_max_len=1000, ref_compat=True)
    rows = np.arange(PROMPT)[:, None] // 64
    np.testing.assert_array_equal(clean.routing(0).ids, alone.routing(0).ids)
    assert (clean.routing(0).ids <= rows).all()
    assert (compat.routing(0).ids > rows).any()
    assert compat.routing(0).pooled.shape[-1] == 16


def test_bf16_rounds_and_float32_sums_stay_close(config, weights, tokens):
    exact = oracle.forward(weights, config, tokens[:300], "dense").logits
    single = oracle.forward(weights, config, tokens[:300], "dense", dtype=np.float32).logits
    rounded = oracle.forward(weights, config, tokens[:300], "dense", bf16=True).logits
    assert 0 < np.abs(single - exact).max() < 1e-4
    assert 1e-3 < np.abs(rounded - exact).max() < 0.2
    assert (rounded == oracle.Numerics(bf16=True).round(rounded)).all()


def test_infinigen_decode_scores(config, weights, tokens):
    """With the identity as basis and every channel, the score is the sum of the heads' products over sqrt(channels)."""
    config = config | {"sparse_config": config["sparse_config"] | {"infinigen_num_channels": 16}}
    basis = [np.broadcast_to(np.eye(16), (2, 16, 16))] * 2
    start = oracle.forward(weights, config, tokens[:PROMPT], "infinigen", basis=basis)
    step = oracle.decode(start.state, 9)
    sparse = oracle.decode(oracle.forward(weights, config, tokens[:PROMPT], "sparse").state, 9)
    np.testing.assert_allclose(step.routing(0).score, sparse.routing(0).score, rtol=1e-9)
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    n = oracle.rms_norm(step.hidden[0], w["model.layers.0.input_layernorm.weight"], 1e-6)
    q_hat = (n @ w["model.layers.1.self_attn.q_proj.weight"].T).reshape(1, 8, 16)
    q_hat = oracle.rope.rotate(q_hat, *oracle.rope.tables(config, np.array([PROMPT])))
    keys = start.state.layers[1].k
    for m in range(2):
        expected = (keys[:, m] @ q_hat[0, 4 * m : 4 * m + 4].T).sum(axis=-1) / 4
        np.testing.assert_allclose(step.routing(1).score[m, 0], [*expected, 0.0], rtol=1e-9, atol=1e-12)


def test_infinigen_ignores_order_and_sign_of_the_basis(config, weights, tokens):
    start = oracle.forward(weights, config, tokens[:PROMPT], "infinigen")
    basis = [layer.basis for layer in start.state.layers]
    rng = np.random.default_rng(0)
    mixed = []
    for a in basis:
        assert a is not None
        np.testing.assert_allclose(np.einsum("mdc,mde->mce", a, a), np.stack([np.eye(16)] * 2), atol=1e-12)
        mixed.append(a[:, :, rng.permutation(16)] * rng.choice([-1.0, 1.0], 16))
    other = oracle.forward(weights, config, tokens[:PROMPT], "infinigen", basis=mixed)
    for a, b in zip(
        oracle.decode_many(start.state, tokens[PROMPT:470]),
        oracle.decode_many(other.state, tokens[PROMPT:470]),
        strict=True,
    ):
        np.testing.assert_allclose(a.routing(1).score, b.routing(1).score, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(a.routing(1).ids, b.routing(1).ids)
    channels = start.state.layers[1].channels
    assert channels is not None
    assert channels.shape == (2, 4)


def test_infinigen_basis_diagonalises_the_mean_query():
    """A's columns hold the mean query's right singular vectors, the largest last."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((60, 4, 8)), rng.standard_normal((60, 2, 8))
    a = oracle.infinigen.calibrate(q, k)
    for m in range(2):
        skewed = q[:, 2 * m : 2 * m + 2].mean(axis=1) @ a[m]
        gram = skewed.T @ skewed
        np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-10)
        assert np.diff(gram.diagonal()).min() > 0


def test_infinigen_channels_and_scores_by_hand():
    """The channels with the largest sums of |skewed query|, and the head-summed products on just those."""
    rng = np.random.default_rng(0)
    q, k, q_hat = rng.standard_normal((30, 4, 8)), rng.standard_normal((30, 2, 8)), rng.standard_normal((1, 4, 8))
    a = oracle.infinigen.calibrate(q, k)
    channels = oracle.infinigen.choose_channels(q, a, 3)
    partial = oracle.infinigen.partial_keys(k, a, channels)
    score = oracle.infinigen.token_score(q_hat, a, channels, partial)
    for m in range(2):
        heads = (2 * m, 2 * m + 1)
        weight = [sum(abs(q[t, h] @ a[m][:, c]) for h in heads for t in range(30)) for c in range(8)]
        best = sorted(sorted(range(8), key=lambda c: -weight[c])[:3])
        assert channels[m].tolist() == best
        for t in range(30):
            product = sum((q_hat[0, h] @ a[m][:, c]) * (k[t, m] @ a[m][:, c]) for h in heads for c in best)
            np.testing.assert_allclose(score[m, 0, t], product / np.sqrt(3), rtol=1e-9, atol=1e-12)


def test_bad_calls_are_named(config, weights):
    with pytest.raises(ValueError, match="'spars'"):
        oracle.forward(weights, config, [3], "spars")
    with pytest.raises(ValueError, match="tokens is empty"):
        oracle.forward(weights, config, [], "dense")
    base = {name: w for name, w in weights.items() if "q_future" not in name and "q_curr" not in name}
    with pytest.raises(ValueError, match="q_curr_proj"):
        oracle.forward(base, config, [3] * 40, "sparda")
