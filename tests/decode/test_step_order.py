"""What in a decode step waits for what, where that is a choice; the graph itself is checked in tests/h200."""

import functools

import jax
import jax.numpy as jnp
import pytest

from sparda_jax.cache.host_dtype import KvHostDtype, host_record
from sparda_jax.cache.state import CacheShape, empty_state
from sparda_jax.decode import _fetch_is_long
from sparda_jax.shapes import SHAPES


@pytest.mark.parametrize(
    ("lanes", "slots", "kv_host_dtype", "expected"),
    [
        pytest.param(4, 160, "auto", False, id="the weights take longer than the copies"),
        pytest.param(8, 160, "auto", True, id="the copies take longer"),
        pytest.param(8, 160, "int8", False, id="half the bytes do not"),
        pytest.param(16, 160, "fp8", True, id="twice of that do"),
        pytest.param(16, 2048, "auto", False, id="nothing is copied"),
    ],
)
def test_attention_waits_for_scores_only_where_the_fetch_is_long(
    lanes: int, slots: int, kv_host_dtype: str, expected: bool
) -> None:
    config = SHAPES["minicpm4.1-8b"]
    shape = CacheShape(lanes=lanes, max_blocks=2048, num_blocks=lanes * 2048, slots_per_lane=slots)
    state = jax.eval_shape(functools.partial(empty_state, config, shape, jnp.bfloat16))
    record = host_record((128, 128), jnp.dtype(jnp.bfloat16), KvHostDtype(kv_host_dtype))
    assert _fetch_is_long(config, state, record.size * record.dtype.itemsize) == expected
