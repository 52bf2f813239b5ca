"""Requests in flight: a ragged batch that advances step by step, or one request by itself."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from sparda_jax.cache import KVCache
from sparda_jax.generation_stats import GenerationStats, PhaseStats
from sparda_jax.logprobs import Logprobs
from sparda_jax.programs import Advanced, Scored, WriteAhead, count_tokens
from sparda_jax.sampling import SamplingParams, SamplingState

if TYPE_CHECKING:  # a runner starts them
    from sparda_jax.generate import Runner


class Lanes:
    """A ragged batch in flight: prompts are prefilled in chunks, then every live lane decodes one token a step."""

    def __init__(self, runner: "Runner", prompts: Seq[Seq[int]], params: Seq[SamplingParams]):
        self._runner = runner
        self._prompts = [np.asarray(p, np.int32) for p in prompts]
        self.prompt_tokens = np.array([len(p) for p in prompts])
        self.prefilled = 0
        self._sampling = SamplingState.of(params, self.prompt_tokens.tolist())
        self._seen = runner.seen_in(self._prompts) if any(p.counts_tokens for p in params) else None
        self._allowed: UInt32[Array, "batch words"] | None = None
        self._params = list(params)
        self._scored: list[list[Scored] | None] = [None if p.prompt_logprobs is None else [] for p in params]
        self.logprobs: list[Logprobs | None] = [None] * len(prompts)
        """Of each lane's newest token, where its parameters ask for them."""
        self._live = np.ones(len(prompts), bool)
        self._last = np.zeros(len(prompts), np.int32)
        self._lengths = np.zeros(len(prompts), np.int64)
        self._cache: KVCache | None = None
        self._taken = False
        self._launched: tuple[bool, np.ndarray, jax.Array, jax.Array] | None = None
        layers = runner.config.num_layers
        self.stats = [
            GenerationStats(
                mode=runner.mode.value,
                prefill=PhaseStats(tokens=0, blocks_read=[0] * layers, blocks_visible=0),
                decode=PhaseStats(tokens=0, blocks_read=[0] * layers, blocks_visible=0),
            )
            for _ in prompts
        ]

    def go_on_from(self, prefix: KVCache, lengths: np.ndarray) -> None:
        """The one prompt of this batch is prefilled as far as ``prefix``, of ``lengths``, goes; see `Runner.start`."""
        prompt = int(self.prompt_tokens[0])
        if lengths.shape != (1,) or not 0 < lengths[0] < prompt:
            raise ValueError(
                f"prefix holds {lengths.tolist()} tokens: it must be one sequence, of at least one token and fewer "
                f"than the prompt's {prompt}"
            )
        if self._scored[0] is not None:
            raise ValueError("prefix holds tokens that prompt_logprobs wants computed: begin without one")
        self.prefilled, self._lengths, self._cache = int(lengths[0]), lengths.astype(np.int64), prefix

    def finish(self, lane: int) -> None:
        """The lane stops: it takes part in no further step."""
        self._live[lane] = False

    def allow(self, masks: UInt32[np.ndarray, "batch words"]) -> None:
        """Which tokens may come next, of lanes whose parameters have ``masked``; see `adjusting.all_allowed`."""
        self._allowed = self._runner.allowed(masks)

    @property
    def seen(self) -> Int[Array, "batch vocab"] | None:
        """See `Sequence.seen`."""
        return self._seen

    def prompt_logprobs(self, lane: int) -> Logprobs | None:
        """Of a prompt's tokens behind the first, as far as it is prefilled; waits for them. None: not asked for."""
        scored, likeliest = self._scored[lane], self._params[lane].prompt_logprobs
        if scored is None or likeliest is None:
            return None
        pieces = [piece.to_host().rows(rows, likeliest) for piece, rows in scored]
        return Logprobs.concatenate(pieces, likeliest)

    @property
    def launched(self) -> jax.Array | None:
        """See `Sequence.launched`."""
        return None if self._launched is None else self._launched[3]

    def take_cache(self) -> KVCache:
        """The batch's cache; what takes it may donate it, so these lanes can't go on."""
        if self._cache is None:
            raise ValueError("there is no cache to take: advance the sequence first, and take it once")
        cache, self._cache, self._taken = self._cache, None, True
        return cache

    def advance(self, write: WriteAhead | None = None) -> np.ndarray | None:
        """One prefill chunk (None until the last), or one decode step: the new token of every live lane, else -1.

        A chunk that gives no token is only launched; the next call waits for it, and then `stats` count it.
        ``write``: of a chunk of one prompt.
        """
        longest = int(self.prompt_tokens.max())
        tokens = self._prefill(longest, write) if self.prefilled < longest else self._decode()
        if self.prefilled < longest:
            return None
        self._settle()
        self._last = np.where(self._live, tokens, self._last).astype(np.int32)
        return np.where(self._live, tokens, -1)

    def chunk_end(self) -> int:
        """Tokens of the longest prompt that are done when its next chunk is."""
        longest = int(self.prompt_tokens.max())
        return min(self.prefilled + self._next_chunk(longest), longest)

    def _next_chunk(self, longest: int) -> int:
        """Its size, padding included."""
        runner = self._runner
        reach = min(longest, self.prefilled + runner.prefill_chunks[-1])
        capacity = max(runner.capacity_for(reach), self._cache.capacity if self._cache else 0)
        return runner.chunk_for(len(self._prompts), longest - self.prefilled, capacity)

    def _prefill(self, longest: int, write: WriteAhead | None) -> np.ndarray:
        runner, batch = self._runner, len(self._prompts)
        start, size = self.prefilled, self._next_chunk(longest)
        tokens = np.zeros((batch, size), np.int32)
        for lane, prompt in enumerate(self._prompts):
            piece = prompt[start : start + size]
            tokens[lane, : len(piece)] = piece
        num_new = np.clip(self.prompt_tokens - start, 0, size)
        # One decision for the whole prompt, however it is cut.
        advanced = self._step(tokens, num_new, self._is_sparse(self.prompt_tokens), decode=False, write=write)
        for lane, scored in enumerate(self._scored):
            targets = self._prompts[lane][start + 1 : start + size + 1]
            if scored is not None and len(targets):
                scored += runner.score(advanced.stream, lane, targets)
        ended = (num_new > 0) & (self.prompt_tokens <= start + size)
        if ended.any():
            self._last = np.where(ended, np.asarray(advanced.tokens), self._last).astype(np.int32)
            self._note(advanced, ended)
        self.prefilled = min(start + size, longest)
        return self._last

    def _decode(self) -> np.ndarray:
        num_new = self._live.astype(np.int32)
        advanced = self._step(self._last[:, None], num_new, self._is_sparse(self._lengths + 1), decode=True)
        self._note(advanced, self._live)
        return np.asarray(advanced.tokens)

    def _note(self, advanced: Advanced, which: np.ndarray) -> None:
        """The new tokens of these lanes count for penalties, and their log probabilities are kept."""
        if self._seen is not None:
            self._seen = count_tokens(self._seen, advanced.tokens, jnp.asarray(which))
        wanted = [lane for lane, p in enumerate(self._params) if which[lane] and p.logprobs is not None]
        found = advanced.logprobs.to_host() if wanted else None
        for lane in wanted:
            assert found is not None
            self.logprobs[lane] = found.row(lane, self._params[lane].logprobs or 0)

    def _is_sparse(self, lengths: np.ndarray) -> np.ndarray:
        return lengths >= self._runner.config.sparse.dense_len

    def _step(
        self,
        tokens: np.ndarray,
        num_new: np.ndarray,
        sparse: np.ndarray,
        *,
        decode: bool,
        write: WriteAhead | None = None,
    ) -> Advanced:
        if self._taken:
            raise ValueError("the cache has been taken: this sequence can't go on")
        self._settle()
        cache, self._cache = self._cache, None
        if cache is None:
            cache = self._runner.new_cache(len(self._prompts), self._runner.capacity_for(int(num_new.max())))
        advanced = self._runner.advance(
            cache, self._lengths, tokens, num_new, sparse, self._sampling, decode, self._seen, write, self._allowed
        )
        self._cache = advanced.cache
        self._lengths += num_new
        self._launched = (decode, num_new, advanced.read, advanced.visible)
        return advanced

    def _settle(self) -> None:
        """Waits for what was launched last, and counts what it read."""
        if self._launched is None:
            return
        decode, num_new, read, visible = self._launched
        read, visible = np.asarray(read), np.asarray(visible)
        self._launched = None
        for lane, stats in enumerate(self.stats):
            phase = stats.decode if decode else stats.prefill
            phase.add(int(num_new[lane]), read[:, lane], int(visible[lane]))


class Sequence:
    """One request with a cache of its own. Stop conditions are the caller's."""

    def __init__(self, lanes: Lanes):
        self._lanes = lanes

    @property
    def prompt_tokens(self) -> int:
        return int(self._lanes.prompt_tokens[0])

    @property
    def prefilled(self) -> int:
        """Prompt tokens processed so far."""
        return self._lanes.prefilled

    @property
    def stats(self) -> GenerationStats:
        return self._lanes.stats[0]

    @property
    def launched(self) -> jax.Array | None:
        """An array of the chunk that was launched last, for whoever wants to wait for it; None once it is counted."""
        return self._lanes.launched

    @property
    def logprobs(self) -> Logprobs | None:
        """Of the newest token, where they are asked for."""
        return self._lanes.logprobs[0]

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        """Of the prompt's tokens behind the first, as far as it is prefilled, where they are asked for; waits."""
        return self._lanes.prompt_logprobs(0)

    @property
    def seen(self) -> Int[Array, "1 vocab"] | None:
        """The tokens of prompt and answer, for `DecodeLanes.enter`; None: its parameters have no penalties."""
        return self._lanes.seen

    def allow(self, mask: UInt32[np.ndarray, "words"]) -> None:
        """Which tokens may come next, where its parameters have ``masked``; see `adjusting.all_allowed`."""
        self._lanes.allow(mask[None])

    def take_cache(self) -> KVCache:
        """The cache of what went in so far, for `DecodeLanes.enter`; this sequence can't go on.

        Raises:
            ValueError: nothing has been prefilled, or the cache has been taken.
        """
        return self._lanes.take_cache()

    def chunk_end(self) -> int:
        """Prompt tokens that are done when the next chunk is."""
        return self._lanes.chunk_end()

    def advance(self, write: WriteAhead | None = None) -> int | None:
        """One prefill chunk or one decode step: the new token, or None while the prompt is not finished.

        ``write``: a chunk's finished blocks go to the host pool.
        """
        tokens = self._lanes.advance(write)
        return None if tokens is None else int(tokens[0])
