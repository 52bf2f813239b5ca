"""What a decode step is timed on: how it decodes, how many sequences, how much is missing; and its floors."""

import dataclasses

import jax
import jax.numpy as jnp
import typer
from jaxtyping import Array, Float, Int

from sparda_jax.bench._kernel_cases import COPY_ENGINE_BYTES_PER_SECOND, HBM_BYTES_PER_SECOND
from sparda_jax.cache.host_dtype import KvHostDtype, host_record
from sparda_jax.cache.state import CacheShape
from sparda_jax.config import ModelConfig
from sparda_jax.decode import Choose
from sparda_jax.decode_plan import DecodePlan, Fetch
from sparda_jax.selection import Mode

WAYS = {
    "sparda": (Mode.SPARDA, Fetch.AHEAD),
    "sparda, in turn": (Mode.SPARDA, Fetch.IN_TURN),
    "sparse": (Mode.SPARSE, Fetch.IN_TURN),
    "infinigen": (Mode.INFINIGEN, Fetch.AHEAD),
    "dense": (Mode.DENSE, Fetch.STREAM),
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
