"""The oracle's layers on hand-made cases (docs/semantics.md section 13: 1-3, 8-9, 11, 36-39)."""

import math

import ml_dtypes
import numpy as np
import pytest

from tests import oracle

BF16 = oracle.Numerics(bf16=True)


def bf16(x: np.ndarray | float) -> np.ndarray:
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def test_rms_norm_rounds_twice_in_bf16():
    rng = np.random.default_rng(0)
    x, weight = bf16(rng.standard_normal((50, 64))), bf16(1 + 0.1 * rng.standard_normal(64))
    exact = np.array([row / math.sqrt(sum(a * a for a in row) / 64 + 1e-6) * weight for row in x])
    np.testing.assert_allclose(oracle.rms_norm(x, weight, 1e-6), exact, rtol=1e-12)
    twice = bf16(bf16(exact / weight) * weight)
    np.testing.assert_array_equal(oracle.rms_norm(x, weight, 1e-6, BF16), twice)
    assert (twice != bf16(exact)).any()


def rope_config(**scaling: object) -> dict[str, object]:
    return {
        "hidden_size": 128,
        "num_attention_heads": 1,
        "rope_theta": 10000.0,
        "max_position_embeddings": 65536,
        "rope_scaling": scaling or None,
    }


def test_rope_position_0_is_identity_and_pairs_are_half_apart():
    cos, sin = oracle.rope.tables(rope_config(), np.array([0, 7]))
    x = np.random.default_rng(0).standard_normal((2, 3, 128))
    np.testing.assert_array_equal(oracle.rope.rotate(x, cos, sin)[0], x[0])
    one_hot = np.zeros((2, 1, 128))
    one_hot[:, :, 3] = 1
    turned = oracle.rope.rotate(one_hot, cos, sin)[1, 0]
    assert np.flatnonzero(turned).tolist() == [3, 67]
    angle = 7 * 10000.0 ** (-6 / 128)
    np.testing.assert_allclose(turned[[3, 67]], [math.cos(angle), math.sin(angle)], rtol=1e-6)


def test_rope_inner_products_depend_on_the_distance_only():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 128))
    products = []
    for start in (0, 5, 900):
        cos, sin = oracle.rope.tables(rope_config(), np.array([start, start + 11]))
        products.append(np.sum(oracle.rope.rotate(q, cos[:1], sin[:1]) * oracle.rope.rotate(k, cos[1:], sin[1:])))
    np.testing.assert_allclose(products, products[0], rtol=1e-3)


def test_longrope_with_factors_1_is_plain():
    ones = [1.0] * 64
    scaling = {"rope_type": "longrope", "short_factor": ones, "long_factor": ones}
    positions = np.arange(0, 65536, 997)
    plain = oracle.rope.tables(rope_config(), positions)
    same = oracle.rope.tables(rope_config(**scaling, original_max_position_embeddings=65536), positions)
    np.testing.assert_array_equal(same, plain)


def test_longrope_scale_and_switch_of_factors():
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    config = rope_config(**scaling, original_max_position_embeddings=65536)
    plain = oracle.rope.tables(rope_config(), np.array([6]))[0]
    np.testing.assert_array_equal(oracle.rope.tables(config, np.array([6]), 65536)[0], plain)
    np.testing.assert_allclose(oracle.rope.tables(config, np.array([12]), 65537)[0], plain, rtol=1e-6)
    cos, _ = oracle.rope.tables(config | {"max_position_embeddings": 131072}, np.array([0]))
    np.testing.assert_allclose(cos, 1.030776406, rtol=1e-8)


def test_linear_divides_positions():
    config = rope_config(rope_type="linear", factor=4.0)
    found = oracle.rope.tables(config, np.array([40]))
    np.testing.assert_allclose(found, oracle.rope.tables(rope_config(), np.array([10])), rtol=1e-5)


def test_dynamic_raises_the_base_past_the_limit():
    config = rope_config(type="dynamic", factor=2.0)
    positions = np.array([9])
    np.testing.assert_array_equal(
        oracle.rope.tables(config, positions, 1000), oracle.rope.tables(rope_config(), positions)
    )
    larger_base = rope_config() | {"rope_theta": 10000.0 * 3 ** (128 / 126)}
    found = oracle.rope.tables(config, positions, 2 * 65536)
    np.testing.assert_allclose(found, oracle.rope.tables(larger_base, positions), rtol=1e-5)


def test_yarn_ramp_and_scale():
    # The corrections for 32 turns and 1 turn over 32768 tokens are channels 35.39 and 59.48 of 64.
    config = rope_config(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    cos, sin = oracle.rope.tables(config, np.array([1]))
    scale = 0.1 * math.log(4) + 1
    np.testing.assert_allclose(np.hypot(cos, sin), scale, rtol=1e-12)
    angle = np.arctan2(sin, cos)[0] * 10000.0 ** (np.arange(64) / 64)
    np.testing.assert_allclose(angle[:36], 1, rtol=1e-6)
    np.testing.assert_allclose(angle[60:], 0.25, rtol=1e-6)
    np.testing.assert_allclose(angle[48], 13 / 25 / 4 + 12 / 25, rtol=1e-6)


def test_unknown_rope_type_is_named():
    with pytest.raises(ValueError, match="'llama3'"):
        oracle.rope.tables(rope_config(rope_type="llama3", factor=2.0), np.array([1]))


@pytest.mark.parametrize(("length", "n1"), [(0, 0), (31, 0), (32, 1), (47, 1), (48, 2), (63, 2), (64, 3)])
def test_number_of_compressed_keys(length: int, n1: int):
    assert oracle.num_compressed(length) == n1
    k = np.random.default_rng(0).standard_normal((length, 2, 4))
    k1 = oracle.compress_keys(k)
    assert k1.shape == (n1, 2, 4)
    for j in range(n1):
        np.testing.assert_allclose(k1[j], sum(k[16 * j + i] for i in range(32)) / 32, rtol=1e-12)


@pytest.mark.parametrize(("length", "n2"), [(127, 0), (128, 1), (191, 1), (192, 2)])
def test_number_of_second_level_keys(length: int, n2: int):
    assert oracle.num_compressed(length, 128, 64) == n2


@pytest.mark.parametrize("prompt", [5, 31, 32, 40, 47])
def test_incremental_compression_equals_the_batch_definition(prompt: int):
    k = bf16(np.random.default_rng(prompt).standard_normal((prompt + 40, 2, 4)))
    rolling = oracle.RollingKeys.prefill(k[:prompt], numerics=BF16)
    for t in range(prompt, prompt + 40):
        rolling = rolling.append(k[t])
        np.testing.assert_array_equal(rolling.k1, oracle.compress_keys(k[: t + 1], numerics=BF16))
        assert len(rolling.k1) == max(0, (t + 1) // 16 - 1)


def test_compression_accumulates_in_more_than_bf16():
    # 256 + 31 ones: in bf16 each 1 would be lost against 256.
    k = np.ones((32, 1, 1))
    k[0] = 256
    np.testing.assert_array_equal(oracle.compress_keys(k, numerics=BF16), bf16(287 / 32))
    assert bf16(287 / 32) != bf16(256 / 32)


def naive_attention(q, k, v, allowed):
    """Loops over everything; allowed(m, t, s) -> bool."""
    out = np.zeros_like(q)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            m = h // (q.shape[1] // k.shape[1])
            keys = [s for s in range(len(k)) if allowed(m, t, s)]
            weight = [math.exp(float(q[t, h] @ k[s, m]) / math.sqrt(q.shape[2])) for s in keys]
            out[t, h] = sum(w * v[s, m] for w, s in zip(weight, keys, strict=True)) / sum(weight)
    return out


@pytest.mark.parametrize("q_len", [40, 7, 1])
def test_block_sparse_attention_is_a_masked_softmax(q_len: int):
    """Own sets per KV head and token, -1, duplicates, any order; queries aligned at the end of the keys."""
    rng = np.random.default_rng(q_len)
    kv_len, block = 40, 8
    q = rng.standard_normal((q_len, 4, 6))
    k, v = rng.standard_normal((2, kv_len, 2, 6))
    ids = rng.integers(-1, 5, (2, q_len, 4))
    ids[:, :, 2] = (np.arange(q_len) + kv_len - q_len) // block
    ids[:, :, 3] = ids[:, :, 0]

    def allowed(m, t, s):
        return s // block in ids[m, t] and s <= t + kv_len - q_len

    found = oracle.block_sparse_attention(q, k, v, ids, block)
    np.testing.assert_allclose(found, naive_attention(q, k, v, allowed), rtol=1e-10, atol=1e-12)
    dense = naive_attention(q, k, v, lambda m, t, s: s <= t + kv_len - q_len)
    np.testing.assert_allclose(oracle.dense_attention(q, k, v), dense, rtol=1e-10, atol=1e-12)


def test_row_0_attends_to_itself_only():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 9, 1, 4))
    np.testing.assert_allclose(oracle.dense_attention(q, k, v)[0], v[0], rtol=1e-12)
