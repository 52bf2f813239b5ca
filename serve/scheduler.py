"""Which request is prefilled, decoded, parked or left waiting: decisions only, no arrays, no threads, no clock.

The engine repeats: ask for a `Turn`, do what it says, run one prefill chunk and one decode step of all lanes, and
report both. A task goes through the phases in this order, and from each of them to DONE::

    WAITING -> PREFILLING -> READY -> RUNNING <-> PARKED
"""

import dataclasses
import enum
from collections.abc import Iterable

# A large request that doesn't fit yet lets smaller ones pass so often; then all wait for it.
MAX_OVERTAKES = 16
# The prefill that is done soonest goes first, but every 4th chunk belongs to the one that began first.
OLDEST_EVERY = 4


class QueueFull(Exception):
    """As many requests wait as are allowed to; try again later."""


class NeverFits(Exception):
    """The request is larger than the whole cache."""


class Phase(enum.StrEnum):
    """Where a task stands.

    READY: prefilled, its blocks are in the pool, it never had a lane. PARKED: it had one and gave it up.
    """

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    READY = enum.auto()
    RUNNING = enum.auto()
    PARKED = enum.auto()
    DONE = enum.auto()


@dataclasses.dataclass(eq=False, kw_only=True)
class Task:
    """One sequence as the scheduler sees it. All but the sizes is written by the scheduler only.

    A subclass must be ``eq=False`` too: tasks are told apart by identity.

    Attributes:
        prompt_tokens: tokens of the prompt, at least 1.
        max_tokens: tokens that may be generated, at least 1.
        phase: where it stands.
        lane: its lane while it is RUNNING, else None.
        prefilled: prompt tokens whose keys and values exist.
        decoded: tokens decoded since it got its lane the last time.
    """

    prompt_tokens: int
    max_tokens: int
    phase: Phase = Phase.WAITING
    lane: int | None = None
    prefilled: int = 0
    decoded: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn[T: Task]:
    """What the engine does next, in this order.

    Attributes:
        admitted: tasks that begin to prefill.
        parked: (lane, task) pairs: the task leaves the lane and keeps its blocks.
        placed: (lane, task) pairs: the task enters the lane, which was free or is one of those just left.
        prefill: the task whose next chunk runs, or None.
    """

    admitted: tuple[T, ...]
    parked: tuple[tuple[int, T], ...]
    placed: tuple[tuple[int, T], ...]
    prefill: T | None


class Scheduler[T: Task]:
    """Shares the blocks, the staging space and the lanes among the tasks.

    A task is admitted when all blocks that it may ever need are unreserved, and keeps them until it is done: what runs
    never lacks a block. The same calls in the same order give the same decisions. Each call's time is proportional to
    the number of tasks. Not thread-safe.

    Args:
        lanes: sequences that decode together.
        num_blocks: blocks of the pool.
        block_size: tokens of a block.
        staging_tokens: tokens, in whole blocks, that the prompts in prefill may have together. One prompt may always;
            where a prompt can be about as long as this, shorter ones wait until it is prefilled.
        max_queue: tasks that may wait besides those that the next turn admits.
        quantum: tokens that a task decodes in its lane before it can be parked.

    Raises:
        ValueError: an argument is too small.
    """

    def __init__(
        self, *, lanes: int, num_blocks: int, block_size: int, staging_tokens: int, max_queue: int, quantum: int
    ) -> None:
        for name, value, least in (
            ("lanes", lanes, 1),
            ("num_blocks", num_blocks, 1),
            ("block_size", block_size, 1),
            ("staging_tokens", staging_tokens, 1),
            ("max_queue", max_queue, 0),
            ("quantum", quantum, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} is not allowed: it must be at least {least}")
        self._num_blocks, self._block_size = num_blocks, block_size
        self._staging_tokens, self._max_queue, self._quantum = staging_tokens, max_queue, quantum
        # What is reserved is always counted anew from these four, so it can't leak. The dicts are ordered sets.
        self._waiting: dict[T, None] = {}
        self._prefilling: dict[T, None] = {}
        self._line: dict[T, None] = {}  # READY and PARKED, in the order in which they began to wait for a lane
        self._lanes: list[T | None] = [None] * lanes
        self._overtaken = 0  # how often the first of the waiting has been
        self._prefill_turns = 0

    @property
    def waiting(self) -> int:
        """Tasks that are not admitted yet."""
        return len(self._waiting)

    @property
    def prefilling(self) -> int:
        """Tasks with a part of the prompt to go."""
        return len(self._prefilling)

    @property
    def ready(self) -> int:
        """Prefilled tasks that never had a lane."""
        return sum(task.phase is Phase.READY for task in self._line)

    @property
    def parked(self) -> int:
        """Tasks that gave up their lane and wait for another."""
        return sum(task.phase is Phase.PARKED for task in self._line)

    @property
    def running(self) -> int:
        """Tasks that have a lane."""
        return sum(task is not None for task in self._lanes)

    @property
    def free_blocks(self) -> int:
        """Blocks that no admitted task has reserved."""
        admitted = [*self._prefilling, *self._line, *(task for task in self._lanes if task is not None)]
        return self._num_blocks - sum(map(self._blocks, admitted))

    def submit(self, task: T) -> None:
        """Takes in a new task.

        Raises:
            NeverFits: it needs more blocks than there are.
            QueueFull: it would have to wait, and `max_queue` tasks do already.
            ValueError: a size is below 1, or the task isn't new.
        """
        for name, value in (("prompt_tokens", task.prompt_tokens), ("max_tokens", task.max_tokens)):
            if value < 1:
                raise ValueError(f"{name}={value} is not allowed: it must be at least 1")
        if task.phase is not Phase.WAITING or task in self._waiting:
            raise ValueError(f"phase={task.phase}: the task was submitted before; make a new one")
        if (needed := self._blocks(task)) > self._num_blocks:
            raise NeverFits(
                f"max_tokens={task.max_tokens} after a prompt of {task.prompt_tokens} tokens needs {needed} blocks of "
                f"{self._block_size} tokens, and the cache has {self._num_blocks}; "
                f"together they may have {self._num_blocks * self._block_size} tokens"
            )
        admissible, _ = self._admissible([*self._waiting, task])
        if task not in admissible and (left := len(self._waiting) - len(admissible)) >= self._max_queue:
            raise QueueFull(f"{left} requests are waiting, {self._max_queue} may (--max-queue); try again later")
        self._waiting[task] = None

    def turn(self) -> Turn[T]:
        """Decides the next turn; the tasks' phases and lanes are already those after it."""
        admitted, self._overtaken = self._admissible(self._waiting)
        for task in admitted:
            del self._waiting[task]
            task.phase = Phase.PREFILLING
            self._prefilling[task] = None
        parked, placed = self._share_lanes()
        return Turn(admitted=tuple(admitted), parked=parked, placed=placed, prefill=self._next_prefill())

    def prefilled(self, task: T, tokens: int) -> None:
        """So many more tokens of the prompt are done, by a chunk or by a prefix found in the cache.

        Raises:
            ValueError: the task is not PREFILLING, or ``tokens`` is not from 1 to the number that was left.
        """
        _expect(task, Phase.PREFILLING)
        left = task.prompt_tokens - task.prefilled
        if not 1 <= tokens <= left:
            raise ValueError(
                f"tokens={tokens} is not allowed: {left} tokens of the prompt were left; report 1 to so many"
            )
        task.prefilled += tokens
        if tokens == left:
            del self._prefilling[task]
            task.phase = Phase.READY
            self._line[task] = None

    def stepped(self, tasks: Iterable[T]) -> None:
        """Each of these decoded one token.

        Raises:
            ValueError: one is not RUNNING; none has been counted.
        """
        tasks = list(tasks)
        for task in tasks:
            _expect(task, Phase.RUNNING)
        for task in tasks:
            task.decoded += 1

    def finish(self, task: T) -> None:
        """The task is over, in whatever phase: its blocks, its staging space and its lane are free.

        Raises:
            ValueError: it is DONE already, or was never submitted.
        """
        if task.phase is Phase.WAITING and task in self._waiting:
            if task is next(iter(self._waiting)):
                self._overtaken = 0
            del self._waiting[task]
        elif task.phase is Phase.RUNNING and task.lane is not None:
            self._lanes[task.lane] = None
        else:
            _expect(task, Phase.PREFILLING, Phase.READY, Phase.PARKED)
            del (self._prefilling if task.phase is Phase.PREFILLING else self._line)[task]
        task.phase, task.lane = Phase.DONE, None

    def cancel(self, task: T) -> None:
        """The same as `finish` for a task that nobody wants any more; harmless when it is DONE."""
        if task.phase is not Phase.DONE:
            self.finish(task)

    def _blocks(self, task: T) -> int:
        return -(-(task.prompt_tokens + task.max_tokens) // self._block_size)

    def _staging(self, task: T) -> int:
        return -(-task.prompt_tokens // self._block_size) * self._block_size

    def _admissible(self, waiting: Iterable[T]) -> tuple[list[T], int]:
        """Which of these a turn would admit, and how often the first of the others has then been overtaken."""
        free, staged = self.free_blocks, sum(map(self._staging, self._prefilling))
        admitted: list[T] = []
        overtaken, head_waits = self._overtaken, False
        for task in waiting:
            if head_waits and overtaken == MAX_OVERTAKES:
                break
            blocks, staging = self._blocks(task), self._staging(task)
            if blocks > free or (staged and staged + staging > self._staging_tokens):
                head_waits = True
                continue
            free, staged = free - blocks, staged + staging
            admitted.append(task)
            overtaken = overtaken + 1 if head_waits else 0
        return admitted, overtaken

    def _share_lanes(self) -> tuple[tuple[tuple[int, T], ...], tuple[tuple[int, T], ...]]:
        """Fills the free lanes from the line, and parks tasks for those of the line that get none."""
        free = [lane for lane, task in enumerate(self._lanes) if task is None]
        ripe = [
            (lane, task) for lane, task in enumerate(self._lanes) if task is not None and task.decoded >= self._quantum
        ]
        ripe.sort(key=lambda pair: -pair[1].decoded)  # of equal ones the lowest lane, since the sort is stable
        parked = ripe[: max(len(self._line) - len(free), 0)]
        placed = list(zip(free + [lane for lane, _ in parked], self._line, strict=False))
        for _, task in parked:
            task.phase, task.lane = Phase.PARKED, None
            self._line[task] = None
        for lane, task in placed:
            del self._line[task]
            self._lanes[lane] = task
            task.phase, task.lane, task.decoded = Phase.RUNNING, lane, 0
        return tuple(parked), tuple(placed)

    def _next_prefill(self) -> T | None:
        if not self._prefilling:
            return None
        self._prefill_turns += 1
        if self._prefill_turns % OLDEST_EVERY == 0:
            return next(iter(self._prefilling))
        return min(self._prefilling, key=lambda task: task.prompt_tokens - task.prefilled)


def _expect(task: Task, *phases: Phase) -> None:
    if task.phase not in phases:
        raise ValueError(f"phase={task.phase}: the task must be {' or '.join(phases)} here")
