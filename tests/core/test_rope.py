"""RoPE of every kind against the oracle, near and far (docs/semantics.md 1.3, 1.4, 13.2, 13.3)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.config import MINICPM41_128K_FACTORS, ModelConfig
from sparda_jax.model import apply_rope, rope_frequencies, rope_tables
from tests import oracle

POSITIONS = np.array([0, 1, 2, 63, 64, 4095, 4096, 65535, 65536, 100_000, 131_071])
RAMP = [1.0 + i / 4 for i in range(64)]
KINDS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 64,
        "long_factor": RAMP,
        "original_max_position_embeddings": 32768,
    },
    "longrope_128k": {
        "rope_type": "longrope",
        "short_factor": list(MINICPM41_128K_FACTORS),
        "long_factor": list(MINICPM41_128K_FACTORS),
        "original_max_position_embeddings": 65536,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384},
    "yarn_tuned": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
    },
}


def hf_config(kind: str, **changes: Any) -> dict[str, Any]:
    """head_dim 128, trained for 65536 positions."""
    defaults = {"hidden_size": 1024, "max_position_embeddings": 65536, "rope_scaling": KINDS[kind]}
    return oracle.toy_config(**defaults | changes)


def tables(config: dict[str, Any], positions: np.ndarray, max_len: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = rope_tables(ModelConfig.from_hf(config), jnp.asarray(positions)[None], max_len)
    assert cos.dtype == sin.dtype == jnp.float32
    return np.asarray(cos)[0], np.asarray(sin)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_len", [None, 32768, 131_072])
def test_tables_are_the_oracles(kind: str, max_len: int | None):
    """The phases are float32 by definition; one unit in the last place of 100 000 is 0.008, and of inv_freq less."""
    config = hf_config(kind)
    found = tables(config, POSITIONS, max_len)
    expected = oracle.rope.tables(config, POSITIONS, max_len)
    near = POSITIONS <= 64
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a[near], b[near], rtol=0, atol=2e-5)
        # Two ways to round inv_freq differ by one part in 2^23, which far positions multiply.
        phase_error = 3 * 2.0**-23 * POSITIONS[:, None] + 2e-6
        assert np.all(np.abs(a - b) <= 1.3 * phase_error)


@pytest.mark.parametrize("kind", KINDS)
def test_far_phases_keep_their_difference(kind: str):
    """At 100 000 neighbouring positions still differ by one step of the fastest channel, within float32."""
    config = hf_config(kind)
    cos, sin = tables(config, np.array([100_000, 100_001]))
    scale = rope_frequencies(ModelConfig.from_hf(config))[2]
    turned = (cos[0] * cos[1] + sin[0] * sin[1]) / scale**2
    position_scale, inv_freq, _ = rope_frequencies(ModelConfig.from_hf(config))
    np.testing.assert_allclose(turned, np.cos(position_scale.astype(np.float64) * inv_freq), rtol=0, atol=0.02)


@pytest.mark.parametrize("jitted", [False, True])
def test_bf16_activations_are_rotated_with_float32_phases(jitted: bool):
    """In bf16 a phase at 100 000 would be wrong by hundreds of radians; so only the result is rounded, once."""
    config = ModelConfig.from_hf(hf_config("default"))
    x = np.random.default_rng(0).standard_normal((1, len(POSITIONS), 3, 128))
    x = jnp.asarray(x, jnp.bfloat16)

    def rotate(x, positions):
        return apply_rope(x, *rope_tables(config, positions))

    found = (jax.jit(rotate) if jitted else rotate)(x, jnp.asarray(POSITIONS)[None])
    assert found.dtype == jnp.bfloat16
    phase = POSITIONS.astype(np.float32)[:, None] * rope_frequencies(config)[1]
    cos, sin = np.cos(phase.astype(np.float64)), np.sin(phase.astype(np.float64))
    exact = oracle.rope.rotate(np.asarray(x[0], np.float64), cos, sin)
    rounded = oracle.Numerics(bf16=True).round(exact)
    # The float32 table may tip a value over to the neighbouring bf16 number, no further.
    np.testing.assert_allclose(np.asarray(found[0], np.float64), exact, rtol=2**-8 * 1.01, atol=1e-4)
    assert np.mean(np.asarray(found[0], np.float64) == rounded) > 0.99


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic"])
def test_position_0_is_the_identity(kind: str):
    config = ModelConfig.from_hf(hf_config(kind))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 2, 128)), jnp.float32)
    np.testing.assert_array_equal(apply_rope(x, *rope_tables(config, jnp.zeros((1, 1), jnp.int32))), x)


def test_pairs_are_half_a_head_apart():
    """A one at channel 3 goes to channels 3 and 67 only; a one at 67 back, with the sign turned."""
    cos, sin = rope_tables(ModelConfig.from_hf(hf_config("default")), jnp.array([[5]]))
    for channel, other, sign in ((3, 67, 1.0), (67, 3, -1.0)):
        found = np.asarray(apply_rope(jnp.zeros((1, 1, 1, 128)).at[..., channel].set(1), cos, sin))[0, 0, 0]
        assert sorted(np.flatnonzero(found)) == [3, 67]
        np.testing.assert_allclose(found[channel], np.cos(5 * 10000 ** (-3 / 64)), atol=1e-6)
        np.testing.assert_allclose(found[other], sign * np.sin(5 * 10000 ** (-3 / 64)), atol=1e-6)


def test_products_depend_on_the_distance_only():
    config = ModelConfig.from_hf(hf_config("longrope_128k"))
    q, k = (jnp.asarray(x, jnp.float32) for x in np.random.default_rng(1).standard_normal((2, 1, 1, 1, 128)))

    def product(i: int, j: int) -> float:
        a, b = (apply_rope(x, *rope_tables(config, jnp.array([[p]]))) for x, p in ((q, i), (k, j)))
        return float(jnp.sum(a * b))

    for shift in (1, 100, 2000):
        assert product(40 + shift, 7 + shift) == pytest.approx(product(40, 7), abs=0.02)
    assert abs(product(40, 7) - product(40, 8)) > 0.1


def test_longrope_with_factors_of_one_is_plain_rope():
    ones = {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64, "original_max_position_embeddings": 65536}
    plain, stretched = hf_config("default"), hf_config("default", rope_scaling={"rope_type": "longrope"} | ones)
    for a, b in zip(tables(plain, POSITIONS), tables(stretched, POSITIONS), strict=True):
        np.testing.assert_array_equal(a, b)


def test_longrope_switches_lists_by_the_longest_sequence_served():
    """Up to the original length the short list, beyond it the long one, for all positions alike (section 1.4, Q13)."""
    config = ModelConfig.from_hf(hf_config("longrope"))
    short, long = (np.float32(1) / np.asarray(f, np.float32) for f in ([1.0] * 64, RAMP))
    np.testing.assert_array_equal(rope_frequencies(config, 32768)[0], short)
    np.testing.assert_array_equal(rope_frequencies(config, 32769)[0], long)
    np.testing.assert_array_equal(rope_frequencies(config)[0], long)  # max_position_embeddings is 65536


def test_longrope_scale():
    twice = KINDS["longrope_128k"]
    config = ModelConfig.from_hf(hf_config("longrope_128k", max_position_embeddings=131_072, rope_scaling=twice))
    expected = math.sqrt(1 + math.log(2) / math.log(65536))
    assert rope_frequencies(config)[2] == pytest.approx(expected, abs=1e-12)
    assert expected == pytest.approx(1.030776, abs=1e-6)
    assert rope_frequencies(ModelConfig.from_hf(hf_config("longrope_128k")))[2] == 1
    cos, sin = rope_tables(config, jnp.array([[7]]))
    np.testing.assert_allclose(cos**2 + sin**2, expected**2, rtol=1e-6)


def test_dynamic_base_grows_beyond_the_trained_length_only():
    config = ModelConfig.from_hf(hf_config("dynamic"))
    plain = rope_frequencies(ModelConfig.from_hf(hf_config("default")))[1]
    np.testing.assert_array_equal(rope_frequencies(config, 65536)[1], plain)
    grown = rope_frequencies(config, 131_072)[1]
    np.testing.assert_allclose(grown[-1] / plain[-1], 1 / 3, rtol=1e-5)  # 2 * 2 - (2 - 1)
    assert grown[0] == plain[0] == 1
