"""Running a model: which program runs over which cache bucket."""

from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt32

from sparda_jax.adaptive import Budget
from sparda_jax.adjusting import all_allowed, prompt_tokens
from sparda_jax.cache import KVCache
from sparda_jax.cache.pool import Pools
from sparda_jax.config import ConfigError, ModelConfig
from sparda_jax.decode_plan import Backends
from sparda_jax.foresight import Foresight
from sparda_jax.forward import Skew
from sparda_jax.in_flight import Lanes, Sequence
from sparda_jax.infinigen import calibrate
from sparda_jax.logprobs import SCORED_TOKENS
from sparda_jax.model import Decoder
from sparda_jax.prefill import by_bits
from sparda_jax.programs import Advanced, Scored, WriteAhead, advance, grow, score_rows, storing
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.selection import Mode

MIN_CAPACITY = 1024
# Sizes of a prefill chunk by platform: a GPU wants long ones, a CPU scores that stay in its cache. Each size is a
# program of its own for each cache bucket, so there are few.
PREFILL_CHUNKS = {"cpu": (128,), "gpu": (256, 1024, 4096)}
# Temporary arrays of a chunk are kept below this. Plain attention holds all scores: larger caches get smaller chunks.
MAX_CHUNK_BYTES = 2 << 30


def token_bytes(config: ModelConfig, itemsize: int, capacity: int) -> int:
    """Temporary bytes of a token in a prefill chunk over a cache, as far as they decide how long it may be."""
    if by_bits(Backends()):
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
        foresight: a Forecast in place of the model's own, for experiments; decode lanes do without.
        budget: see `forward`; as ``foresight``.

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
        foresight: Foresight | None = None,
        budget: Budget | None = None,
    ):
        if mode.needs_forecast and not model.has_forecast and foresight is None:
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
        self._foresight, self._budget = foresight, budget
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
    ) -> Sequence:
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

    def start_batch(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> Lanes:
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
        row_bytes = batch * token_bytes(self.config, self.dtype.itemsize, capacity)
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
            return advance(*operands, foresight=self._foresight, budget=self._budget, **ways)
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
