"""Decode lanes, pool and staging of a server, sized for this machine as ``python -m sparda_jax.plan`` does."""

import dataclasses
import hashlib
from collections.abc import Iterator

import jax
from flax import nnx

from sparda_jax.budget import Demand, MemoryPlan, plan_memory
from sparda_jax.cache.host_dtype import KvHostDtype
from sparda_jax.cache.pinning import GIB
from sparda_jax.cache.prefix import PrefixBlocks
from sparda_jax.config import ConfigError
from sparda_jax.fit import auto_slots, check_fits, gib, largest_batch, settle_fetch
from sparda_jax.generate import MIN_CAPACITY, Runner
from sparda_jax.machine import Bound, Limits, read_limits
from sparda_jax.pallas_kernels.record_copy import CopySettings
from sparda_jax.planned_lanes import demand_for, planned_lanes
from sparda_jax.selection import Mode
from sparda_jax.serve.executor import Executor
from sparda_jax.serve.settings import Settings, SettingsError

# Lanes where nobody says how many, as far as they fit.
DEFAULT_LANES = {"cpu": 4, "gpu": 16}
# Decode steps for a sampled one. On a CPU, where nothing travels, that isn't worth compiling a second step.
DEFAULT_SAMPLE_EVERY = {"cpu": 0, "gpu": 1000}


def settle_chunks(runner: Runner, settings: Settings) -> None:
    """Sets how many tokens of a prompt are prefilled between two decode steps, for as long as scores fit into memory.

    Raises:
        SettingsError: what was asked for is no multiple of a block, or with ``--deterministic`` no part of a cache.
    """
    block_size, most = runner.config.sparse.block_size, settings.prefill_tokens
    if most is not None:
        if most % block_size:
            raise SettingsError(
                f"--prefill-tokens {most} is not allowed: it must be a multiple of {block_size}, a block"
            )
        runner.prefill_chunks = (*(size for size in runner.prefill_chunks if size < most), most)
    if settings.deterministic:
        # Else a last chunk that is not full could be computed in a smaller cache than a full one.
        if most is not None and MIN_CAPACITY % most:
            raise SettingsError(
                f"--prefill-tokens {most} is not allowed with --deterministic: it must divide {MIN_CAPACITY}"
            )
        capacity = runner.capacity_for(runner.max_model_len)
        sizes = [size for size in runner.prefill_chunks if MIN_CAPACITY % size == 0]
        # As large as memory allows in the longest cache.
        runner.prefill_chunks = (runner.chunk_for(1, sizes[-1], capacity),)


def plan_server(runner: Runner, settings: Settings) -> tuple[MemoryPlan, Limits]:
    """What the server will take, and of what.

    Raises:
        ConfigError: a number can't be used, or it does not fit: which memory, the bytes, and the flags that help.
    """
    limits = server_limits(runner)
    asked = settings.max_active
    host_pool = None if settings.host_pool_gib is None else int(settings.host_pool_gib * GIB)
    demand = demand_for(
        runner.model,
        mode=runner.mode,
        max_model_len=runner.max_model_len,
        batch=asked or 1,
        host_pool=host_pool,
        kv_host_dtype=KvHostDtype(settings.kv_host_dtype),
    )
    if settings.prefill_tokens is not None or settings.deterministic:
        demand = dataclasses.replace(demand, prefill_chunks=runner.prefill_chunks)
    if asked is None:
        fitting = largest_batch(settle_fetch(demand, limits, settings.slots), limits, settings.slots)
        demand = dataclasses.replace(demand, batch=max(1, min(DEFAULT_LANES[_platform()], fitting)))
    demand = settle_fetch(demand, limits, settings.slots)
    plan = plan_memory(demand, auto_slots(demand, limits) if settings.slots is None else settings.slots)
    if _platform() == "cpu" and limits.device is not None and plan.host_pool > limits.device.bytes:
        raise ConfigError(
            f"host memory: the pool takes {gib(plan.host_pool)}, but {limits.device.source} is "
            f"{gib(limits.device.bytes)}: use {', or '.join(_smaller_pools(demand, limits.device.bytes))}"
        )
    check_fits(plan, limits)
    return plan, limits


def _smaller_pools(demand: Demand, free: int) -> Iterator[str]:
    """Options each of which makes a pool that is not larger than ``free`` bytes."""
    blocks = free // demand.block_bytes
    if lanes := blocks // demand.max_blocks:
        # Rounded down to what can be typed, unless that would be less than a sequence.
        pool = free * 100 // GIB / 100
        if pool * GIB >= demand.max_blocks * demand.block_bytes:
            yield f"--host-pool-gib {pool:g}"
        if demand.host_pool is None and lanes < demand.batch:
            yield f"--max-active {lanes}"
    elif blocks:
        yield f"--max-model-len {blocks * demand.config.sparse.block_size} with --max-active 1"
    else:
        yield "a machine with more memory"


def server_limits(runner: Runner) -> Limits:
    """What JAX may use. On a CPU the device's memory is the host's: half for the device's part, half for the pool."""
    limits = read_limits()
    if _platform() != "cpu" or limits.host_bound is None:
        return limits
    # The weights are loaded already, and a plan counts them.
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(runner.model)))
    device = Bound(bytes=limits.host_bound.bytes // 2 + weights, source=f"half of {limits.host_bound.source}")
    return Limits(device=device, host=(), pinned=1 << 62)


def _platform() -> str:
    return jax.local_devices()[0].platform


def make_executor(runner: Runner, plan: MemoryPlan, limits: Limits, settings: Settings, salt: bytes) -> Executor:
    """Allocates what was planned; ``salt`` as of `Executor`."""
    demand = plan.demand
    blocks = PrefixBlocks(demand.num_blocks)
    lanes = planned_lanes(
        runner.model,
        demand,
        slots_per_lane=plan.shape.slots_per_lane,
        limits=limits,
        copies=None if settings.copy_ctas is None else CopySettings(ctas=settings.copy_ctas),
        skew=runner.skew,
        sample_every=_sample_every(runner, settings),
        profiled=settings.profile is not None,
        blocks=blocks,
    )
    return Executor(
        runner,
        lanes,
        blocks,
        salt=salt if settings.prefix_cache else None,
        staging_tokens=demand.capacity + demand.short_tokens,
        deterministic=settings.deterministic,
    )


def _sample_every(runner: Runner, settings: Settings) -> int | None:
    """Dense lanes have no selection that could be compared, and a sampled step is a program of its own."""
    if runner.mode is Mode.DENSE or settings.deterministic:
        return None
    asked = DEFAULT_SAMPLE_EVERY[_platform()] if settings.sample_every is None else settings.sample_every
    return asked or None


def prefix_salt(runner: Runner, weights: str) -> bytes:
    """Names all that keys and values depend on besides the tokens."""
    parts = (weights, runner.mode.value, runner.dtype.name, runner.max_model_len, runner.config)
    return hashlib.sha256(repr(parts).encode()).digest()


def describe(plan: MemoryPlan) -> str:
    """One line for the start-up table."""
    shape, everything = plan.shape, plan.shape.slots_per_lane >= plan.shape.max_blocks
    slots = "every block" if everything else f"{shape.slots_per_lane} of {shape.max_blocks} blocks"
    packed = "" if shape.kv_host_dtype is KvHostDtype.AUTO else f" in {shape.kv_host_dtype.value} (--kv-host-dtype)"
    return (
        f"{shape.lanes} decode lanes (--max-active), each with slots for {slots} of a sequence (--slots): "
        f"{gib(plan.first_layer + plan.slots)}; host pool of {shape.num_blocks} blocks (--host-pool-gib)"
        f"{packed}: "
        f"{gib(plan.host_pool)}; prefill {gib(plan.staging)}"
    )
