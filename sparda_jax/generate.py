"""Running a model: which program runs over which cache bucket, sequences and ragged batches."""

from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from sparda_jax.adjusting import all_allowed, prompt_tokens
from sparda_jax.cache import KVCache
from sparda_jax.cache.pool import Pools
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.decode_plan import Backends
from sparda_jax.forward import Skew
from sparda_jax.generation_stats import GenerationStats, PhaseStats
from sparda_jax.infinigen import calibrate
from sparda_jax.logprobs import SCORED_TOKENS, Logprobs
from sparda_jax.model import Decoder
from sparda_jax.prefill import by_bits
from sparda_jax.programs import Advanced, Scored, WriteAhead, advance, count_tokens, grow, score_rows, storing
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.selection import Mode

MIN_CAPACITY = 1024
# Sizes of a prefill chunk by platform: a GPU wants long ones, a CPU scores that stay in its cache. Each size is a
# program of its own for each cache bucket, so there are few.
PREFILL_CHUNKS = {"cpu": (128,), "gpu": (256, 1024, 4096)}
# Temporary arrays of a chunk are kept below this. Plain attention holds all scores: larger caches get smaller chunks.
MAX_CHUNK_BYTES = 2 << 30


def token_bytes(config: ModelConfig, mode: Mode, itemsize: int, capacity: int) -> int:
    """Temporary bytes of a token in a prefill chunk over a cache, as far as they decide how long it may be."""
    if by_bits(mode, Backends()):
        return 3 * config.intermediate_size * itemsize
    return 4 * config.num_heads * capacity


class Runner:
    """One model with its compiled programs. Not safe for use by several threads at once.

    Args:
        model: the weights.
        mode: how blocks are selected.
        max_model_len: longest sequence, prompt and answer together; None: ``max_position_embeddings``. Also picks the
            RoPE factors, once for all requests.
        calibration: tokens for InfiniGen's basis; needed in that mode only.

    Raises:
        ConfigError: the mode needs a Forecast or a calibration text that is not there.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        mode: Mode = Mode.SPARSE,
        max_model_len: int | None = None,
        calibration: Seq[int] | None = None,
    ):
        if mode.needs_forecast and not model.has_forecast:
            raise ConfigError(
                f"mode={mode.value} needs a Forecast, and this checkpoint carries none: add one with "
                "`python -m sparda_jax.convert SRC DST --forecast FILE`, or use mode=sparse"
            )
        if mode is Mode.INFINIGEN and not calibration:
            raise ConfigError("mode=infinigen needs calibration tokens, and none were given")
        self.config: ModelConfig = model.config
        self.mode = mode
        self.max_model_len = model.config.max_position_embeddings if max_model_len is None else max_model_len
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len} is not supported: it must be at least 2")
        self.dtype = model.embed_tokens.dtype
        self._skew: Skew | None = None
        if mode is Mode.INFINIGEN and calibration:
            self._skew = calibrate(model, calibration, self.max_model_len)
        self._graphdef, self._state = nnx.split(model)
        self._device = next(iter(model.embed_tokens.devices()))
        self.prefill_chunks = PREFILL_CHUNKS["cpu" if self._device.platform == "cpu" else "gpu"]
        """Tokens of a prefill chunk, ascending: the smallest that holds the rest of a prompt is taken."""
        self._unseen: dict[int, Int[Array, "batch vocab"]] = {}
        self._all_allowed: dict[int, UInt32[Array, "batch words"]] = {}

    @property
    def model(self) -> Decoder:
        """The weights."""
        return nnx.merge(self._graphdef, self._state)

    @property
    def skew(self) -> Skew | None:
        """InfiniGen's calibrated basis; None in other modes."""
        return self._skew

    def start(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        prefix: KVCache | None = None,
        prefix_tokens: int | None = None,
    ) -> "Sequence":
        """A request of its own, to be advanced step by step.

        Args:
            prompt: its tokens.
            params: how it is continued.
            prefix: a cache of batch 1 that holds the prompt's first tokens already, at least one and not all: prefill
                goes on behind them. The request takes it over and donates it.
            prefix_tokens: how many it holds, from a caller that knows; None: the device is asked, and waited for.

        Raises:
            ValueError: what :meth:`start_batch` names, or a ``prefix`` that is no such cache.
        """
        lanes = self.start_batch([prompt], [params])
        if prefix is not None:
            lengths = np.asarray(prefix.lengths) if prefix_tokens is None else np.array([prefix_tokens])
            lanes.go_on_from(prefix, lengths)
        return Sequence(lanes)

    def start_batch(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> "Lanes":
        """A ragged batch that advances together.

        Raises:
            ValueError: no prompt, an empty prompt, a token id outside the vocabulary, or more tokens than fit.
        """
        if not prompts:
            raise ValueError("prompts is empty: give at least one prompt")
        for prompt, param in zip(prompts, params, strict=True):
            self.check(prompt, param)
        return Lanes(self, prompts, params)

    def check(self, prompt: Seq[int], params: SamplingParams) -> None:
        """Refuses a request that could not run; nothing is computed.

        Raises:
            ValueError: an empty prompt, a token id that is no integer or outside the vocabulary, in ``logit_bias`` and
                ``stop_token_ids`` too, or more tokens than fit.
        """
        if not len(prompt):
            raise ValueError("prompt is empty: give at least one token")
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt holds {ids.dtype.name} values: token ids are integers")
        if not 0 <= ids.min() <= ids.max() < self.config.vocab_size:
            raise ValueError(
                f"prompt holds token ids {ids.min()}..{ids.max()}, outside vocab_size={self.config.vocab_size}"
            )
        for name, named in (
            ("logit_bias", [token for token, _ in params.logit_bias]),
            ("stop_token_ids", params.stop_token_ids),
        ):
            outside = [token for token in named if not 0 <= token < self.config.vocab_size]
            if outside:
                raise ValueError(f"{name} holds {outside[0]}, outside vocab_size={self.config.vocab_size}")
        if len(prompt) + params.max_tokens > self.max_model_len:
            raise ValueError(
                f"prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed "
                f"max_model_len={self.max_model_len}: shorten one of them or raise --max-model-len"
            )

    def capacity_for(self, length: int) -> int:
        """The cache bucket, in tokens, of sequences of ``length``: attention runs over this width, not the maximum."""
        capacity = MIN_CAPACITY
        while capacity < length:
            capacity *= 2
        block_size = self.config.sparse.block_size
        limit = -(-self.max_model_len // block_size) * block_size
        return min(capacity, limit)

    def chunk_for(self, batch: int, remaining: int, capacity: int) -> int:
        """Tokens of the next prefill chunk: the smallest bucket that holds the rest, as far as memory allows."""
        row_bytes = batch * token_bytes(self.config, self.mode, self.dtype.itemsize, capacity)
        chunks = self.prefill_chunks
        fitting = [c for c in chunks if c * row_bytes <= MAX_CHUNK_BYTES] or [chunks[0]]
        return next((c for c in fitting if c >= remaining), fitting[-1])

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        infinigen = self.mode is Mode.INFINIGEN
        cache = KVCache.empty(self.config, batch, capacity, self.dtype, infinigen=infinigen)
        # Committed like the cache that a step returns; otherwise the first step of a request would be another program.
        return jax.device_put(cache, self._device)

    def advance(
        self,
        cache: KVCache,
        lengths: np.ndarray,
        tokens: np.ndarray,
        num_new: np.ndarray,
        sparse: np.ndarray,
        sampling: SamplingState,
        decode: bool,
        seen: Int[Array, "batch vocab"] | None = None,
        write: WriteAhead | None = None,
        allowed: UInt32[Array, "batch words"] | None = None,
    ) -> Advanced:
        """Launches one compiled step and waits for nothing; ``lengths`` are the cache's, which the host knows.

        See :func:`sparda_jax.forward.forward` for the other arguments. ``seen`` as of `sample`; None: nothing.
        ``write``: of a batch of 1. ``allowed`` as of `sample`; None: every token.
        """
        needed = self.capacity_for(int(np.max(lengths + num_new)))
        if needed > cache.capacity:
            cache = grow(cache, capacity=needed)
        operands = (
            self._graphdef,
            self._state,
            self._skew,
            cache,
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(num_new, jnp.int32),
            jnp.asarray(sparse, bool),
            sampling,
            self._nothing_seen(len(lengths)) if seen is None else seen,
            self._every_token(len(lengths)) if allowed is None else allowed,
        )
        ways = {"mode": self.mode, "decode": decode, "max_len": self.max_model_len}
        if write is None:
            return advance(*operands, **ways)
        ids = np.zeros(cache.capacity // self.config.sparse.block_size, np.int32)
        ids[: len(write.blocks)] = write.blocks
        block_ids = jnp.asarray(ids)

        def run(pools: Pools) -> tuple[Pools, Advanced]:
            return storing(pools[0].sharding)(*operands, pools=pools, block_ids=block_ids, **ways)

        return write.lend(run)

    def seen_in(self, prompts: Seq[np.ndarray]) -> Int[Array, "batch vocab"]:
        """What penalties are counted from, see `adjusting.prompt_tokens`."""
        return jax.device_put(prompt_tokens(prompts, self.config.vocab_size), self._device)

    def score(self, stream: Float[Array, "batch q_len hidden"], lane: int, targets: np.ndarray) -> list[Scored]:
        """Log probabilities of what follows each of a chunk's first tokens; waits for nothing.

        Args:
            stream: of the chunk.
            lane: the sequence.
            targets: the tokens that follow its first tokens.

        Returns:
            Pieces of the same number of rows, one behind the other, each with those of its rows that count.
        """
        size = stream.shape[1]
        rows = min(SCORED_TOKENS, size)
        padded = np.zeros(size, np.int32)
        padded[: len(targets)] = targets
        pieces = []
        for begin in range(0, len(targets), rows):
            # The last piece of an odd chunk begins before its own rows.
            start = min(begin, size - rows)
            scored = score_rows(
                self._graphdef,
                self._state,
                stream,
                jnp.int32(lane),
                jnp.int32(start),
                jnp.asarray(padded[start : start + rows]),
                rows=rows,
            )
            pieces.append((scored, slice(begin - start, min(begin + rows, len(targets)) - start)))
        return pieces

    def _nothing_seen(self, batch: int) -> Int[Array, "batch vocab"]:
        if batch not in self._unseen:
            self._unseen[batch] = self.seen_in([np.zeros(0, np.int32)] * batch)
        return self._unseen[batch]

    def allowed(self, masks: UInt32[np.ndarray, "batch words"]) -> UInt32[Array, "batch words"]:
        """Masks on the device, see `adjusting.all_allowed`."""
        return jax.device_put(masks, self._device)

    def _every_token(self, batch: int) -> UInt32[Array, "batch words"]:
        if batch not in self._all_allowed:
            self._all_allowed[batch] = self.allowed(all_allowed(batch, self.config.vocab_size))
        return self._all_allowed[batch]


class Lanes:
    """A ragged batch in flight: prompts are prefilled in chunks, then every live lane decodes one token a step."""

    def __init__(self, runner: Runner, prompts: Seq[Seq[int]], params: Seq[SamplingParams]):
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
