"""A server whose host pool keeps packed records: chunks, prefixes, waiting sequences and `/stats`."""

import random
from pathlib import Path

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.library import SparDA
from sparda_jax.pallas_kernels.record_copy import unpack_records
from sparda_jax.sampling import SamplingParams
from sparda_jax.serve.engine import Engine
from sparda_jax.serve.executor import Executor
from sparda_jax.serve.memory import describe, plan_server
from sparda_jax.serve.settings import Settings, SettingsError
from tests.kernels.test_packed_records import check
from tests.serve.harness import pool_of, server_process
from tests.serve.in_process import collect, executor_of, ids, prefilled, with_engine
from tests.serve.test_write_ahead import in_pool, records

ONE, BLOCK = SamplingParams(max_tokens=1), 64


@pytest.fixture(scope="module")
def executor(scored_checkpoint: Path) -> Executor:
    model = SparDA.from_pretrained(scored_checkpoint, mode="sparse", max_model_len=1024, dtype="float32")
    # A packed record of 128 rows of 16 has 5/16 of the bytes of one in float32.
    return executor_of(model, max_active=1, slots=5, host_pool_gib=pool_of(20), kv_host_dtype="int8")


def test_chunks_are_packed_and_prefixes_come_back(executor: Executor) -> None:
    assert executor.num_blocks == 64
    executor.blocks.forget()
    prompt = ids(random.Random(1), 405)
    first = executor.start(prompt, ONE)
    while executor.prefill(first) is None:
        pass
    code = KvHostDtype.INT8.code
    assert code is not None
    whole = len(first.written)
    assert whole == 405 // BLOCK
    for layer in range(executor.runner.config.num_layers):
        held = in_pool(executor, first.written, layer)
        assert held.dtype == np.int32
        arrived = np.asarray(unpack_records(jnp.asarray(held.reshape(-1, *held.shape[2:])), 128, np.dtype(np.float32)))
        check(arrived, records(first, layer)[:whole].reshape(arrived.shape), code)
    executor.release(first)
    found, hit = prefilled(executor, [*prompt[:330], *ids(random.Random(2), 70)])
    assert hit == 320
    executor.blocks.forget()
    computed, hit = prefilled(executor, [*prompt[:330], *ids(random.Random(2), 70)])
    assert hit == 0
    for layer in range(executor.runner.config.num_layers):
        for one, other in zip(found[3 * layer : 3 * layer + 2], computed[3 * layer : 3 * layer + 2], strict=True):
            assert not np.array_equal(one, other), "what comes back from the pool is rounded"
            np.testing.assert_allclose(one, other, atol=np.abs(other).max() / 20)


def test_requests_take_turns(executor: Executor) -> None:
    """Three in one lane, each parked and resumed; answers have their length, and no block is left."""
    executor.blocks.forget()
    rng = random.Random(3)
    prompts = [ids(rng, length) for length in (400, 130, 70)]

    async def run(engine: Engine) -> None:
        streams = [await engine.submit(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
        for stream in streams:
            assert len(await collect(stream)) == 40

    with_engine(executor, run, quantum=5)
    assert executor.usage.parked > 3


def test_it_is_told_and_refused_where_it_can_not_be_kept(scored_checkpoint: Path) -> None:
    model = SparDA.from_pretrained(scored_checkpoint, mode="sparse", max_model_len=1024, dtype="float32")
    plan, _ = plan_server(model.runner, Settings(kv_host_dtype="fp8"))
    assert "(--host-pool-gib) in fp8 (--kv-host-dtype): " in describe(plan)
    with pytest.raises(SettingsError, match="--kv-host-dtype fp8 is not allowed with --deterministic"):
        Settings(kv_host_dtype="fp8", deterministic=True)


@pytest.mark.slow
def test_over_http(scored_checkpoint: Path, tmp_path: Path) -> None:
    options = {"mode": "sparse", "max_active": 2, "slots": 5, "kv_host_dtype": "fp8", "warm_up_len": 0}
    with server_process(scored_checkpoint, tmp_path, **options) as server:
        assert httpx.get(f"{server.url}/stats").json()["server"]["kv_host_dtype"] == "fp8"
        body = {"prompt": ids(random.Random(4), 500), "max_tokens": 30, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 30
        assert server.metrics()["fetched_bytes_total"] > 0
        server.wait_until_idle()
