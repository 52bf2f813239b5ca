"""Compiles a runner's programs before the first request needs them."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sparda_jax.generate import Runner
from sparda_jax.sampling import SamplingParams, SamplingState


def buckets(runner: Runner, max_len: int) -> list[int]:
    """The cache capacities of sequences of up to ``max_len`` tokens, ascending."""
    capacities = [runner.capacity_for(1)]
    while capacities[-1] < runner.capacity_for(min(max_len, runner.max_model_len)):
        capacities.append(runner.capacity_for(capacities[-1] + 1))
    return capacities


def programs(runner: Runner, max_len: int) -> list[tuple[int, int]]:
    """(capacity, new tokens) of every step that a lone sequence of up to ``max_len`` tokens can take; 0: decode."""
    return [
        (capacity, size)
        for capacity in buckets(runner, max_len)
        for size in (*dict.fromkeys(runner.chunk_for(1, n, capacity) for n in runner.prefill_chunks), 0)
    ]


def warm_up(runner: Runner, max_len: int, console: Console) -> None:
    """Runs each program once, over a nearly empty cache, showing progress.

    Args:
        runner: its programs are compiled.
        max_len: longest sequence to prepare for, in tokens; longer ones compile when they come. 0: nothing.
        console: where the progress goes.
    """
    if not max_len:
        return
    todo = programs(runner, max_len)
    if not console.is_terminal:
        console.print(f"compiling {len(todo)} programs")
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=len(todo))
        for _ in _run(runner, todo):
            bar.advance(task)


def _run(runner: Runner, todo: list[tuple[int, int]]) -> Iterator[None]:
    sampling = SamplingState.of([SamplingParams()])
    sparse, one = np.array([False]), np.array([1], np.int32)
    smaller = None
    for capacity, size in todo:
        if smaller is not None and smaller.capacity < capacity:
            # A full cache of the bucket before grows into this one.
            lengths = jax.device_put(np.array([smaller.capacity], np.int32), smaller.lengths.sharding)
            full = dataclasses.replace(smaller, lengths=lengths)
            runner.advance(full, np.zeros((1, 1), np.int32), one, sparse, sampling, decode=True)
        tokens = np.zeros((1, size or 1), np.int32)
        cache = runner.new_cache(1, capacity)
        _, smaller, _, _ = runner.advance(cache, tokens, one, sparse, sampling, decode=not size)
        yield
