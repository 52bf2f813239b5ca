"""Toy decoders, a driver of the cached forward pass, and the oracle's runs, each made once a process."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparda_jax.cache import KVCache
from sparda_jax.checkpoint import load_model
from sparda_jax.checkpoint.tensor_files import write_safetensors
from sparda_jax.decode_plan import Backends
from sparda_jax.forward import Skew, forward
from sparda_jax.model import Decoder
from sparda_jax.selection import Mode
from tests import oracle
from tests.oracle.golden import golden_weights, load_golden

# 16 blocks, more than twice the 6 that the toys select: no shortcut for small caches hides the selection.
CAPACITY = 1024
LAYERS = 2
# One static width for every prompt and one for every chunk, so that few programs are compiled.
PROMPT_WIDTH, CHUNK_WIDTH = 704, 128
SELECTING = (Mode.SPARSE, Mode.SPARDA, Mode.SPARDA_DECODE_ONLY, Mode.INFINIGEN)
ALL_MODES = tuple(Mode)
FASTEST = Backends()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toy:
    """A model twice: HF dictionary and tensors for the oracle, a loaded `Decoder` for the package."""

    config: Mapping[str, Any]
    weights: Mapping[str, np.ndarray]
    decoder: Decoder

    @functools.cached_property
    def split(self) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(self.decoder)


def write_checkpoint(folder: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Path:
    """A Hugging Face folder; the weights keep their dtype."""
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", dict(weights))
    return folder


def load(config: Mapping[str, Any], weights: Mapping[str, np.ndarray], dtype: Any = jnp.float32) -> Toy:
    """The package's own way from files to a decoder."""
    with tempfile.TemporaryDirectory() as folder:
        decoder = load_model(write_checkpoint(Path(folder), config, weights), dtype=dtype)
    return Toy(config=config, weights=weights, decoder=decoder)


@functools.cache
def toy(kind: str = "base", dtype: Any = jnp.float32) -> Toy:
    """A model of 2 layers: `base`; `wide` with head_dim 64, of which InfiniGen keeps half; `threshold` with
    dense_len 450; `deep` with a layer more. A `golden_*` name gives the model behind that golden file.
    """
    if kind.startswith("golden_"):
        name = kind.removeprefix("golden_")
        defaults = {"model_type": "minicpm", "bos_token_id": 1, "eos_token_id": 2}
        return load(defaults | load_golden(name).config, golden_weights(name), dtype)
    changes: dict[str, Any] = {
        "base": {},
        "wide": {"head_dim": 64, "num_attention_heads": 4, "sparse_config": {"infinigen_num_channels": 32}},
        "threshold": {"sparse_config": {"dense_len": 450}},
        "deep": {"num_hidden_layers": 3},
    }[kind]
    config = oracle.toy_config(**changes)
    return load(config, oracle.toy_weights(config, seed=3), dtype)


def kind_of(mode: Mode) -> str:
    """InfiniGen needs more channels than it keeps, or its choice of channels would choose nothing."""
    return "wide" if mode is Mode.INFINIGEN else "base"


@functools.cache
def tokens(count: int = 1000, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 96, count)


def oracle_mode(mode: Mode) -> str:
    return mode.value.replace("-", "_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleRun:
    """A prompt and teacher-forced steps behind it."""

    prefill: oracle.OracleResult
    steps: list[oracle.OracleResult]

    @property
    def logits(self) -> np.ndarray:
        return np.concatenate([self.prefill.logits, *(step.logits for step in self.steps)])


@functools.cache
def oracle_prefill(mode: Mode, length: int, kind: str | None = None) -> oracle.OracleResult:
    """The oracle's float64 result of `tokens()[:length]`."""
    model = toy(kind or kind_of(mode))
    return oracle.forward(model.weights, model.config, tokens()[:length], oracle_mode(mode))


@functools.cache
def oracle_run(mode: Mode, prompt: int, total: int, kind: str | None = None) -> OracleRun:
    """The oracle over `tokens()[:prompt]`, then token by token up to `total`."""
    prefill = oracle_prefill(mode, prompt, kind)
    return OracleRun(prefill=prefill, steps=oracle.decode_many(prefill.state, tokens()[prompt:total]))


@functools.cache
def skew_for(mode: Mode) -> Skew | None:
    """For InfiniGen the bases that the oracle calibrates on a prompt of 620 tokens."""
    if mode is not Mode.INFINIGEN:
        return None
    layers = oracle_prefill(mode, 620).state.layers
    return tuple(jnp.asarray(layer.basis, jnp.float32) for layer in layers)


@functools.partial(jax.jit, static_argnames=("graphdef", "mode", "decode", "backends"))
def _step(graphdef, state, cache, ids, num_new, sparse, skew, *, mode, decode, backends):
    model = nnx.merge(graphdef, state)
    ways = {"mode": mode, "decode": decode, "backends": backends}
    x, cache, trace = forward(model, cache, ids, num_new, sparse, skew=skew, **ways)
    return model.logits(x), cache, trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What one sequence got: logits [n, vocab], per layer the ids [kv_heads, n, k] (None: all blocks were read)."""

    logits: np.ndarray
    selected: tuple[np.ndarray | None, ...]
    blocks_read: np.ndarray
    blocks_visible: int


def join(outputs: Sequence[Output]) -> Output:
    """Consecutive pieces of one sequence as one."""
    selected = []
    for layer in zip(*(o.selected for o in outputs), strict=True):
        given = [ids for ids in layer if ids is not None]
        assert len(given) in (0, len(layer))
        selected.append(np.concatenate(given, axis=1) if given else None)
    return Output(
        logits=np.concatenate([o.logits for o in outputs]),
        selected=tuple(selected),
        blocks_read=np.sum([o.blocks_read for o in outputs], axis=0),
        blocks_visible=sum(o.blocks_visible for o in outputs),
    )


class Session:
    """A ragged batch over one cache. Padding is random tokens; with `poison` unused cache rows are NaN at all times."""

    def __init__(
        self,
        model: Toy,
        mode: Mode,
        batch: int = 1,
        *,
        skew: Skew | None = None,
        sparse: bool | Sequence[bool] = True,
        poison: bool = False,
        capacity: int = CAPACITY,
        backends: Backends = FASTEST,
    ) -> None:
        self.model, self.mode, self.skew, self.poison = model, mode, skew, poison
        self.backends = backends
        self.sparse = np.broadcast_to(sparse, (batch,))
        dtype = model.decoder.embed_tokens.dtype
        infinigen = mode is Mode.INFINIGEN
        self.cache = KVCache.empty(model.decoder.config, batch, capacity, dtype, infinigen=infinigen)

    def feed(
        self, pieces: Sequence[Sequence[int] | np.ndarray], width: int = PROMPT_WIDTH, *, decode: bool = False
    ) -> list[Output]:
        """Appends one piece per sequence, padded to `width`; each gets its own `Output`."""
        if self.poison:
            self.cache = poisoned(self.cache)
        ids = np.random.default_rng(99).integers(3, 96, (len(pieces), width))
        for lane, piece in enumerate(pieces):
            ids[lane, : len(piece)] = piece
        counts = np.array([len(piece) for piece in pieces], np.int32)
        graphdef, state = self.model.split
        logits, self.cache, trace = _step(
            graphdef, state, self.cache, ids.astype(np.int32), counts, self.sparse, self.skew,
            mode=self.mode, decode=decode, backends=self.backends,
        )  # fmt: skip
        logits, selected = np.asarray(logits), [None if s is None else np.asarray(s) for s in trace.selected]
        return [
            Output(
                logits=logits[lane, :n],
                selected=tuple(None if s is None else s[lane, :, :n] for s in selected),
                blocks_read=np.asarray(trace.blocks_read)[:, lane],
                blocks_visible=int(trace.blocks_visible[lane]),
            )
            for lane, n in enumerate(counts)
        ]

    def decode(self, ids: np.ndarray) -> list[Output]:
        """Teacher-forced steps, `ids [batch, steps]`; one joined `Output` per sequence."""
        steps = [self.feed(list(ids[:, i : i + 1]), 1, decode=True) for i in range(ids.shape[1])]
        return [join(lane) for lane in zip(*steps, strict=True)]


@jax.jit
def poisoned(cache: KVCache) -> KVCache:
    """NaN in every row of keys and values behind a sequence's end, and in every unfinished compressed key."""
    lengths = cache.lengths[:, None, None, None]

    def fill(x: jax.Array, used: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(x.shape[2])[None, None, :, None] < used, x, jnp.nan)

    windows = jnp.maximum(lengths // 16 - 1, 0)
    layers = tuple(
        dataclasses.replace(
            layer, k=fill(layer.k, lengths), v=fill(layer.v, lengths), compressed_k=fill(layer.compressed_k, windows)
        )
        for layer in cache.layers
    )
    return dataclasses.replace(cache, layers=layers)


@functools.cache
def whole(mode: Mode, length: int, seed: int = 5) -> Output:
    """`tokens(1000, seed)[:length]` in one call, alone: what other ways to feed it have to equal."""
    return alone(mode, length, 0, seed)


@functools.cache
def alone(mode: Mode, prompt: int, steps: int, seed: int = 5) -> Output:
    """`tokens(1000, seed)` as a prompt in one call and teacher-forced steps, without any neighbour."""
    session = Session(toy(kind_of(mode)), mode, skew=skew_for(mode))
    ids = tokens(1000, seed)
    outputs = session.feed([ids[:prompt]])
    return join(outputs + (session.decode(ids[None, prompt : prompt + steps]) if steps else []))


def assert_same(found: Output, expected: Output, atol: float = 1e-4) -> None:
    """Logits close, selections equal block set by block set."""
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=atol)
    for a, b in zip(found.selected, expected.selected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            np.testing.assert_array_equal(a, b)


def assert_selects_as(found: np.ndarray | None, expected: np.ndarray | None) -> None:
    """Ids [kv_heads, n, k] that may differ in how far they are padded with -1."""
    assert found is not None
    assert expected is not None
    width = max(found.shape[-1], expected.shape[-1])
    a, b = (np.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])), constant_values=-1) for x in (found, expected))
    np.testing.assert_array_equal(a, b)
