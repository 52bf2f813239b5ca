"""The model as the engine drives it: prompts prefilled by chunks, decode lanes, and prefixes used again.

A sequence's cache is contiguous while its prompt is prefilled. Then its blocks go to the host pool, and it decodes in a
lane or waits for one. Whole blocks whose host copy exists are published under the keys of their content, so a later
prompt with the same beginning reads them back in place of computing them.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import UInt32

from sparda_jax.cache.parking import Parked
from sparda_jax.cache.prefix import KeyChain, PrefixBlocks
from sparda_jax.generate import Runner
from sparda_jax.generation_stats import GenerationStats, PhaseStats
from sparda_jax.in_flight import Sequence as Prefill
from sparda_jax.lanes import DecodeLanes
from sparda_jax.logprobs import Logprobs, Scores
from sparda_jax.programs import WriteAhead
from sparda_jax.sampling import SamplingParams
from sparda_jax.selection import Mode
from sparda_jax.serve.requests import FatalError
from sparda_jax.telemetry import DecodeStats


@dataclasses.dataclass(eq=False, kw_only=True)
class LaneSequence:
    """One request on the device.

    Attributes:
        params: how it is sampled.
        prefill: the prompt on its way, until its blocks are in the pool.
        chain: the content keys of its blocks; None where no prefix is used again.
        shared: blocks of other sequences that its prompt begins with; its own use of them.
        written: its own blocks behind them that its chunks have written to the pool.
        first_token: what follows the prompt, once that is known.
        stored: tokens whose keys and values exist or are being computed.
        prompt_tokens: of the prompt. hit: those that were in the cache.
        known: tokens of prompt and answer that the host has seen.
        published: blocks that others can find.
        decoded, read, visible: decode steps, and what they read of a layer and could see: (KV head, block) pairs.
        lane, parked: where it is: in a lane, or waiting for one.
        allowed: which tokens may come next; None: any.
        logprobs: of the tokens that were read and not taken yet. prompt_logprobs: of the prompt, until taken.
    """

    params: SamplingParams
    prefill: Prefill | None
    chain: KeyChain | None
    shared: list[int]
    written: list[int]
    prompt_stats: GenerationStats
    prompt_tokens: int
    first_token: int | None = None
    stored: int = 0
    known: int = 0
    hit: int = 0
    published: int = 0
    decoded: int = 0
    read: int = 0
    visible: int = 0
    lane: int | None = None
    parked: Parked | None = None
    allowed: np.ndarray | None = None
    logprobs: collections.deque[Logprobs] = dataclasses.field(default_factory=collections.deque)
    prompt_logprobs: Logprobs | None = None

    @property
    def stats(self) -> GenerationStats:
        """What it has read so far."""
        layers = len(self.prompt_stats.decode.blocks_read)
        decode = PhaseStats(tokens=self.decoded, blocks_read=[self.read] * layers, blocks_visible=self.visible)
        return dataclasses.replace(self.prompt_stats, decode=decode)

    @property
    def prefilled(self) -> int:
        """Prompt tokens that are done or under way."""
        return self.prefill.prefilled if self.prefill else self.stored

    def take_logprobs(self) -> tuple[Logprobs | None, Logprobs | None]:
        """Those of the token that comes next, and with the first one those of the prompt; None: not asked for."""
        of_prompt, self.prompt_logprobs = self.prompt_logprobs, None
        return (self.logprobs.popleft() if self.logprobs else None), of_prompt


@dataclasses.dataclass
class Usage:
    """What the executor has done so far.

    Attributes:
        prompt_tokens: of all prompts that were begun. prefix_tokens: those of them that were found in the cache.
        steps: decode steps. parked: sequences that gave up a lane.
    """

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    steps: int = 0
    parked: int = 0


class Executor:
    """Runs sequences on the device for one thread.

    Args:
        runner: prefills prompts.
        lanes: decode, in the runner's mode.
        blocks: the lanes' blocks of the pool.
        salt: names the weights and the options that keys and values depend on; None: no prefix is used again.
        staging_tokens: what the prompts in prefill may have together, see `Scheduler`.
        deterministic: a prompt's keys and values have the same bits whatever was in the cache, so answers do, too. Then
            the runner must have chunks of one size: prefill goes on where a chunk would have begun, in a cache of the
            size that it would have had, behind blocks that a chunk has computed, for a request that attends alike.
    """

    def __init__(
        self,
        runner: Runner,
        lanes: DecodeLanes,
        blocks: PrefixBlocks,
        *,
        salt: bytes | None,
        staging_tokens: int,
        deterministic: bool = False,
    ) -> None:
        self.max_model_len, self.staging_tokens = runner.max_model_len, staging_tokens
        self.num_lanes, self.num_blocks = lanes.shape.lanes, lanes.shape.num_blocks
        self.block_size = runner.config.sparse.block_size
        self.runner, self.lanes, self.blocks = runner, lanes, blocks
        # InfiniGen's partial keys belong to one sequence alone.
        self._salt = None if runner.mode is Mode.INFINIGEN else salt
        self._deterministic = deterministic
        self._in_lane: dict[int, LaneSequence] = {}
        self._unread: collections.deque[tuple[Array, Scores | None, dict[int, LaneSequence]]] = collections.deque()
        self._chunk: Array | None = None
        self._noted: Callable[[], DecodeStats] | None = None
        self._forgotten: DecodeStats | None = None
        self.usage = Usage()

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts that begin alike use the same blocks."""
        return self._salt is not None

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Refuses what could not run.

        Raises:
            ValueError: see `Runner.check`.
        """
        self.runner.check(prompt, params)

    def start(self, prompt: Sequence[int], params: SamplingParams) -> LaneSequence:
        """Begins a request that `check` lets pass, behind as much of its prompt as the cache holds."""
        tokens: Any = np.asarray(prompt, np.int32)  # once, since a long list takes milliseconds
        shared: list[int] = []
        chain = None
        if self._salt is not None:
            selects = self.selects(len(prompt))
            salt = self._salt + bytes([selects]) if self._deterministic else self._salt
            chain = KeyChain(salt=salt, sparse=self.runner.config.sparse)
            chain.extend(tokens, selects)
            # At least the last token is computed, since an answer begins with its logits; all are where a prompt's log
            # probabilities are asked for.
            if params.prompt_logprobs is None:
                shared = self.blocks.match(chain.keys[: (len(prompt) - 1) // self.block_size])
            if self._deterministic:
                begun = len(shared) % (self.runner.prefill_chunks[0] // self.block_size)
                self.blocks.give_back(shared[len(shared) - begun :])
                shared = shared[: len(shared) - begun]
        try:
            hit = len(shared) * self.block_size
            capacity = self.runner.capacity_for(hit if self._deterministic else len(prompt))
            prefix = self.lanes.prefix(shared, capacity) if shared else None
            prefill = self.runner.start(tokens, params, prefix=prefix, prefix_tokens=hit)
        except BaseException:
            self.blocks.give_back(shared)
            raise
        self.usage.prompt_tokens += len(prompt)
        self.usage.prefix_tokens += len(shared) * self.block_size
        return LaneSequence(
            params=params,
            prefill=prefill,
            chain=chain,
            shared=shared,
            written=[],
            prompt_stats=prefill.stats,
            prompt_tokens=len(prompt),
            known=len(prompt),
            hit=hit,
            published=len(shared),
        )

    def prefill(self, sequence: LaneSequence) -> int | None:
        """One chunk of a prompt; the first token of the answer when it is the last chunk.

        Waits for the last chunk, and for the chunk before this one, whosever that was: one at a time is under way.

        Raises:
            FatalError: the chunk failed with the host pool in its hands, which all sequences need.
        """
        assert sequence.prefill is not None
        if self._chunk is not None:
            with contextlib.suppress(Exception):  # its own request hears of that
                jax.block_until_ready(self._chunk)
        there = len(sequence.shared) + len(sequence.written)
        sequence.written += self.blocks.take(sequence.prefill.chunk_end() // self.block_size - there)
        write = WriteAhead(lend=self.lanes.lend_pool, blocks=[*sequence.shared, *sequence.written])
        try:
            token = sequence.prefill.advance(write)
        except Exception as error:
            if self.lanes.pool_is_lost:
                raise FatalError(f"a chunk took the host pool with it: {error}") from error
            raise
        self._chunk = sequence.prefill.launched
        if token is not None:
            sequence.first_token, sequence.stored = token, sequence.prefill.prompt_tokens
            sequence.prompt_logprobs = sequence.prefill.prompt_logprobs
            if sequence.prefill.logprobs is not None:
                sequence.logprobs.append(sequence.prefill.logprobs)
        return token

    def allow(self, sequence: LaneSequence, mask: UInt32[np.ndarray, "words"]) -> None:
        """Which tokens may come next in a sequence whose parameters have ``masked``, see `adjusting.all_allowed`.

        To be said before the prompt is prefilled, and behind each token before the step that gives the next one.
        """
        sequence.allowed = mask
        if sequence.prefill is not None and sequence.first_token is None:
            sequence.prefill.allow(mask)

    def place(self, lane: int, sequence: LaneSequence) -> None:
        """Gives a free lane to a sequence whose prompt is done."""
        if sequence.parked is not None:
            self.lanes.resume(lane, sequence.parked)
            sequence.parked = None
        else:
            self._settle(sequence, lane)
        sequence.lane = lane
        self._in_lane[lane] = sequence

    def park(self, sequence: LaneSequence) -> None:
        """Takes a sequence's lane away, or keeps one that never had one without staging; `place` lets it go on."""
        if sequence.lane is None:
            self._settle(sequence, None)
            return
        del self._in_lane[sequence.lane]
        sequence.parked, sequence.lane = self.lanes.park(sequence.lane), None
        self.usage.parked += 1

    def step(self) -> None:
        """Launches a decode step of all lanes in use; `read` gives its tokens."""
        masks = {lane: s.allowed for lane, s in self._in_lane.items() if s.allowed is not None}
        if masks:
            self.lanes.allow(masks)
        tokens = self.lanes.step()
        tokens.copy_to_host_async()
        logprobs = None
        if any(sequence.params.logprobs is not None for sequence in self._in_lane.values()):
            logprobs = self.lanes.logprobs
            assert logprobs is not None
            logprobs.copy_to_host_async()
        self._unread.append((tokens, logprobs, dict(self._in_lane)))
        self.usage.steps += 1
        for sequence in self._in_lane.values():
            sequence.stored += 1

    def read(self, unread: int = 0) -> list[tuple[LaneSequence, int]]:
        """The tokens of the steps that were launched, but for the last ``unread``; waits for them.

        Tokens of sequences that were released in the meantime are among them.
        """
        found = []
        while len(self._unread) > unread:
            tokens, logprobs, lanes = self._unread.popleft()
            values = np.asarray(tokens)
            found.extend((sequence, int(values[lane])) for lane, sequence in lanes.items())
            rows = None if logprobs is None else logprobs.to_host()
            for lane, sequence in lanes.items():
                if rows is not None and sequence.params.logprobs is not None:
                    sequence.logprobs.append(rows.row(lane, sequence.params.logprobs))
        return found

    def fed(self, sequence: LaneSequence, token: int) -> None:
        """The next token of an answer is known, and is or will be stored: it counts, and its block can get a key."""
        if sequence.known > sequence.prompt_tokens:
            self._count(sequence)
        sequence.known += 1
        # Decode rounds in its own way, so what it stores is not what a chunk would have.
        if sequence.chain is None or self._deterministic or self._selects_otherwise(sequence):
            return
        sequence.chain.append(token, self.selects(sequence.known))
        self._publish(sequence)

    def release(self, sequence: LaneSequence) -> None:
        """The sequence is over, whatever it was doing; its finished blocks can be found until their place is needed."""
        if sequence.first_token is not None and sequence.prefill is not None and sequence.chain is not None:
            self._settle(sequence, None)
        self._publish(sequence)
        if sequence.lane is not None:
            del self._in_lane[sequence.lane]
            self.lanes.leave(sequence.lane)
        elif sequence.parked is not None:
            self.lanes.drop(sequence.parked)
        else:
            self.blocks.give_back([*sequence.shared, *sequence.written])
        sequence.lane = sequence.parked = sequence.prefill = None
        sequence.shared, sequence.written = [], []

    def forget_stats(self) -> None:
        """What the steps did so far counts no more; waits for the device."""
        self._noted, self._forgotten = None, self.lanes.return_stats()

    def note_cache(self) -> None:
        """Asks the device for the numbers that `cache_stats` gives; waits for nothing."""
        self._noted = self.lanes.note_stats()

    def cache_stats(self) -> dict[str, tuple[float, str]]:
        """Numbers of the cache with what they mean, counters with ``_total`` behind.

        What the steps did is as of the last `note_cache`; waits for the steps launched before that.
        """
        stats, usage, blocks = (self._noted or self.lanes.note_stats())(), self.usage, self.blocks
        if self._forgotten is not None:
            stats = stats.since(self._forgotten)
        copied, attended = int(stats.copied.sum()), int(stats.attended.sum())
        # Without a sample there is nothing to say.
        sampled = {
            "prefetch_recall": (
                stats.recall,
                "Share of the blocks that a layer's own query picks which its step attended to, in sampled steps.",
            ),
            "wasted_copies_ratio": (
                stats.wasted_share,
                "Share of the copied blocks that the layer's own query does not pick, in sampled steps.",
            ),
            "exposed_wait_seconds": (
                stats.exposed_wait,
                "Seconds that copies added to a step which computing did not hide, on average over sampled steps.",
            ),
        }
        return {
            "cache_blocks": (blocks.num_blocks, "Blocks of the host pool."),
            "cache_free_blocks": (blocks.num_free - blocks.num_cached, "Blocks that hold nothing."),
            "cache_prefix_blocks": (blocks.num_cached, "Finished blocks without a user, kept for later prompts."),
            "prefix_prompt_tokens_total": (usage.prompt_tokens, "Tokens of the prompts begun."),
            "prefix_hit_tokens_total": (usage.prefix_tokens, "Those of them that were in the cache."),
            "preemptions_total": (usage.parked, "Sequences that gave up their lane for another one."),
            "decode_steps_total": (usage.steps, "Decode steps of all lanes."),
            "blocks_attended_total": (attended, "Blocks attended to in decode, over layers and KV heads."),
            "blocks_fetched_total": (copied, "Those of them that came from the host pool."),
            "fetched_bytes_total": (float(stats.bytes_copied), "Bytes from the host pool."),
            "sampled_steps_total": (stats.sampled_steps, "Decode steps compared with the layers' own selections."),
            "step_launches_total": (stats.launches, "Decode steps launched directly behind another one."),
            "late_launches_total": (stats.late, "Those of them that found the device idle."),
            "device_idle_seconds_total": (stats.gap, "How long it had been idle before them, at most."),
        } | {name: (value, text) for name, (value, text) in sampled.items() if value is not None}

    def _settle(self, sequence: LaneSequence, lane: int | None) -> None:
        """A prefilled sequence's blocks go to the pool, and it to a lane or among those that wait."""
        assert sequence.prefill is not None
        assert sequence.first_token is not None
        prefill, first, params = sequence.prefill, sequence.first_token, sequence.params
        cache = prefill.take_cache()
        more = {"shared": sequence.shared, "written": sequence.written, "seen": prefill.seen}
        if lane is None:
            sequence.parked = self.lanes.adopt(cache, first, params, **more)
        else:
            self.lanes.enter(lane, cache, first, params, **more)
            sequence.lane = lane
        sequence.prefill, sequence.shared, sequence.written = None, [], []
        self._publish(sequence)

    def _publish(self, sequence: LaneSequence) -> None:
        if sequence.chain is None or len(sequence.chain.keys) <= sequence.published:
            return
        if sequence.lane is not None:
            written = self.lanes.written_blocks(sequence.lane)
        elif sequence.parked is not None:
            written = sequence.parked.blocks[: sequence.parked.length // self.block_size]
        else:
            return
        ready = min(len(written), len(sequence.chain.keys))
        for block in range(sequence.published, ready):
            self.blocks.publish(written[block], sequence.chain.keys[block])
        sequence.published = max(sequence.published, ready)

    def selects(self, length: int) -> bool:
        """Whether a token attends to a selection, in a sequence of so many tokens."""
        return self.runner.mode is not Mode.DENSE and length >= self.runner.config.sparse.dense_len

    def _selects_otherwise(self, sequence: LaneSequence) -> bool:
        """Whether the newest token, and so all behind it, has read other blocks than a prompt's token would have."""
        assert sequence.chain is not None
        config = self.runner.config.sparse
        return (
            self.runner.mode is Mode.SPARDA_DECODE_ONLY
            and self.selects(sequence.known)
            and len(sequence.chain.keys) >= config.num_selected_blocks
        )

    def _count(self, sequence: LaneSequence) -> None:
        """What the step that gave the newest token has read: a selection is as wide as the sequence allows."""
        config = self.runner.config
        visible = (sequence.known - 1) // self.block_size + 1
        selects = self.selects(sequence.known) or self.runner.mode is Mode.INFINIGEN
        read = min(config.sparse.num_selected_blocks, visible) if selects else visible
        sequence.decoded += 1
        sequence.read += read * config.num_kv_heads
        sequence.visible += visible * config.num_kv_heads
