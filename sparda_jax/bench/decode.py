"""``python -m sparda_jax.bench decode``: whole decode steps over the offload cache, at a set number of misses."""

import dataclasses
import functools
import math
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console

from sparda_jax.bench._kernel_cases import COPY_ENGINE_BYTES_PER_SECOND, HBM_BYTES_PER_SECOND
from sparda_jax.bench._options import at_least, check_writable, geometry, one_of, slots_of, whole_numbers
from sparda_jax.bench._report import Row, print_rows, write_json
from sparda_jax.budget import Demand
from sparda_jax.cache.host_dtype import KvHostDtype, host_record
from sparda_jax.cache.state import CacheShape, DecodeState, LayerState, empty_state
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.decode import Choose
from sparda_jax.decode_plan import DecodePlan, Fetch, check_streaming
from sparda_jax.fit import auto_slots
from sparda_jax.lanes import state_first, step_and_sample
from sparda_jax.machine import read_limits
from sparda_jax.model import Decoder
from sparda_jax.pallas_kernels.record_copy import device_as_host
from sparda_jax.profiling import profile_options
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.selection import Mode
from sparda_jax.shapes import SHAPES
from sparda_jax.telemetry import DecodeStats, HostClock

console = Console(soft_wrap=True)

WAYS = {
    "sparda": (Mode.SPARDA, Fetch.AHEAD),
    "sparda, in turn": (Mode.SPARDA, Fetch.IN_TURN),
    "sparse": (Mode.SPARSE, Fetch.IN_TURN),
    "infinigen": (Mode.INFINIGEN, Fetch.AHEAD),
    "dense": (Mode.DENSE, Fetch.STREAM),
}
# Tokens per second by (batch, missing blocks) at 128K: the published code on an H200, the better of its runs.
REFERENCE = {
    "sparda": {(4, 10): 170, (4, 20): 194, (16, 10): 819, (16, 20): 774},
    "sparse": {(4, 10): 135, (4, 20): 162, (16, 10): 484, (16, 20): 468},
}
TARGET = {
    "sparda": {(4, 10): 850, (16, 10): 2150, (16, 0): 2400, (24, 2): 2400, (24, 0): 2600},
    "sparse": {(16, 10): 1100},
}
CONTEXT, SPARE_SLOTS = 131072, 32
STEPS, SAMPLES, WARMUP = 16, 3, 4
"""All steps stay within one block, so that none ends with a write-back."""
PROFILED_STEPS = 4
STREAMED_STEPS = 2
"""Of a run and before the first, where whole layers are streamed: at 128K and batch 16 such a step copies 67 GB."""
METHOD = (
    f"median of {SAMPLES} runs of {STEPS} steps, launched without waiting in between, after {WARMUP}; random weights "
    "and contents; which blocks are attended to is set, so that each step misses the given number for each KV head and "
    "layer but the first, and the selection is computed all the same (not where misses are natural: there it decides). "
    "exposed_wait_ms: less the time of runs of the same program that repeat one step, which miss nothing. late: of the "
    "launches after a step, those that found the GPU idle; host_gap_ms: how long it was idle, at most, per launch. "
    "recall, wasted: against the layers' own queries, by a second program in steps that are not timed. "
    f"Dense streams whole layers, in runs of {STREAMED_STEPS} steps after {STREAMED_STEPS}; it misses all but the tail."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row.

    Attributes:
        way: a name of `WAYS`.
        batch: lanes, all of the same length.
        context: tokens of a lane.
        misses: blocks that a KV head of a layer lacks in a step; None: as many as it happens to. Dense
            misses all but the tail whatever this says.
        slots: of a lane; None: those that it must have and `SPARE_SLOTS`.
        room: slots that the arrays have place for; None: no more than are used. A program belongs to this number and
            not to `slots`, so cases that only differ in those can share one.
        pools: how many different pools the layers read, since making them takes about a second per GiB.
        kv_host_dtype: of the records in them.
    """

    way: str
    batch: int
    context: int
    misses: float | None
    slots: int | None = None
    room: int | None = None
    pools: int = 2
    kv_host_dtype: KvHostDtype = KvHostDtype.AUTO

    @property
    def plan(self) -> DecodePlan:
        mode, fetch = WAYS[self.way]
        return DecodePlan(mode=mode, fetch=fetch, max_len=self.context)

    @property
    def streams(self) -> bool:
        """Whether whole layers are streamed."""
        return self.plan.fetch is Fetch.STREAM

    @property
    def steps(self) -> tuple[int, int]:
        """Steps before the first run, and of a run."""
        return (STREAMED_STEPS, STREAMED_STEPS) if self.streams else (WARMUP, STEPS)

    @property
    def sets_misses(self) -> bool:
        """Whether what is attended to is set, and not selected."""
        return self.misses is not None and not self.streams

    def slots_per_lane(self, config: ModelConfig) -> int:
        """Slots of a lane that are used."""
        return self.slots or self.plan.min_slots(config, self.blocks(config)) + SPARE_SLOTS

    def blocks(self, config: ModelConfig) -> int:
        """Blocks of a lane."""
        return -(-self.context // config.sparse.block_size)

    def shape(self, config: ModelConfig) -> CacheShape:
        blocks = self.blocks(config)
        return CacheShape(
            lanes=self.batch,
            max_blocks=blocks,
            num_blocks=self.batch * blocks,
            slots_per_lane=self.room or self.slots_per_lane(config),
            kv_host_dtype=self.kv_host_dtype,
        )

    def host_record(self, config: ModelConfig, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        """A record as the pools hold it."""
        return host_record((2 * config.sparse.block_size, config.head_dim), dtype, self.kv_host_dtype)


def weights_floor(config: ModelConfig) -> float:
    """Seconds that reading a step's weights from HBM takes at least."""
    heads = config.num_heads + 3 * config.num_kv_heads
    per_layer = config.hidden_size * ((heads + config.num_heads) * config.head_dim + 3 * config.intermediate_size)
    return 2 * (config.num_layers * per_layer + config.vocab_size * config.hidden_size) / HBM_BYTES_PER_SECOND


def floors(config: ModelConfig, case: Case) -> tuple[float, float]:
    """Seconds that a step takes at least: for reading HBM (weights, compressed keys, records), and for the copies."""
    sparse, layers = config.sparse, config.num_layers
    record, held = 2 * 2 * sparse.block_size * config.head_dim, case.host_record(config, jnp.dtype(jnp.bfloat16))
    channels = case.plan.mode.partial_channels(config)
    # InfiniGen scores some channels of every key, the others all channels of every compressed key.
    keys = 2 * (case.context * channels or case.context // sparse.kernel_stride * config.head_dim)
    per_head = sparse.num_selected_blocks * record + keys
    if case.plan.mode is Mode.DENSE:
        per_head = -(-case.context // sparse.block_size) * record
    cache = layers * case.batch * config.num_kv_heads * per_head
    copied = (layers - 1) * case.batch * config.num_kv_heads * (case.misses or 0) * held.size * held.dtype.itemsize
    return weights_floor(config) + cache / HBM_BYTES_PER_SECOND, copied / COPY_ENGINE_BYTES_PER_SECOND


def check_misses(case: Case, config: ModelConfig) -> None:
    """Refuses misses that can't be set.

    Raises:
        typer.BadParameter: they are more than the blocks that are free; or the window comes back to blocks that are
            in the slots still.
    """
    sparse, blocks = config.sparse, case.blocks(config)
    passed = (WARMUP + SAMPLES * STEPS + PROFILED_STEPS) * (case.misses or 0)
    free = sparse.num_selected_blocks - sparse.init_blocks - sparse.local_blocks - 1
    span = blocks - 1 - sparse.local_blocks - sparse.init_blocks
    if case.sets_misses and (case.misses or 0) > free:
        raise typer.BadParameter(f"--misses {case.misses:g}: of a selection only {free} blocks are free: give fewer.")
    if case.sets_misses and span < min(free + passed, case.slots_per_lane(config)):
        raise typer.BadParameter(
            f"--misses {case.misses:g}: of {case.context} tokens too many blocks lie in {case.slots_per_lane(config)} "
            "slots: give a longer --context, or fewer --slots."
        )


def lists_with(misses: Float[Array, ""] | float, config: ModelConfig, blocks: int, start: int) -> Choose:
    """The blocks of each step: the forced ones, and a window that moves on by ``misses`` blocks a token.

    Behind the last block it comes back at the first. Where it moves by parts of blocks, each layer, lane and head
    has its own steps in which it does.
    """
    sparse = config.sparse
    first, last = sparse.init_blocks, blocks - 1 - sparse.local_blocks
    free = sparse.num_selected_blocks - sparse.init_blocks - sparse.local_blocks - 1
    span = last - first

    def choose(index: int, position: Int[Array, "batch"], blocks: Int[Array, "batch kv_heads width"]) -> Array:
        lane, head = jnp.arange(blocks.shape[0])[:, None, None], jnp.arange(blocks.shape[1])[:, None]
        number = index * 89 + lane * 37 + head * 17
        phase = (number % 64).astype(jnp.float32) / 64
        moved = jnp.floor((position[:, None, None] - start) * misses + phase).astype(jnp.int32)
        begin = (number + moved) % span
        beyond = jnp.maximum(begin + free - span, 0)
        place = jnp.arange(blocks.shape[2])
        window = place - sparse.init_blocks
        # Ascending: what has come back is in front.
        window = first + window + jnp.where(window < beyond, 0, begin - beyond)
        local = last + place - sparse.init_blocks - free
        chosen = jnp.where(place < sparse.init_blocks + free, window, local)
        chosen = jnp.where(place < sparse.init_blocks, place, chosen)
        chosen = jnp.where(place < sparse.num_selected_blocks, chosen, -1)
        # Without a use of its result XLA would drop the selection. No block is below -1.
        return jnp.where(blocks < -1, blocks, chosen.astype(jnp.int32))

    return choose


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


def _slots(text: str, config: ModelConfig, case: Case) -> int | None:
    """What ``--slots`` says for a case."""
    if text != "auto":
        return slots_of(text)
    demand = Demand(
        config=config,
        dtype=jnp.dtype(jnp.bfloat16),
        mode=case.plan.mode,
        has_forecast=True,
        max_model_len=case.context,
        batch=case.batch,
        kv_host_dtype=case.kv_host_dtype,
    )
    return auto_slots(demand, read_limits())


def decode(
    shape: Annotated[str, typer.Option(help=f"Model geometry: {', '.join(SHAPES)}.")] = "minicpm4.1-8b",
    way: Annotated[str, typer.Option(help=f"Ways to decode, separated by '/': {'/'.join(WAYS)}.")] = "sparda/sparse",
    batch: Annotated[str, typer.Option(help="Numbers of sequences, comma-separated.")] = "4,16",
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = CONTEXT,
    misses: Annotated[
        str, typer.Option(help="Missing blocks per KV head, layer and step, comma-separated; or: natural.")
    ] = "10",
    slots: Annotated[
        str, typer.Option(help="HBM slots of a lane per layer and KV head; auto: as many as fit; least: few to spare.")
    ] = "least",
    kv_host_dtype: Annotated[
        str, typer.Option(help=f"Records on the host: {', '.join(KvHostDtype)}.")
    ] = KvHostDtype.AUTO.value,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the model has, for a quick look.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Also write a JAX profile of each row's steps, into a folder each below this.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Time whole decode steps on this machine's GPU, beside floors, the reference's times and the targets."""
    check_writable(json_out)
    if profile:
        try:
            profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"--profile {profile} can't be made: {error.strerror}.") from None
    config = geometry(shape, layers)
    ways = [one_of("--way", name, WAYS) for name in way.split("/")]
    batches = whole_numbers("--batch", batch)
    counts = [None if text == "natural" else whole_numbers("--misses", text, 0)[0] for text in misses.split(",")]
    at_least("--context", context, 1)
    slots_of(slots)
    kept = KvHostDtype(one_of("--kv-host-dtype", kv_host_dtype, list(KvHostDtype)))
    try:
        for name in ways:
            check_streaming(WAYS[name][1], kept)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if jax.default_backend() != "gpu":
        raise typer.BadParameter("the benchmark needs an NVIDIA GPU, and JAX sees none here: run it on a GPU machine.")
    model = Decoder(config, has_forecast=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    whole = context == CONTEXT and layers is None
    rows: list[Row] = []
    for name in ways:
        for size in batches:
            for count in counts:
                case = Case(way=name, batch=size, context=context, misses=count, kv_host_dtype=kept)
                case = dataclasses.replace(case, slots=_slots(slots, config, case))
                if case.streams and rows and (rows[-1].name, rows[-1].settings["batch"]) == (name, size):
                    continue  # dense misses the same whatever is asked for
                missing = "natural" if count is None else f"{count} missing"
                measured = measure(model, case, profile=profile and profile / f"{name}, batch {size}, {missing}")
                hbm, copies = floors(config, dataclasses.replace(case, misses=measured.misses))
                key = (size, count or 0)
                compared = whole and kept is KvHostDtype.AUTO
                rows.append(
                    Row(
                        name=name,
                        backend="auto",
                        settings={
                            "batch": size,
                            "context": context,
                            "layers": config.num_layers,
                            "kv_host_dtype": kept.value,
                            "slots": case.shape(config).slots_per_lane,
                            "floor_hbm_ms": round(1e3 * hbm, 3),
                            "floor_copy_ms": round(1e3 * copies, 3),
                        }
                        | measured.settings(),
                        value=size / measured.seconds,
                        unit="tokens/s",
                        floor=size / max(hbm, copies),
                        reference=REFERENCE.get(name, {}).get(key) if compared else None,
                        # Those without misses are for slots sized automatically.
                        target=TARGET.get(name, {}).get(key) if compared and (count or slots == "auto") else None,
                    )
                )
                console.print(f"{name} {rows[-1].settings}: {rows[-1].value:.4g} tokens/s", markup=False)
                if json_out:
                    what = "decode steps over the offload cache"
                    write_json(json_out, rows, what=what, method=METHOD, commit=commit)
    print_rows(rows, console)
