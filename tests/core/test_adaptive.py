"""A number of blocks for each row by its scores, against a slow definition and the constant number."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.adaptive import Budget, select_by_share
from sparda_jax.config import ConfigError
from sparda_jax.foresight import ForecastDesign, Foresight
from sparda_jax.generate import Runner
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from tests.core.support import CAPACITY, tokens, toy

BLOCKS = 16


def slow(scores: np.ndarray, own: int, share: float, most: int, scale: float, init: int, local: int) -> list[int]:
    forced = [b for b in range(own + 1) if b < init or b >= own - local]
    free = sorted((b for b in range(own + 1) if b not in forced), key=lambda b: (-scores[b], b))
    if not free:
        return forced
    weights = np.exp((scores[free] - scores[free].max()) / scale)
    weights /= weights.sum()
    wanted = next((n for n in range(1, len(free)) if weights[:n].sum() >= share), len(free))
    return sorted(forced + free[: min(wanted, most)])


@pytest.mark.parametrize(("share", "most"), [(0.0, 9), (0.5, 9), (0.9, 4), (0.999, 99)])
def test_rows_get_what_the_definition_gives(share: float, most: int) -> None:
    config = toy("deep").decoder.config
    rng = np.random.default_rng(1)
    scores = (6 * rng.normal(size=(2, config.num_kv_heads, 9, BLOCKS))).round(1).astype(np.float32)
    scores[0, 0, :, 3:9] = 4.5  # ties, and more than one of them wanted
    own = rng.integers(0, BLOCKS, (2, 9))
    found = select_by_share(jnp.asarray(scores), jnp.asarray(own), Budget(share=jnp.float32(share), most=most), config)
    sparse = config.sparse
    assert found.shape[-1] == min(sparse.init_blocks + sparse.local_blocks + 1 + most, BLOCKS)
    sizes = set()
    for lane, head, row in np.ndindex(*found.shape[:3]):
        forced = {"init": sparse.init_blocks, "local": sparse.local_blocks}
        expected = slow(scores[lane, head, row], int(own[lane, row]), share, most, config.head_dim**0.5, **forced)
        ids = np.asarray(found[lane, head, row]).tolist()
        assert ids == expected + [-1] * (len(ids) - len(expected))
        sizes.add(len(expected))
    assert len(sizes) > 2


def decode(budget: Budget | None) -> tuple[list[np.ndarray], float]:
    """The keys after four new tokens, and the share of the visible blocks that decode read."""
    model = toy("deep").decoder
    runner = Runner(model, mode=Mode.SPARDA, max_model_len=CAPACITY, budget=budget)
    lanes = runner.start_batch([tokens()[:650].tolist()], [SamplingParams(max_tokens=5)])
    new = 0
    while new < 5:
        new += lanes.advance() is not None
    fraction = lanes.stats[0].decode.read_fraction
    return [np.asarray(layer.k) for layer in lanes.take_cache().layers], fraction


def test_a_runner_reads_what_the_budget_gives() -> None:
    sparse = toy("deep").decoder.config.sparse
    free = sparse.num_selected_blocks - sparse.init_blocks - sparse.local_blocks - 1
    constant, read = decode(None)
    same, as_much = decode(Budget(share=jnp.float32(2.0), most=free))
    for a, b in zip(same, constant, strict=True):
        np.testing.assert_array_equal(a, b)
    assert as_much == read
    assert decode(Budget(share=jnp.float32(0.0), most=free))[1] < read
    wide = Budget(share=jnp.float32(2.0), most=2 * free)
    assert decode(wide)[1] > read
    assert decode(dataclasses.replace(wide, share=jnp.float32(0.0)))[1] < read


def test_modes_without_a_logit_are_refused() -> None:
    model = toy("deep").decoder
    budget = Budget(share=jnp.float32(0.5), most=2)
    weights = jnp.zeros((3, model.config.hidden_size, 2 * model.config.num_kv_heads * model.config.head_dim))
    heads = Foresight(weights=weights, design=ForecastDesign(heads_per_group=2))
    for mode, foresight in ((Mode.SPARSE, None), (Mode.SPARDA, heads)):
        runner = Runner(model, mode=mode, max_model_len=CAPACITY, foresight=foresight, budget=budget)
        with pytest.raises(ConfigError, match="budget by confidence"):
            runner.start([5, 6, 7], SamplingParams(max_tokens=1)).advance()
