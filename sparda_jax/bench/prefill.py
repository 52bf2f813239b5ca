"""``python -m sparda_jax.bench prefill``: whole prompts through the chunks that the server and the library run."""

import dataclasses
import functools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from rich.console import Console

from sparda_jax.bench._options import at_least, check_writable, geometry, one_of, whole_numbers
from sparda_jax.bench._prefill_cases import Overlap, work
from sparda_jax.bench._prefill_parts import METHOD as PARTS_METHOD
from sparda_jax.bench._prefill_parts import parts
from sparda_jax.bench._report import Row, print_rows, write_json
from sparda_jax.cache import KVCache
from sparda_jax.config import ModelConfig
from sparda_jax.generate import PREFILL_CHUNKS
from sparda_jax.model import Decoder, abstract_decoder
from sparda_jax.programs import forward_and_sample
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.selection import Mode
from sparda_jax.shapes import SHAPES

console = Console(soft_wrap=True)
# InfiniGen has a selection of its own in decode only.
_MODES = [mode.value for mode in Mode if mode.in_lanes and mode is not Mode.INFINIGEN]
TARGET = {(Mode.SPARDA, 131072): 22_000}
"""Tokens per second of one sequence or a batch; the paper has 17,087 for 4 sequences on an H100."""
METHOD = (
    "random weights and tokens; the clock runs from the first chunk's launch until the token behind the prompt is on "
    "the host; a chunk is launched while the one before runs; one run, after two chunks to warm up. Blocks are "
    "selected, and replaced where an overlap is given: neighbouring tokens share so much of their free blocks (with "
    "random weights hardly any). All lengths use a cache for the longest. All programs are compiled at once. Floors: "
    "operations at 780 TFLOP/s, which large products reach. " + PARTS_METHOD
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A program: what it is compiled for.

    Attributes:
        mode: the selector.
        batch: sequences, all of the same length.
        capacity: tokens of the cache.
        chunk: tokens of a chunk.
        overlap: percent of the free blocks that neighbours share; None: as it happens.
    """

    mode: Mode
    batch: int
    capacity: int
    chunk: int
    overlap: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What `Prefill.measure` found.

    Attributes:
        seconds: from the first launch to the token behind the prompt.
        tokens: of all sequences, in that time; fewer than asked for if time ran out.
        chunks: seconds of each chunk.
        read: blocks read over blocks visible.
    """

    seconds: float
    tokens: int
    chunks: list[float]
    read: float


class Prefill:
    """A case's chunk, traced; `compile` it before `measure`."""

    def __init__(self, model: Decoder, case: Case):
        self.case = case
        graphdef, self._weights = nnx.split(model)
        config = model.config
        choose = None if case.overlap is None else Overlap(config=config, percent=case.overlap)
        ways = {"mode": case.mode, "decode": False, "max_len": case.capacity, "choose": choose}

        def chunk(weights: nnx.State, cache: KVCache, *operands: Any) -> tuple[jax.Array, KVCache, Any, Any]:
            found = forward_and_sample(nnx.merge(graphdef, weights), cache, *operands, **ways)
            return found.tokens, found.cache, found.read, found.visible

        self._rng = np.random.default_rng(0)
        self._vocab, self._layers = config.vocab_size, config.num_layers
        self._empty = functools.partial(KVCache.empty, config, case.batch, case.capacity, model.embed_tokens.dtype)
        self._cache: KVCache | None = None
        self._sampling = SamplingState.of([SamplingParams()] * case.batch)
        self._sparse = jnp.full(case.batch, True)
        like = jax.eval_shape(self._empty)
        self._lowered = jax.jit(chunk, donate_argnums=1).lower(self._weights, like, *self._operands(case.chunk))
        self._program: Any = None

    def compile(self) -> float:
        """Seconds that it took."""
        began = time.perf_counter()
        self._program = self._lowered.compile()
        spent = time.perf_counter() - began
        console.print(f"{self.case.mode.value}: compiled in {spent:.0f} s")
        return spent

    def _operands(self, count: int) -> tuple[Any, ...]:
        batch, chunk = self.case.batch, self.case.chunk
        tokens = self._rng.integers(0, self._vocab, (batch, chunk), np.int32)
        return jnp.asarray(tokens), jnp.full(batch, count, jnp.int32), self._sparse, self._sampling

    def measure(self, length: int, until: float = float("inf")) -> Measured:
        """Times a prompt of ``length`` tokens a sequence; no chunk is launched once `time.perf_counter` says ``until``.

        Raises:
            ValueError: the cache can't hold it.
        """
        chunk = self.case.chunk
        if length > self.case.capacity:
            raise ValueError(f"length={length} must not exceed the cache's capacity={self.case.capacity}.")
        counts = [min(chunk, length - begin) for begin in range(0, length, chunk)]
        self._run(counts[:2], float("inf"))
        return self._run(counts, until)

    def free(self) -> None:
        """Gives the cache back."""
        self._cache = None

    def _run(self, counts: list[int], until: float) -> Measured:
        operands = [self._operands(count) for count in counts]
        cache = dataclasses.replace(self._cache or self._empty(), lengths=jnp.zeros(self.case.batch, jnp.int32))
        jax.block_until_ready((cache, operands))
        launched: list[tuple[jax.Array, ...]] = []
        times = [time.perf_counter()]
        for operand in operands:
            if launched and time.perf_counter() > until:
                break
            following, cache, read, visible = self._program(self._weights, cache, *operand)
            self._cache = cache
            launched.append((following, read, visible))
            if len(launched) > 1:
                jax.block_until_ready(launched[-2])
                times.append(time.perf_counter())
        np.asarray(launched[-1][0])
        times.append(time.perf_counter())
        read, visible = (sum(float(np.sum(counted[place])) for counted in launched) for place in (1, 2))
        return Measured(
            seconds=times[-1] - times[0],
            tokens=self.case.batch * sum(counts[: len(launched)]),
            chunks=np.diff(times).tolist(),
            read=read / visible / self._layers,
        )


def random_model(config: ModelConfig, *, has_forecast: bool, dtype: Any = jnp.bfloat16) -> Decoder:
    """A decoder whose weights are made on the device, a shape at a time."""
    graphdef, like = nnx.split(abstract_decoder(config, has_forecast=has_forecast, dtype=dtype))

    @functools.partial(jax.jit, static_argnums=1)
    def normal(number: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(jax.random.key(0), number), shape, dtype)

    leaves, tree = jax.tree.flatten(like)
    scale = jnp.asarray(config.initializer_range, dtype)
    filled = [
        jnp.ones(leaf.shape, dtype) if len(leaf.shape) == 1 else normal(number, leaf.shape) * scale
        for number, leaf in enumerate(leaves)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, filled))


def _row(config: ModelConfig, case: Case, length: int, found: Measured, compiling: float, *, whole: bool) -> Row:
    milliseconds = [round(1e3 * spent, 1) for spent in found.chunks]
    least = case.batch * work(config, case.mode, 0, length).seconds
    return Row(
        name=case.mode.value,
        backend="auto",
        settings={
            "batch": case.batch,
            "length": length,
            "overlap": None if case.mode is Mode.DENSE else "natural" if case.overlap is None else case.overlap,
            "layers": config.num_layers,
            "chunk": case.chunk,
            "ttft_ms": round(1e3 * found.seconds, 1),
            "floor_ttft_ms": round(1e3 * least, 1),
            "first_chunk_ms": milliseconds[0],
            "last_chunk_ms": milliseconds[-1],
            "read": round(found.read, 4),
            "compile_s": round(compiling, 1),
        },
        value=found.tokens / found.seconds if found.tokens == case.batch * length else None,
        unit="tokens/s",
        floor=case.batch * length / least,
        target=TARGET.get((case.mode, length)) if whole else None,
        error=None
        if found.tokens == case.batch * length
        else f"{found.tokens} tokens in {found.seconds:.1f} s, then time was up",
    )


def _lengths(option: str, text: str, config: ModelConfig) -> list[int]:
    lengths, block_size = whole_numbers(option, text), config.sparse.block_size
    if max(lengths) % block_size:
        raise typer.BadParameter(f"{option} {text}: the longest must be a multiple of {block_size}, a block.")
    return lengths


def _percents(text: str) -> list[float | None]:
    percents: list[float | None] = []
    for part in text.split(","):
        try:
            percents.append(None if part == "natural" else float(part))
        except ValueError:
            percents.append(math.nan)
    if not all(percent is None or 0 <= percent <= 100 for percent in percents):
        raise typer.BadParameter(f"--overlap {text!r}: give numbers from 0 to 100, or natural, separated by commas.")
    return percents


def prefill(
    shape: Annotated[str, typer.Option(help=f"Model geometry: {', '.join(SHAPES)}.")] = "minicpm4.1-8b",
    modes: Annotated[
        str, typer.Option(help="Modes, comma-separated; random has no fast chunks.")
    ] = "sparda,sparse,dense",
    lengths: Annotated[str, typer.Option(help="Tokens of a prompt, comma-separated.")] = "32768,131072",
    dense_lengths: Annotated[str | None, typer.Option(help="Those of mode dense, if others.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences that are prefilled together.")] = 1,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk.")] = PREFILL_CHUNKS["gpu"][-1],
    overlap: Annotated[
        str, typer.Option(help="Percent of free blocks that neighbouring tokens share, comma-separated; or: natural.")
    ] = "90",
    part_times: Annotated[bool, typer.Option("--parts/--no-parts", help="Also time a layer's parts.")] = True,
    layers: Annotated[int | None, typer.Option(help="Fewer layers than the model has, for a quick look.")] = None,
    limit_seconds: Annotated[float | None, typer.Option(help="Begin nothing after so long.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Time prefill of whole prompts and of a layer's parts on this machine's GPU, beside floors and targets."""
    check_writable(json_out)
    config = geometry(shape, layers, least_layers=2 if part_times else 1)
    at_least("--batch", batch, 1)
    at_least("--chunk", chunk, 1)
    chosen = [Mode(one_of("--modes", name, _MODES)) for name in modes.split(",")]
    sizes = {mode: _lengths("--lengths", lengths, config) for mode in chosen}
    if dense_lengths is not None and Mode.DENSE in sizes:
        sizes[Mode.DENSE] = _lengths("--dense-lengths", dense_lengths, config)
    longest = max(max(some) for some in sizes.values())
    if part_times and chunk > longest:
        raise typer.BadParameter(f"--chunk {chunk}: with --parts it must not exceed the longest prompt, {longest}.")
    percents = _percents(overlap)
    if jax.default_backend() != "gpu":
        raise typer.BadParameter("the benchmark needs an NVIDIA GPU, and JAX sees none here: run it on a GPU machine.")
    began = time.perf_counter()
    until = float("inf") if limit_seconds is None else began + limit_seconds
    model = random_model(config, has_forecast=True)
    jax.block_until_ready(nnx.state(model))
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        value = row.error if row.value is None else f"{row.value:.5g} {row.unit}, floor {row.floor:.5g}"
        console.print(f"[{time.perf_counter() - began:.0f} s] {row.name} {row.settings}: {value}", markup=False)
        if json_out:
            write_json(json_out, rows, what="prefill", method=METHOD, commit=commit)

    console.print(f"weights after {time.perf_counter() - began:.0f} s")
    cases = [
        Case(mode=mode, batch=batch, capacity=max(sizes[mode]), chunk=chunk, overlap=percent)
        for mode in chosen
        for percent in ([None] if mode is Mode.DENSE else percents)
    ]
    programs = [Prefill(model, case) for case in cases]
    console.print(f"{len(programs)} programs traced after {time.perf_counter() - began:.0f} s")
    with ThreadPoolExecutor() as pool:
        compiling = [*pool.map(Prefill.compile, programs)]
    console.print(f"compiled after {time.perf_counter() - began:.0f} s")
    for program, spent in zip(programs, compiling, strict=True):
        for length in sizes[program.case.mode]:
            if time.perf_counter() > until:
                console.print(f"{program.case.mode.value}, {length}: not begun, time is up")
                continue
            found = program.measure(length, until)
            add(_row(config, program.case, length, found, spent, whole=layers is None))
        program.free()
    if part_times and time.perf_counter() < until:
        for row in parts(model, chosen, longest, chunk, [0, *(p for p in percents if p)]):
            add(row)
            if time.perf_counter() > until:
                break
    for ours, other in _ratios(rows):
        case = {key: ours.settings[key] for key in ("length", "overlap")}
        console.print(f"{ours.name} over {other.name}, {case}: {other.times(ours.value):.3f}", markup=False)
    print_rows(rows, console)


def _ratios(rows: list[Row]) -> list[tuple[Row, Row]]:
    """SparDA's rows beside those of `sparse` with the same prompt and overlap."""
    same = ("batch", "length", "overlap")
    return [
        (ours, other)
        for ours in rows
        for other in rows
        if (ours.name, other.name) == (Mode.SPARDA.value, Mode.SPARSE.value)
        and ours.value
        and other.value
        and all(ours.settings[key] == other.settings[key] for key in same)
    ]
