"""Decode lanes over the offload cache: sequences enter, all lanes advance token by token, sequences leave.

A sequence can also give up its lane and wait (`DecodeLanes.park`), go on in any lane (`resume`), begin to wait without
a lane (`adopt`), and share the blocks of a prefix with others (``shared``, `DecodeLanes.prefix`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int, UInt32

from sparda_jax.adjusting import all_allowed
from sparda_jax.cache.admission import PartialBasis, admit, write_pages
from sparda_jax.cache.blocks import BlockAllocator
from sparda_jax.cache.kv import KVCache
from sparda_jax.cache.parking import Parked, put_input, put_seen, seat, take_input, take_seen
from sparda_jax.cache.pool import HostPool, Pools, finished
from sparda_jax.cache.state import CacheShape, DecodeState, empty_state
from sparda_jax.decode_plan import DecodePlan
from sparda_jax.forward import Skew
from sparda_jax.lane_checks import check_input, check_lanes, check_sequence, check_sharing
from sparda_jax.lane_step import state_first, step_and_sample
from sparda_jax.logprobs import Scores
from sparda_jax.model import Decoder
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.telemetry import Counts, DecodeStats, HostClock


@dataclasses.dataclass
class _Lane:
    """What the host knows of a sequence: it counts tokens itself, so it never waits for the device."""

    length: int
    blocks: list[int]
    counts_tokens: bool = False


class DecodeLanes:
    """A fixed number of lanes, each empty or with one sequence.

    The host runs ahead of the device: `step` returns the tokens as an array that may not be there yet, and nothing in
    it waits. All lanes advance together; each has its own length, and an empty one costs time but changes nothing.

    Args:
        model: the weights.
        shape: sizes of the cache.
        plan: the static choices of a step.
        skew: InfiniGen's calibrated basis, a matrix per KV head and layer; needed in that mode only.
        sample_every: every so many steps, one step also selects with each layer's own query (a second program, compiled
            then), and the next one is taken twice to find its exposed wait (the host waits for both). None: never.
        blocks: who says which blocks of the pool are in use; None: an allocator of the lanes' own.

    Raises:
        ConfigError: the slots can't hold what one step selects, the mode needs a Forecast or a basis that is not
            there, ``sample_every`` is below 2, whole layers are streamed and ``sample_every`` is given, or ``blocks``
            has not the pool's size.
    """

    def __init__(
        self,
        model: Decoder,
        shape: CacheShape,
        plan: DecodePlan,
        skew: Skew | None = None,
        *,
        sample_every: int | None = None,
        blocks: BlockAllocator | None = None,
    ):
        check_lanes(model, shape, plan, skew, sample_every, blocks)
        config = model.config
        self.blocks = BlockAllocator(shape.num_blocks) if blocks is None else blocks
        """Which blocks of the host pool are in use."""
        self.config, self.shape, self.plan = config, shape, plan
        self._device = next(iter(model.embed_tokens.devices()))
        dtype = model.embed_tokens.dtype
        host = jax.sharding.SingleDeviceSharding(self._device, memory_kind="pinned_host")
        self._pool = HostPool(config, shape, dtype, host, plan.backends.record_copy)
        state = empty_state(config, shape, dtype, partial_channels=plan.mode.partial_channels(config))
        self._state: DecodeState = jax.device_put(state, self._device)
        self._skew = jax.device_put(skew, self._device)
        self._tokens = jnp.zeros(shape.lanes, jnp.int32, device=self._device)
        self._sampling = jax.device_put(SamplingState.of([SamplingParams()] * shape.lanes), self._device)
        self._no_blocks = jnp.full(shape.lanes, -1, jnp.int32, device=self._device)
        self._lanes: list[_Lane | None] = [None] * shape.lanes
        self._parked: set[Parked] = set()
        self._graphdef, weights = nnx.split(model)
        # A program takes a plain tuple in half the host's time that the module's state takes.
        leaves, self._treedef = jax.tree.flatten(weights)
        self._weights: tuple[Array, ...] = tuple(leaves)
        self._step = self._program(plan)
        self._comparing_step = self._program(dataclasses.replace(plan, compares=True))
        self._sample_every, self._steps, self._compared, self._clock = sample_every, 0, 0, HostClock()
        self._sampled_from = 0
        self._admit = jax.jit(functools.partial(admit, config=config), donate_argnums=0)
        self._write_pages = jax.jit(functools.partial(write_pages, config=config), donate_argnums=0)
        self._seat = jax.jit(functools.partial(seat, backend=plan.backends.record_copy), donate_argnums=0)
        self.copies: Int[Array, "layers batch kv_heads"] | None = None
        """Records that the last step copied, per layer, lane and KV head."""
        self.logprobs: Scores | None = None
        """Of the last step's tokens, a row a lane; zeros where no lane wants them."""

    def _program(self, plan: DecodePlan) -> Callable:
        """A step; compiled when it is first called."""
        step = state_first(functools.partial(step_and_sample, self._graphdef, plan))

        def with_leaves(weights: tuple[Array, ...], *args):
            return step(jax.tree.unflatten(self._treedef, weights), *args)

        return jax.jit(with_leaves, donate_argnums=1, compiler_options=plan.compiler_options)

    @property
    def free_blocks(self) -> int:
        """Blocks of the host pool that no sequence uses."""
        return self.blocks.num_free

    def length(self, lane: int) -> int:
        """Tokens stored in a lane; 0 for an empty one."""
        entry = self._entry(lane)
        return entry.length if entry else 0

    def written_blocks(self, lane: int) -> list[int]:
        """The physical blocks of a lane that the host pool holds whole, in order; none of an empty lane.

        Whatever is launched from now on finds them there, so the host need not wait.
        """
        entry = self._entry(lane)
        return entry.blocks[: entry.length // self.config.sparse.block_size] if entry else []

    def enter(
        self,
        lane: int,
        cache: KVCache,
        first_token: int,
        params: SamplingParams,
        *,
        shared: Sequence[int] = (),
        written: Sequence[int] = (),
        seen: Int[Array, "1 vocab"] | None = None,
    ) -> None:
        """Gives an empty lane a prefilled sequence.

        Args:
            lane: an empty lane.
            cache: the sequence, of batch 1.
            first_token: the token that follows it: the input of the lane's first step.
            params: how its tokens are sampled; ``min_tokens`` is counted from the end of the cache.
            shared: the physical blocks that hold the sequence's first whole blocks already, in order. The caller's use
                of them passes to the lane, which gives them back with its own.
            written: likewise those of the whole blocks behind them whose records `lend_pool` has written, while the
                device has nothing else of them yet.
            seen: the tokens of prompt and answer, the first one too (`generate.Sequence.seen`), for penalties.

        Raises:
            ValueError: there is no such lane, or it is in use; the cache is not of one sequence of these lanes' model;
                the sequence is empty or longer than a lane can be, or it has fewer whole blocks than are there already;
                one of these is not in use; the vocabulary has no such token; or ``params`` has penalties and ``seen``
                is missing.
            ConfigError: InfiniGen's lanes were given a cache without channel weights, or shared blocks.
            MemoryError: the host pool has too few free blocks. After any of these nothing is changed.
        """
        self._check_empty(lane)
        check_input(first_token, params, seen, self.config)
        entry, ids = self._store(cache, shared, written, params)
        token, row = self._input(first_token, params, entry.length)
        self._state = self._admit(self._state, cache, jnp.int32(lane), ids, jnp.int32(len(shared)), skew=self._skew)
        self._put_input(lane, token, row, seen)
        self._lanes[lane] = entry

    def adopt(
        self,
        cache: KVCache,
        first_token: int,
        params: SamplingParams,
        *,
        shared: Sequence[int] = (),
        written: Sequence[int] = (),
        seen: Int[Array, "1 vocab"] | None = None,
    ) -> Parked:
        """Takes a prefilled sequence that has no lane yet; arguments and errors are those of `enter`."""
        check_input(first_token, params, seen, self.config)
        entry, ids = self._store(cache, shared, written, params)
        token, row = self._input(first_token, params, entry.length)
        self._state, basis = self._write_pages(self._state, cache, ids, jnp.int32(len(shared)), skew=self._skew)
        return self._wait(entry, token, row, basis, seen if entry.counts_tokens else None)

    def park(self, lane: int) -> Parked:
        """Empties a lane whose sequence is to go on later; its blocks stay in use.

        Raises:
            ValueError: there is no such lane, or it is empty.
        """
        entry = self._entry(lane)
        if entry is None:
            raise ValueError(f"lane {lane} is empty: there is nothing to park")
        self._clock.interrupted()
        # Every whole block has been written back by the step that finished it.
        self._pool.write_tail(self._state, lane)
        bases = tuple(layer.partial_basis for layer in self._state.layers)
        token, row, basis = take_input(self._tokens, self._sampling, bases, jnp.int32(lane))
        seen = take_seen(self._state.seen, jnp.int32(lane)) if entry.counts_tokens else None
        self._vacate(lane)
        return self._wait(entry, token, row, basis, seen)

    def resume(self, lane: int, parked: Parked) -> None:
        """Gives an empty lane a parked sequence, which goes on as if it had never waited.

        Raises:
            ValueError: there is no such lane, it is in use, or the sequence does not wait here.
        """
        self._check_empty(lane)
        self._check_waits(parked)
        self._clock.interrupted()
        ids = np.zeros(self.shape.max_blocks, np.int32)
        ids[: len(parked.blocks)] = parked.blocks
        self._state = self._seat(
            self._state,
            self._pool.arrays,
            jnp.int32(lane),
            jnp.asarray(ids),
            jnp.int32(parked.length),
            parked.partial_basis,
        )
        self._put_input(lane, parked.token, parked.sampling, parked.seen)
        self._parked.remove(parked)
        counts = parked.seen is not None
        self._lanes[lane] = _Lane(length=parked.length, blocks=list(parked.blocks), counts_tokens=counts)

    def drop(self, parked: Parked) -> None:
        """Forgets a parked sequence; its blocks are free at once.

        Raises:
            ValueError: the sequence does not wait here.
        """
        self._check_waits(parked)
        self._parked.remove(parked)
        self.blocks.give_back(parked.blocks)

    def leave(self, lane: int) -> None:
        """Empties a lane; its blocks are free at once. An empty lane stays empty."""
        entry = self._entry(lane)
        if entry is None:
            return
        self._vacate(lane)
        self.blocks.give_back(entry.blocks)

    def prefix(self, blocks: Sequence[int], capacity: int) -> KVCache:
        """A contiguous cache, of batch 1, that prefill can go on from: what the one that wrote these blocks held.

        Args:
            blocks: the physical blocks of a sequence's first whole blocks, in order, which the host pool holds.
            capacity: of the cache, in tokens; each capacity is a program of its own.

        Raises:
            ValueError: there is no block, one is not in use, or ``capacity`` is no multiple of ``block_size`` or can't
                hold them.
            ConfigError: the lanes are InfiniGen's.
        """
        check_sharing(blocks, self.plan)
        block_size = self.config.sparse.block_size
        if capacity % block_size or not 0 < len(blocks) <= capacity // block_size:
            raise ValueError(
                f"capacity={capacity} was given for {len(blocks)} blocks: give at least one block, and a multiple of "
                f"block_size={block_size} that holds them"
            )
        self.blocks.check_used(blocks)
        self._clock.interrupted()
        return self._pool.load(self._state, blocks, capacity)

    def lend_pool[T](self, run: Callable[[Pools], tuple[Pools, T]]) -> T:
        """Runs a program that writes blocks which the caller has taken to the pool; see `HostPool.lend`."""
        self._clock.interrupted()
        return self._pool.lend(run)

    def allow(self, masks: Mapping[int, UInt32[np.ndarray, "words"]]) -> None:
        """Which tokens the next step may give, lane by lane (see `adjusting.all_allowed`), to those whose ``params``
        have ``masked``. What is given here is all that counts: a lane that is left out may have any.
        """
        rows = all_allowed(self.shape.lanes, self.config.vocab_size)
        for lane, mask in masks.items():
            rows[lane] = mask
        self._state = dataclasses.replace(self._state, allowed=jax.device_put(rows, self._device))

    @property
    def pool_is_lost(self) -> bool:
        """Whether a program took the host pool and failed: nothing can go on here. Waits for what is under way."""
        return self._pool.is_lost

    @property
    def samples(self) -> bool:
        """Whether some steps are sampled."""
        return self._sample_every is not None

    def sample_next(self) -> None:
        """The next step, if it is not the first, and the one behind it are sampled; further ones counted from there."""
        self._sampled_from = self._steps + 1

    def step(self) -> Int[Array, "batch"]:
        """Advances every lane in use by one token; returns the new tokens (those of empty lanes mean nothing).

        Raises:
            ValueError: a lane is full.
            MemoryError: a lane begins a block and the host pool has none left; nothing is changed.
        """
        self._clock.look()
        block_size = self.config.sparse.block_size
        used = [(lane, entry) for lane, entry in enumerate(self._lanes) if entry is not None]
        for lane, entry in used:
            if entry.length >= self.shape.max_blocks * block_size:
                raise ValueError(f"lane {lane} is full ({entry.length} tokens, max_blocks={self.shape.max_blocks})")
        beginning = [(lane, entry) for lane, entry in used if entry.length % block_size == 0]
        new_blocks = self._no_blocks
        if beginning:
            ids = np.full(self.shape.lanes, -1, np.int32)
            for (lane, entry), block in zip(beginning, self.blocks.take(len(beginning)), strict=True):
                entry.blocks.append(block)
                ids[lane] = block
            new_blocks = jax.device_put(ids, self._device)
        self._launch(new_blocks)
        for _, entry in used:
            entry.length += 1
        if any(entry.length % block_size == 0 for _, entry in used):
            # From now on the finished blocks may lose their slots: the write-back runs before any later step.
            self._pool.write_back(self._state)
            state = self._state
            written = _count_finished(state.written, state.live, state.lengths, block_size=block_size)
            self._state = dataclasses.replace(state, written=written)
        self._clock.launched(self._state.lengths)
        return self._tokens

    def return_stats(self) -> DecodeStats:
        """What all steps so far did; waits for the device, as nothing else here does.

        Counts are per layer and lane; a lane's go on when another sequence enters it (`DecodeStats.since`).
        """
        return self.note_stats()()

    def note_stats(self) -> Callable[[], DecodeStats]:
        """Asks for what all steps so far did; the result gives it, and waits for these steps and for no later one."""
        counts = _copied(self._state.counts)
        for leaf in jax.tree.leaves(counts):
            leaf.copy_to_host_async()
        return functools.partial(
            DecodeStats.read,
            counts,
            record_bytes=self._pool.record_bytes,
            steps=self._steps,
            sampled_steps=self._compared,
            clock=dataclasses.replace(self._clock),
        )

    def _entry(self, lane: int) -> _Lane | None:
        # A negative number would name a lane on the host and none on the device.
        if not 0 <= lane < self.shape.lanes:
            raise ValueError(
                f"lane={lane} is not one of these {self.shape.lanes} lanes: use 0 to {self.shape.lanes - 1}"
            )
        return self._lanes[lane]

    def _check_empty(self, lane: int) -> None:
        if self._entry(lane) is not None:
            raise ValueError(f"lane {lane} is in use: leave it first")

    def _check_waits(self, parked: Parked) -> None:
        if parked not in self._parked:
            raise ValueError("parked does not wait here: resume or drop what these lanes parked, and only once")

    def _store(
        self, cache: KVCache, shared: Sequence[int], written: Sequence[int], params: SamplingParams
    ) -> tuple[_Lane, Int[Array, "blocks"]]:
        """Takes the blocks of a sequence and writes those that are not there yet, the partial one too, to the pool.

        Returns the sequence, and the block of each block of the cache's capacity; errors as of `enter`.
        """
        check_sharing(shared, self.plan)
        there, dtype = [*shared, *written], self._state.layers[0].slots.dtype
        length = check_sequence(cache, there, self.config, self.shape, self.plan, dtype)
        self.blocks.check_used(there)
        block_size = self.config.sparse.block_size
        num_blocks = -(-length // block_size)
        blocks = [*there, *self.blocks.take(num_blocks - len(there))]
        self._clock.interrupted()
        ids = np.zeros(cache.capacity // block_size, np.int32)
        ids[:num_blocks] = blocks
        block_ids = jnp.asarray(ids)
        self._pool.store(cache, block_ids, len(there), num_blocks)
        return _Lane(length=length, blocks=blocks, counts_tokens=params.counts_tokens), block_ids

    def _input(self, token: int, params: SamplingParams, length: int) -> tuple[Int[Array, ""], SamplingState]:
        # On the lanes' device like what comes out of a lane, so that both go through the same programs.
        return jax.device_put((jnp.int32(token), SamplingState.of([params], [length])), self._device)

    def _put_input(
        self, lane: int, token: Int[Array, ""], row: SamplingState, seen: Int[Array, "1 vocab"] | None
    ) -> None:
        self._tokens, self._sampling = put_input(self._tokens, self._sampling, jnp.int32(lane), token, row)
        if seen is not None:
            self._state = dataclasses.replace(self._state, seen=put_seen(self._state.seen, jnp.int32(lane), seen))

    def _vacate(self, lane: int) -> None:
        self._state = dataclasses.replace(self._state, live=_without(self._state.live, jnp.int32(lane)))
        self._lanes[lane] = None

    def _wait(
        self,
        entry: _Lane,
        token: Int[Array, ""],
        row: SamplingState,
        basis: PartialBasis,
        seen: Int[Array, "1 vocab"] | None,
    ) -> Parked:
        parked = Parked(
            length=entry.length,
            blocks=tuple(entry.blocks),
            token=token,
            sampling=row,
            partial_basis=basis,
            seen=seen,
        )
        self._parked.add(parked)
        return parked

    def _launch(self, new_blocks: Int[Array, "batch"]) -> None:
        """Launches a step, or samples one."""
        self._steps += 1
        # The first step is never sampled: it compiles the program.
        place = -1
        if self._sample_every and self._steps > 1:
            place = (self._steps - self._sampled_from) % self._sample_every
        if place == 1:
            self._take_twice(new_blocks)
            return
        self._clock.launching()
        self._compared += place == 0
        self._take(self._comparing_step if place == 0 else self._step, self._tokens, new_blocks)

    def _take(self, step: Callable, tokens: Int[Array, "batch"], new_blocks: Int[Array, "batch"]) -> None:
        self._state, self._tokens, self.copies, self.logprobs = step(
            self._weights, self._state, self._pool.arrays, tokens, new_blocks, self._sampling
        )

    def _take_twice(self, new_blocks: Int[Array, "batch"]) -> None:
        """Takes a step, goes back by a token and takes it again: the same work and results, but nothing is missing."""
        tokens, seen = self._tokens, _copied(self._state.seen)

        def seconds() -> float:
            # A program launched now comes behind everything that is under way, such as a chunk of a prompt.
            jax.block_until_ready(_copied(self._state.counts))
            began = self._clock.now()
            self._take(self._step, tokens, new_blocks)
            jax.block_until_ready(self._state)
            return self._clock.now() - began

        with_copies = seconds()
        state, copies = self._state, self.copies
        counts = _copied(state.counts)
        self._state = dataclasses.replace(state, lengths=state.lengths - state.live, seen=seen)
        self._clock.wait += with_copies - seconds()
        self._clock.timed += 1
        self._state, self.copies = dataclasses.replace(self._state, counts=counts), copies
        self._clock.interrupted()


@jax.jit
def _without(live: Bool[Array, "batch"], lane: Int[Array, ""]) -> Bool[Array, "batch"]:
    return live.at[lane].set(False)


@functools.partial(jax.jit, static_argnames=("block_size",))
def _count_finished(
    written: Int[Array, "batch"], live: Bool[Array, "batch"], lengths: Int[Array, "batch"], *, block_size: int
) -> Int[Array, "batch"]:
    """``written`` once the next finished block of every lane that has one is written back."""
    return written + finished(live, lengths, written, block_size)


@jax.jit
def _copied[Part: (Counts, Array)](part: Part) -> Part:
    """A part of the state: the next step takes the place of the original."""
    return jax.tree.map(jnp.copy, part)
