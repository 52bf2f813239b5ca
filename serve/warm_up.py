"""Compiles a runner's programs before the first request needs them."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sparda_jax.cache import KVCache
from sparda_jax.generate import Runner
from sparda_jax.programs import WriteAhead
from sparda_jax.sampling import SamplingParams, SamplingState
from sparda_jax.serve.executor import Executor


def buckets(runner: Runner, max_len: int) -> list[int]:
    """The cache capacities of sequences of up to ``max_len`` tokens, ascending."""
    capacities = [runner.capacity_for(1)]
    while capacities[-1] < runner.capacity_for(min(max_len, runner.max_model_len)):
        capacities.append(runner.capacity_for(capacities[-1] + 1))
    return capacities


def programs(runner: Runner, max_len: int) -> list[tuple[int, int]]:
    """(capacity, new tokens) of every chunk that a prompt of up to ``max_len`` tokens can be cut into."""
    sizes = runner.prefill_chunks
    return [
        (capacity, size)
        for capacity in buckets(runner, max_len)
        for size in dict.fromkeys(
            runner.chunk_for(1, size, capacity)
            # A chunk holds more than the next smaller size would.
            for smaller, size in zip((0, *sizes), sizes, strict=False)
            if capacity >= runner.capacity_for(smaller + 1)
        )
    ]


def warm_up(executor: Executor, max_len: int, console: Console) -> None:
    """Runs each program once, over a nearly empty cache, showing progress.

    Args:
        executor: its programs are compiled; no sequence may be under way.
        max_len: longest sequence to prepare for, in tokens; longer ones compile when they come. 0: nothing.
        console: where the progress goes.
    """
    if not max_len:
        return
    runner = executor.runner
    todo = programs(runner, max_len)
    sizes = buckets(runner, max_len)
    if not console.is_terminal:
        console.print(
            f"compiling {len(todo)} programs of prefill, and those of the decode lanes for {len(sizes)} sizes"
        )
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("compiling", total=len(todo) + len(sizes))
        for _ in itertools.chain(_prefill(executor, todo), _lanes(executor, sizes)):
            bar.advance(task)


def _prefill(executor: Executor, todo: list[tuple[int, int]]) -> Iterator[None]:
    """Chunks of a token each, which finish no block, so that none is written."""
    runner, write = executor.runner, _nothing_to_write(executor)
    sampling = SamplingState.of([SamplingParams()])
    sparse, one = np.array([False]), np.array([1], np.int32)
    smaller = None
    for capacity, size in todo:
        if smaller is not None and smaller.capacity < capacity:
            # A full cache of the bucket before grows into this one.
            full = _with_length(smaller, smaller.capacity)
            at = np.array([smaller.capacity])
            runner.advance(full, at, np.zeros((1, size), np.int32), one, sparse, sampling, decode=False, write=write)
        cache = runner.new_cache(1, capacity)
        advanced = runner.advance(
            cache, np.zeros(1, int), np.zeros((1, size), np.int32), one, sparse, sampling, decode=False, write=write
        )
        smaller = advanced.cache
        # Waited for, so that there is one of them in memory at a time.
        jax.block_until_ready(runner.score(advanced.stream, 0, np.zeros(size, np.int32))[0][0])
        yield


def _lanes(executor: Executor, sizes: list[int]) -> Iterator[None]:
    """A sequence of each size enters a lane, decodes, is parked, goes on, is read back, and waits from the start.

    Steps are of one size for all; the first sequence also takes the sampled ones. Before them comes one whose tokens
    are counted, which does not depend on its size.
    """
    lanes, block_size = executor.lanes, executor.block_size
    greedy, penalised = SamplingParams(), SamplingParams(repetition_penalty=2.0, max_tokens=1)
    counted = executor.runner.start([0], penalised)
    first = counted.advance(_nothing_to_write(executor))
    assert first is not None
    lanes.enter(0, counted.take_cache(), first, penalised, seen=counted.seen)
    lanes.resume(0, lanes.park(0))
    lanes.leave(0)
    for capacity in sizes:
        # The first step ends a block, which is written back, and the second one begins the next.
        lanes.enter(0, _with_length(executor.runner.new_cache(1, capacity), block_size - 1), 0, greedy)
        lanes.step()
        if executor.shares_prefixes:
            lanes.prefix(lanes.written_blocks(0)[:1], capacity)
        lanes.step()
        if lanes.samples and capacity == sizes[0]:
            lanes.sample_next()
            lanes.step()
            lanes.step()
        parked = lanes.park(0)
        lanes.resume(0, parked)
        lanes.step()
        lanes.leave(0)
        lanes.drop(lanes.adopt(_with_length(executor.runner.new_cache(1, capacity), 1), 0, greedy))
        jax.block_until_ready(lanes.copies)
        yield
    executor.forget_stats()


def _nothing_to_write(executor: Executor) -> WriteAhead:
    return WriteAhead(lend=executor.lanes.lend_pool, blocks=[])


def _with_length(cache: KVCache, length: int) -> KVCache:
    lengths = jax.device_put(np.array([length], np.int32), cache.lengths.sharding)
    return dataclasses.replace(cache, lengths=lengths)
