"""The next turn of a chat: what decode has stored is read back where a prompt's tokens would have stored the same."""

import random
from pathlib import Path

import numpy as np
import pytest

from sparda_jax.library import SparDA
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.engine import Engine
from tests.serve.harness import MAX_MODEL_LEN, pool_of
from tests.serve.in_process import collect, executor_of, ids, prefilled, with_engine
from tests.serve.tiny_checkpoint import write_checkpoint

ANSWER = 100


@pytest.fixture(scope="module")
def foreseeing_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharp attention, so that it shows which blocks were read: four of them, from 256 tokens on."""
    sparse = {"init_blocks": 1, "window_size": 64, "topk": 3, "dense_len": 256}
    folder = tmp_path_factory.mktemp("foreseeing")
    return write_checkpoint(folder, has_forecast=True, sparse_config=sparse, initializer_range=0.4)


@pytest.mark.parametrize(
    ("mode", "hits"),
    [
        # Whole blocks of prompt and answer; of the longest chat in the second mode only those of the prompt, since
        # behind four blocks decode selects by the Forecast, and prefill does not.
        pytest.param("sparda", {100: 192, 170: 256, 300: 384}, marks=pytest.mark.slow),
        ("sparda-decode-only", {100: 192, 170: 256, 300: 256}),
    ],
)
def test_a_history_is_what_a_prompt_would_be(foreseeing_checkpoint: Path, mode: str, hits: dict[int, int]) -> None:
    model = SparDA.from_pretrained(foreseeing_checkpoint, mode=mode, max_model_len=MAX_MODEL_LEN)
    executor = executor_of(model, max_active=1, slots=5, host_pool_gib=pool_of(20))
    rng = random.Random(1)
    for length, expected_hit in hits.items():
        chat = ids(rng, length)

        async def answer(engine: Engine, chat: list[int] = chat) -> None:
            chat += await collect(await engine.submit(list(chat), SamplingParams(max_tokens=ANSWER)))

        with_engine(executor, answer)
        assert len(chat) == length + ANSWER
        read, hit = prefilled(executor, [*chat, 5])
        executor.blocks.forget()
        computed, _ = prefilled(executor, [*chat, 5])
        assert hit == expected_hit
        for one, other in zip(read, computed, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-3)
