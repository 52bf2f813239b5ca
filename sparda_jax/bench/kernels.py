"""``python -m sparda_jax.bench kernels``: the decode kernels, every backend of each side by side."""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from sparda_jax.bench import _kernel_cases as cases
from sparda_jax.bench._kernel_cases import Size
from sparda_jax.bench._report import Row, print_rows, write_json
from sparda_jax.bench._timing import METHOD, Chain, seconds_per_call
from sparda_jax.pallas_kernels.backend import Backend
from sparda_jax.pallas_kernels.between_attentions import between_attentions
from sparda_jax.pallas_kernels.block_selection import Scorer, select_blocks_decode
from sparda_jax.pallas_kernels.record_copy import fetch_records, write_back_records
from sparda_jax.pallas_kernels.residency import plan_residency
from sparda_jax.pallas_kernels.sparse_attention import sparse_attention_decode

console = Console(soft_wrap=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One row of the table for each backend and batch.

    Attributes:
        operations: folders in `pallas_kernels`; the backend is that of the first.
        chain: the calls to time.
        floor: the least that the hardware allows.
        reference, target: by batch, for a context of `CONTEXT` tokens.
        rate: gigabytes per second instead of microseconds, and then of so many bytes a call.
    """

    operations: tuple[str, ...]
    chain: Callable[[Size, Backend], Chain]
    floor: Callable[[Size], float | None]
    reference: Mapping[int, float] = dataclasses.field(default_factory=dict)
    target: Mapping[int, float] = dataclasses.field(default_factory=dict)
    rate: Callable[[Size], int] | None = None


CONTEXT = 131072


def _select(scorer: Scorer, backend: Backend) -> Callable[..., jax.Array]:
    return partial(select_blocks_decode, scorer=scorer, backend=backend, **cases.LIMITS)


def _selection(scorer: Scorer, *, reference: Mapping[int, float], target: Mapping[int, float]) -> Benchmark:
    return Benchmark(
        operations=("block_selection",),
        chain=lambda size, backend: cases.selection(size, scorer, _select(scorer, backend)),
        floor=lambda size: 1e6 * size.seconds_for_keys,
        reference=reference,
        target=target,
    )


def _selection_and_plan(scorer: Scorer, *, reference: Mapping[int, float], target: Mapping[int, float]) -> Benchmark:
    # The plan's backend is the one that a decode step would use.
    return Benchmark(
        operations=("block_selection", "residency"),
        chain=lambda size, backend: cases.selection_and_plan(size, scorer, _select(scorer, backend), plan_residency),
        floor=lambda size: 1e6 * size.seconds_for_keys,
        reference=reference,
        target=target,
    )


def _between(backend: Backend) -> Callable[..., Any]:
    heads = (cases.HEADS, cases.KV_HEADS, cases.KV_HEADS, cases.KV_HEADS)
    return partial(between_attentions, heads=heads, eps=1e-6, residual_scale=0.25, backend=backend)


# Microseconds, or GB/s for the copies. The reference is the published PyTorch code with its kernels, on the same H200.
BENCHMARKS = {
    "select forecast": _selection(Scorer.FORECAST, reference={1: 23, 16: 187}, target={}),
    "select infllm": _selection(Scorer.INFLLM, reference={1: 290, 16: 376}, target={}),
    "plan": Benchmark(
        operations=("residency",),
        chain=lambda size, backend: cases.plan(size, partial(plan_residency, backend=backend)),
        floor=lambda size: None,
        reference={1: 13, 16: 13},
    ),
    "select+plan forecast": _selection_and_plan(Scorer.FORECAST, reference={1: 37, 16: 200}, target={1: 18, 16: 40}),
    "select+plan infllm": _selection_and_plan(Scorer.INFLLM, reference={1: 303, 16: 390}, target={1: 30, 16: 100}),
    "attention": Benchmark(
        operations=("sparse_attention",),
        chain=lambda size, backend: cases.attention(size, partial(sparse_attention_decode, backend=backend)),
        floor=lambda size: 1e6 * size.seconds_for_records,
        reference={1: 17, 16: 34},
        target={1: 10, 16: 30},
    ),
    "attention in a step": Benchmark(
        operations=("sparse_attention",),
        chain=lambda size, backend: cases.attention(
            size,
            partial(sparse_attention_decode, usual=cases.WIDTH, backend=backend),
            width=cases.DENSE_WIDTH,
        ),
        floor=lambda size: 1e6 * size.seconds_for_records,
    ),
    "between attentions": Benchmark(
        operations=("between_attentions",),
        chain=lambda size, backend: cases.between(size, _between(backend)),
        floor=lambda size: 1e6 * size.seconds_for_weights,
        target=dict.fromkeys((1, 4, 16), 138.0),
    ),
    "fetch": Benchmark(
        operations=("record_copy",),
        chain=lambda size, backend: cases.fetch(size, partial(fetch_records, segments=size.segments, backend=backend)),
        floor=lambda size: cases.COPY_ENGINE_BYTES_PER_SECOND / 1e9,
        reference={16: 48.7},
        target={16: 47},
        rate=lambda size: size.copied_bytes,
    ),
    "write back": Benchmark(
        operations=("record_copy",),
        chain=lambda size, backend: cases.write_back(
            size, partial(write_back_records, segments=size.segments, backend=backend)
        ),
        floor=lambda size: cases.COPY_ENGINE_BYTES_PER_SECOND / 1e9,
        target={16: 40},
        rate=lambda size: size.copied_bytes,
    ),
}


def kernels(
    batch: Annotated[str, typer.Option(help="Numbers of sequences, comma-separated.")] = "1,16",
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = CONTEXT,
    only: Annotated[
        list[str] | None, typer.Option("--filter", help="Only rows whose 'name/backend' contains this; repeatable.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of a keyword of the kernel functions, as in part=4,6,8 or top_blocks.num_warps=4,8. Kernels "
            "that have it are timed with each; with several sweeps, with each combination."
        ),
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record where git can't tell.")] = None,
) -> None:
    """Time the decode kernels on this machine's GPU, beside floors, the reference's times and the targets."""
    if jax.default_backend() != "gpu":
        raise typer.BadParameter("the benchmark needs an NVIDIA GPU, and JAX sees none here: run it on a GPU machine.")
    try:
        sizes = [Size(batch=int(n), context=context) for n in batch.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    sweeps = dict(_parse_sweep(text) for text in sweep or ())
    chosen = [*_chosen(only or [""])]
    for key in sweeps:
        if not any(any(_tunable(_kernel_modules(BENCHMARKS[name], b), key)) for name, b in chosen):
            raise typer.BadParameter(f"--sweep {key}=...: no kernel that --filter leaves has such a keyword.")
    rows: list[Row] = []
    try:
        for size in sizes:
            for name, backend in chosen:
                for settings in _combinations(BENCHMARKS[name], backend, sweeps):
                    rows.append(measure(name, backend, size, settings))
                    value = rows[-1].error or f"{rows[-1].value:.4g} {rows[-1].unit}"
                    console.print(f"{name}/{backend} batch={size.batch} {settings}: {value}", markup=False)
                    if json_out:  # after every row: a run that is killed keeps what it has
                        write_json(
                            json_out, rows, what="decode kernels, GPU time per layer", method=METHOD, commit=commit
                        )
    finally:
        print_rows(rows, console)


def measure(name: str, backend: Backend, size: Size, settings: Mapping[str, Any]) -> Row:
    """One row. A kernel that does not compile or run gives a row that says so, so that the others are still timed."""
    benchmark = BENCHMARKS[name]
    expected = size.context == CONTEXT
    if backend is Backend.REFERENCE:
        # XLA takes long over many calls of it.
        size = dataclasses.replace(size, calls=16)
    value = error = None
    try:
        with _defaults(_kernel_modules(benchmark, backend), settings):
            seconds = seconds_per_call(benchmark.chain(size, backend))
        value = benchmark.rate(size) / seconds / 1e9 if benchmark.rate else 1e6 * seconds
    except Exception as failure:
        error = f"{type(failure).__name__}: {str(failure).strip().partition('\n')[0]}"
    return Row(
        name=name,
        backend=backend,
        settings={"batch": size.batch, "context": size.context, **settings},
        value=value,
        unit="GB/s" if benchmark.rate else "µs",
        floor=benchmark.floor(size),
        reference=benchmark.reference.get(size.batch) if expected else None,
        target=benchmark.target.get(size.batch) if expected else None,
        error=error,
    )


def _chosen(only: Sequence[str]) -> Iterator[tuple[str, Backend]]:
    """The benchmarks and backends to run: of each operation those that it has."""
    for name, benchmark in BENCHMARKS.items():
        for backend in Backend:
            folder = f"sparda_jax.pallas_kernels.{benchmark.operations[0]}"
            there = importlib.util.find_spec(f"{folder}.{backend}") is not None
            if there and any(text in f"{name}/{backend}" for text in only):
                yield name, backend


def _parse_sweep(text: str) -> tuple[str, list[Any]]:
    key, _, values = text.partition("=")
    try:
        return key, [int(value) for value in values.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--sweep {text!r}: give whole numbers, as in part=4,6,8.") from None


def _kernel_modules(benchmark: Benchmark, backend: Backend) -> list[ModuleType]:
    """The modules of a backend's kernels: ``mosaic_gpu.py``, and all ``mosaic_*.py`` where there are several."""
    prefix, _, _ = backend.partition("_")
    packages = [importlib.import_module(f"sparda_jax.pallas_kernels.{name}") for name in benchmark.operations]
    return [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for package in packages
        for module in pkgutil.iter_modules(package.__path__)
        if module.name.startswith(prefix)
    ]


def _tunable(modules: Sequence[ModuleType], key: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The keyword defaults of the modules' functions that a sweep's key, ``keyword`` or ``function.keyword``, names."""
    function_name, _, keyword = key.rpartition(".")
    for module in modules:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            defaults = inspect.unwrap(function).__kwdefaults__ or {}
            own = function.__module__ == module.__name__
            if own and keyword in defaults and function_name in ("", name):
                yield defaults, keyword


def _combinations(
    benchmark: Benchmark, backend: Backend, sweeps: Mapping[str, Sequence[Any]]
) -> Iterator[dict[str, Any]]:
    modules = _kernel_modules(benchmark, backend)
    keys = [key for key in sweeps if any(_tunable(modules, key))]
    for values in itertools.product(*(sweeps[key] for key in keys)):
        yield dict(zip(keys, values, strict=True))


@contextlib.contextmanager
def _defaults(modules: Sequence[ModuleType], settings: Mapping[str, Any]) -> Iterator[None]:
    """Other defaults for keywords of kernel functions, wherever those are called from in this context."""
    with contextlib.ExitStack() as restore:
        for key, value in settings.items():
            for defaults, keyword in _tunable(modules, key):
                restore.callback(defaults.__setitem__, keyword, defaults[keyword])
                defaults[keyword] = value
        # The operations' jit objects know nothing of the defaults.
        jax.clear_caches()
        restore.callback(jax.clear_caches)
        yield
