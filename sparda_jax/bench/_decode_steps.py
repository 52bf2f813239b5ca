"""Decode steps of a case: made without a checkpoint, compiled, run, timed."""

import dataclasses
import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from sparda_jax.bench._decode_cases import PROFILED_STEPS, SAMPLES, WARMUP, Case, check_misses, lists_with
from sparda_jax.cache.state import CacheShape, DecodeState, LayerState, empty_state
from sparda_jax.config import ModelConfig
from sparda_jax.lane_step import state_first, step_and_sample
from sparda_jax.model import Decoder
from sparda_jax.pallas_kernels.record_copy import device_as_host
from sparda_jax.profiling import profile_options
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.selection import Mode
from sparda_jax.telemetry import DecodeStats, HostClock


def full_state(config: ModelConfig, case: Case, dtype: jnp.dtype) -> DecodeState:
    """Lanes whose last block has just begun, with random keys, and tables that scatter a lane over the pool."""
    shape, block_size = case.shape(config), config.sparse.block_size
    channels = case.plan.mode.partial_channels(config)
    like = jax.eval_shape(lambda: empty_state(config, shape, dtype, partial_channels=channels))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def random(key: Array, size: tuple[int, ...], dtype: jnp.dtype) -> Array:
        """A million numbers over and over: drawing all of them could take several times their room."""
        numbers = jax.random.normal(key, (1 << 20,), dtype)
        return numbers[jnp.arange(math.prod(size), dtype=jnp.uint32) % numbers.size].reshape(size)

    # The layers after the first are alike.
    empty = [
        jax.jit(lambda layer=layer: empty_state(config, shape, dtype).layers[layer].residency)
        for layer in range(min(2, config.num_layers))
    ]
    used = jnp.full(shape.lanes, case.slots_per_lane(config), jnp.int32)

    def filled(index: int, layer: LayerState) -> LayerState:
        """Made in place: with everything empty first, a device full of slots has no room left for their contents."""
        key = jax.random.key(index)
        tables = empty[min(index, 1)]()
        if index:
            tables = dataclasses.replace(tables, count=jnp.minimum(tables.count, used))
        layer = dataclasses.replace(layer, residency=None)
        layer = dataclasses.replace(jax.tree.map(lambda x: random(key, x.shape, x.dtype), layer), residency=tables)
        if shape.slots_of(index) < shape.max_blocks:
            return layer
        # As layer 0 is after admission: every block in a slot, so that nothing is ever fetched.
        lane, head, block = np.ogrid[: shape.lanes, : config.num_kv_heads, : shape.max_blocks]
        slots = (lane * shape.max_blocks + block) * config.num_kv_heads + head
        held = np.tile(np.arange(shape.max_blocks, dtype=np.int32), (config.num_kv_heads, shape.lanes))
        tables = dataclasses.replace(
            tables, slot_of_block=jnp.asarray(slots, jnp.int32), block_of_slot=jnp.asarray(held)
        )
        return dataclasses.replace(layer, residency=tables)

    state = jax.jit(lambda: dataclasses.replace(empty_state(config, shape, dtype), layers=()))()
    table = np.random.default_rng(0).permutation(shape.num_blocks).reshape(shape.lanes, shape.max_blocks)
    last = shape.max_blocks - 1
    return dataclasses.replace(
        state,
        layers=tuple(filled(index, layer) for index, layer in enumerate(like.layers)),
        block_table=jnp.asarray(table, jnp.int32),
        lengths=jnp.full(shape.lanes, last * block_size, jnp.int32),
        live=jnp.ones(shape.lanes, bool),
        written=jnp.full(shape.lanes, last, jnp.int32),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What `measure` found.

    Attributes:
        seconds: of a step.
        resident: of a step of the same program that finds everything in the slots; None where layers are streamed.
        compiling: seconds of compiling the step.
        stats: counts of the timed steps, and their launches.
        compared: of other steps, with each layer's own selection; None where the lists are set, or hold everything.
        kv_heads: of a layer.
    """

    seconds: float
    resident: float | None
    compiling: float
    stats: DecodeStats
    compared: DecodeStats | None
    kv_heads: int

    @property
    def misses(self) -> float:
        """Blocks that a KV head missed on average, in all layers but the first."""
        return float(self.stats.copied[1:].mean()) / self.stats.steps / self.kv_heads

    def settings(self) -> dict[str, Any]:
        """What a row says of it."""
        stats = self.stats
        found = {
            "misses": round(self.misses, 2),
            "hit_rate": None if stats.hit_rate is None else round(stats.hit_rate, 4),
            "copied_mib": round(stats.bytes_copied / stats.steps / 2**20, 2),
            "ms": round(1e3 * self.seconds, 3),
            "exposed_wait_ms": None if self.resident is None else round(1e3 * (self.seconds - self.resident), 3),
            "late": f"{stats.late}/{stats.launches}",
            "host_gap_ms": round(1e3 * (stats.host_gap or 0), 3),
            "compile_s": round(self.compiling, 1),
        }
        if self.compared and self.compared.recall is not None:
            found["recall"] = round(self.compared.recall, 4)
        if self.compared and self.compared.wasted_share is not None:
            found["wasted"] = round(self.compared.wasted_share, 4)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled step, and the seconds that compiling it took."""

    step: Any
    seconds: float


def compile_step(model: Decoder, case: Case, *, profiled: bool = False, compares: bool = False) -> Program:
    """Compiles the step of a case, which needs none of its arrays; how many blocks it misses is an argument.

    Args:
        model: the weights.
        case: what is to be measured.
        profiled: a profile is to show the kernels in its graph.
        compares: as of `DecodePlan`.
    """
    config, dtype, shape = model.config, model.embed_tokens.dtype, case.shape(model.config)
    plan = dataclasses.replace(case.plan, compares=compares, profiled=profiled)
    channels = case.plan.mode.partial_channels(config)
    state = jax.eval_shape(lambda: empty_state(config, shape, dtype, partial_channels=channels))
    held = case.host_record(config, dtype)
    pool = jax.ShapeDtypeStruct((_pool_records(config, shape), *held.shape), held.dtype, sharding=_pinned())
    ids = jax.ShapeDtypeStruct((case.batch,), jnp.int32)
    sampling = jax.eval_shape(lambda: SamplingState.of([SamplingParams(seed=0)] * case.batch))
    graphdef, weights = nnx.split(model)
    start = (shape.max_blocks - 1) * config.sparse.block_size

    def step(weights, state, pools, tokens, new_blocks, sampling, misses):
        choose = lists_with(misses, config, shape.max_blocks, start) if case.sets_misses else None
        one = state_first(functools.partial(step_and_sample, graphdef, plan, choose=choose))
        # A shape with a sharding says where an array is, but its type does not.
        pools = tuple(device_as_host(pool) for pool in pools)
        return one(weights, state, pools, tokens, new_blocks, sampling)

    began = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=1).lower(
        weights, state, (pool,) * config.num_layers, ids, ids, sampling, jax.ShapeDtypeStruct((), jnp.float32)
    )
    compiled = lowered.compile(compiler_options=plan.compiler_options)
    return Program(step=compiled, seconds=time.perf_counter() - began)


def _pool_records(config: ModelConfig, shape: CacheShape) -> int:
    return shape.num_blocks * config.num_kv_heads


def _pinned() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def measure(model: Decoder, case: Case, *, profile: Path | None = None, program: Program | None = None) -> Measured:
    """Times the steps of a case, with its misses and without any.

    Args:
        model: the weights.
        case: what is measured.
        profile: a folder for a JAX profile of a few more steps with misses; writing one slows nothing else down.
        program: of `compile_step`, for this case or one that differs in slots that it has room for, or in misses that
            are set; None: it is compiled here.
    """
    config, dtype = model.config, model.embed_tokens.dtype
    check_misses(case, config)
    held = case.host_record(config, dtype)
    size = (_pool_records(config, case.shape(config)), *held.shape)
    make = jax.jit(functools.partial(jnp.ones, size, held.dtype), out_shardings=_pinned())
    few = [make() for _ in range(case.pools)]
    # Through HBM, so before the slots fill it.
    pools = tuple(few[index % len(few)] for index in range(config.num_layers))
    jax.block_until_ready(pools)
    program = program or compile_step(model, case, profiled=profile is not None)
    state = full_state(config, case, dtype)
    _, weights = nnx.split(model)
    sampling = SamplingState.of([SamplingParams(seed=0)] * case.batch)
    none = jnp.full(case.batch, -1, jnp.int32)
    tokens, misses = jnp.zeros(case.batch, jnp.int32), jnp.float32(case.misses or 0)
    clock, steps_taken, launch = HostClock(), 0, program.step

    def run(steps: int, *, again: bool = False) -> float:
        """Seconds of a step; ``again``: all of them take the same token, so that nothing is missing but at first."""
        nonlocal tokens, state, steps_taken
        first, lengths = tokens, [jnp.copy(state.lengths) for _ in range(steps + 1)]
        jax.block_until_ready((lengths, state))
        clock.interrupted()
        began = time.perf_counter()
        for step in range(steps):
            if again:
                state, tokens = dataclasses.replace(state, lengths=lengths[step]), first
            clock.launching()
            state, tokens, *_ = launch(weights, state, pools, tokens, none, sampling, misses)
            clock.launched(tokens)
        jax.block_until_ready((tokens, state))
        seconds = (time.perf_counter() - began) / steps
        steps_taken += steps
        if again:
            state, tokens = dataclasses.replace(state, lengths=lengths[steps]), first
        return seconds

    def stats() -> DecodeStats:
        record = held.size * held.dtype.itemsize
        return DecodeStats.read(state.counts, record_bytes=record, steps=steps_taken, clock=clock)

    warm_up, steps = case.steps
    run(warm_up)
    before = stats()
    seconds = statistics.median(run(steps) for _ in range(SAMPLES))
    timed = stats().since(before)
    if profile:
        with jax.profiler.trace(profile, profiler_options=profile_options()):
            run(PROFILED_STEPS)
    resident, compared = None, None
    if not case.streams:
        run(warm_up, again=True)
        before = stats()
        resident = statistics.median(run(steps, again=True) for _ in range(SAMPLES))
        if missed := stats().since(before).copied.sum():
            raise RuntimeError(f"{missed} records were copied in steps that were to miss nothing")
    if not case.sets_misses and case.plan.mode is not Mode.DENSE:
        before, launch = stats(), compile_step(model, case, compares=True).step
        run(WARMUP)
        compared = stats().since(before)
    return Measured(
        seconds=seconds,
        resident=resident,
        compiling=program.seconds,
        stats=timed,
        compared=compared,
        kv_heads=config.num_kv_heads,
    )
