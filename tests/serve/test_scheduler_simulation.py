"""The scheduler under random work: an engine that only counts keeps its own books and checks every decision."""

import copy
import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sparda_jax.serve.scheduler import MAX_OVERTAKES, OLDEST_EVERY, NeverFits, Phase, QueueFull, Scheduler, Task

BLOCK, CHUNK = 4, 5


@dataclasses.dataclass(eq=False, kw_only=True)
class Job(Task):
    """A task with the test's own books: tokens, how often it was overtaken as the head, and until when it may stand
    still."""

    number: int
    chunked: int = 0
    generated: int = 0
    in_lane: int = 0
    overtaken: int = 0
    deadline: int = 0

    @property
    def blocks(self) -> int:
        return len(range(0, self.prompt_tokens + self.max_tokens, BLOCK))

    @property
    def staging(self) -> int:
        return BLOCK * len(range(0, self.prompt_tokens, BLOCK))

    @property
    def chunks(self) -> int:
        """Prefill chunks to go."""
        return len(range(self.chunked, self.prompt_tokens, CHUNK))

    @property
    def work(self) -> int:
        """Turns to go if it were alone: the last chunk gives the first token."""
        return self.chunks + self.max_tokens - self.generated - (self.chunks > 0)


class CountingEngine:
    """Does what the scheduler says, and compares it with what the rules allow."""

    def __init__(self, *, lanes: int, num_blocks: int, staging: int, max_queue: int, quantum: int) -> None:
        self.num_lanes, self.num_blocks, self.staging = lanes, num_blocks, staging
        self.max_queue, self.quantum = max_queue, quantum
        self.scheduler: Scheduler[Job] = Scheduler(
            lanes=lanes,
            num_blocks=num_blocks,
            block_size=BLOCK,
            staging_tokens=staging,
            max_queue=max_queue,
            quantum=quantum,
        )
        self.waiting: list[Job] = []
        self.prefilling: list[Job] = []
        self.line: list[Job] = []
        self.lanes: dict[int, Job] = {}
        self.numbers = itertools.count()
        self.now = self.prefill_turns = 0
        self.log: list[tuple[int | None, ...]] = []

    @property
    def admitted(self) -> list[Job]:
        return [*self.prefilling, *self.line, *self.lanes.values()]

    @property
    def alive(self) -> list[Job]:
        return [*self.waiting, *self.admitted]

    def submit(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether it was taken; a refusal must be right."""
        job = Job(prompt_tokens=prompt_tokens, max_tokens=max_tokens, number=next(self.numbers))
        after = copy.deepcopy(self.scheduler)
        begun = after.turn().admitted
        try:
            self.scheduler.submit(job)
        except NeverFits:
            assert job.blocks > self.num_blocks
            return False
        except QueueFull:
            assert after.waiting >= self.max_queue, "refused, though fewer would wait"
            return False
        assert job.blocks <= self.num_blocks
        if after.waiting >= self.max_queue:
            after = copy.deepcopy(self.scheduler)
            assert len(after.turn().admitted) == len(begun) + 1, "taken, though it and too many others wait"
        # While it waits, each turn does some of the work that was there before it, or of those that overtake it.
        job.deadline = self.now + sum(other.work for other in self.alive)
        self.waiting.append(job)
        return True

    def end(self, job: Job, *, cancel: bool) -> None:
        (self.scheduler.cancel if cancel else self.scheduler.finish)(job)
        for tasks in (self.waiting, self.prefilling, self.line):
            if job in tasks:
                tasks.remove(job)
        self.lanes = {lane: other for lane, other in self.lanes.items() if other is not job}

    def turn(self) -> None:
        """One turn of the engine; some work is done in each as long as there is any."""
        turn = self.scheduler.turn()
        self.now += 1
        self._admit(turn.admitted)
        self._share_lanes(turn.parked, turn.placed)
        self._check_prefill(turn.prefill)
        self.check()
        pairs = (*turn.parked, (None, None), *turn.placed, (None, turn.prefill))
        self.log.append((*(job.number for job in turn.admitted), *(job and job.number for _, job in pairs)))
        running = list(self.lanes.values())
        assert running or turn.prefill or not self.alive, "there is work, and none is done"
        if turn.prefill is not None:
            self._run_chunk(turn.prefill)
        self.scheduler.stepped(running)
        for job in running:
            job.in_lane += 1
            job.generated += 1
            if job.generated == job.max_tokens:
                self.end(job, cancel=False)

    def _admit(self, admitted: tuple[Job, ...]) -> None:
        assert list(admitted) == [job for job in self.waiting if job in admitted], "not in the order of waiting"
        left = [job for job in self.waiting if job not in admitted]
        for job in left:
            overtakers = [other for other in admitted if other.number > job.number]
            job.deadline += sum(other.work for other in overtakers)
            if job is left[0]:
                job.overtaken += len(overtakers)
                assert job.overtaken <= MAX_OVERTAKES
        self.waiting = left
        for job in admitted:
            self.prefilling.append(job)
            # One in so many chunks is for the oldest: it is done when all that began before it are.
            job.deadline = self.now + OLDEST_EVERY * sum(other.chunks for other in self.prefilling)
        fitting = [job for job in left if self._fits(job)]
        assert not fitting or (left[0] not in fitting and left[0].overtaken == MAX_OVERTAKES), "one that fits waits"

    def _fits(self, job: Job) -> bool:
        blocks = sum(other.blocks for other in [*self.admitted, job])
        staging = sum(other.staging for other in [*self.prefilling, job])
        return blocks <= self.num_blocks and (not self.prefilling or staging <= self.staging)

    def _share_lanes(self, parked: tuple[tuple[int, Job], ...], placed: tuple[tuple[int, Job], ...]) -> None:
        line = list(self.line)
        lacking = len(line) - (self.num_lanes - len(self.lanes))
        assert len(parked) <= max(lacking, 0), "parked for nobody"
        for lane, job in parked:
            assert self.lanes.pop(lane) is job
            assert job.in_lane >= self.quantum, "parked before its quantum was over"
            assert all(other.in_lane <= job.in_lane for other in self.lanes.values())
        for lane, job in placed:
            assert 0 <= lane < self.num_lanes
            assert lane not in self.lanes, "two tasks in one lane"
            assert self.line.pop(0) is job, "not in the order of the line"
            self.lanes[lane] = job
            job.in_lane = 0
        if self.line:
            assert len(self.lanes) == self.num_lanes
            assert all(job.in_lane < self.quantum for job in self.lanes.values()), "one waits, none is parked for it"
        for _, job in parked:
            self._join_line(job)

    def _join_line(self, job: Job) -> None:
        # Within a quantum every lane goes to the next of the line.
        job.deadline = self.now + self.quantum * (len(self.line) // self.num_lanes + 1)
        self.line.append(job)

    def _check_prefill(self, prefill: Job | None) -> None:
        if not self.prefilling:
            assert prefill is None
            return
        self.prefill_turns += 1
        assert prefill is not None
        if self.prefill_turns % OLDEST_EVERY == 0:
            assert prefill is self.prefilling[0]
        else:
            rests = [(job.prompt_tokens - job.chunked, job) for job in self.prefilling]
            assert prefill is min(rests, key=lambda rest: rest[0])[1]

    def _run_chunk(self, job: Job) -> None:
        tokens = min(CHUNK, job.prompt_tokens - job.chunked)
        job.chunked += tokens
        self.scheduler.prefilled(job, tokens)
        if job.chunked == job.prompt_tokens:
            self.prefilling.remove(job)
            self._join_line(job)
            job.generated = 1
            if job.max_tokens == 1:
                self.end(job, cancel=False)

    def check(self) -> None:
        """The scheduler's counts are those of the books, and its limits are kept."""
        scheduler, phases = self.scheduler, [job.phase for job in self.line]
        assert scheduler.waiting == len(self.waiting)
        assert scheduler.prefilling == len(self.prefilling)
        assert scheduler.running == len(self.lanes) <= self.num_lanes
        assert (scheduler.ready, scheduler.parked) == (phases.count(Phase.READY), phases.count(Phase.PARKED))
        assert scheduler.ready + scheduler.parked == len(self.line)
        assert all(job.phase is Phase.RUNNING and job.lane == lane for lane, job in self.lanes.items())
        assert all(job.lane is None for job in [*self.waiting, *self.prefilling, *self.line])
        assert scheduler.free_blocks == self.num_blocks - sum(job.blocks for job in self.admitted) >= 0
        assert len(self.prefilling) <= 1 or sum(job.staging for job in self.prefilling) <= self.staging
        late = [job for job in [*self.waiting, *self.prefilling, *self.line] if self.now > job.deadline]
        assert not late, f"starved: {late}"

    def drain(self) -> None:
        """All that is left ends within as many turns as there is work, and nothing stays behind."""
        for _ in range(sum(job.work for job in self.alive)):
            if self.alive:
                self.turn()
        assert not self.alive
        self.check()


ENGINES = st.builds(
    CountingEngine,
    lanes=st.integers(1, 3),
    num_blocks=st.integers(4, 14),
    staging=st.integers(1, 48),
    max_queue=st.integers(0, 5),
    quantum=st.integers(1, 4),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(engine=ENGINES)
    def begin(self, engine: CountingEngine) -> None:
        self.engine = engine

    @rule(prompt_tokens=st.integers(1, 40), max_tokens=st.integers(1, 20))
    def submit(self, prompt_tokens: int, max_tokens: int) -> None:
        self.engine.submit(prompt_tokens, max_tokens)

    @rule(turns=st.integers(1, 8))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.turn()

    @rule(which=st.integers(0, 30), cancel=st.booleans())
    def end(self, which: int, cancel: bool) -> None:
        if alive := self.engine.alive:
            job = alive[which % len(alive)]
            self.engine.end(job, cancel=cancel)
            self.engine.scheduler.cancel(job)  # a second time: harmless
            with pytest.raises(ValueError, match="phase=done"):
                self.engine.scheduler.finish(job)

    @invariant()
    def books_agree(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):  # it also runs when hypothesis gave up before the engine was made
            self.engine.drain()


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestSchedulerMachine = SchedulerMachine.TestCase


def crowd(engine: CountingEngine, seed: int, turns: int) -> None:
    """Clients that never leave the queue a free place, most with small requests; some go away."""
    rng = random.Random(seed)
    room = engine.num_blocks * BLOCK
    for _ in range(turns):
        large = rng.random() < 0.1
        while engine.submit(rng.randint(room // 2, room - 4) if large else rng.randint(1, 6), rng.randint(1, 4)):
            large = rng.random() < 0.1
        if rng.random() < 0.1 and engine.alive:
            engine.end(rng.choice(engine.alive), cancel=True)
        engine.turn()


@given(engine=ENGINES, seed=st.integers(0, 2**32 - 1))
def test_nobody_starves_in_a_crowd(engine: CountingEngine, seed: int) -> None:
    crowd(engine, seed, turns=150)
    engine.drain()


def test_a_crowd_meets_every_rule() -> None:
    """What the simulation is worth: parking, 16 overtakes and a shared staging space occur in it."""
    engine = CountingEngine(lanes=2, num_blocks=14, staging=24, max_queue=4, quantum=1)
    overtaken = parked = shared = 0
    for seed in range(40):
        crowd(engine, seed, turns=10)
        overtaken = max([overtaken, *(job.overtaken for job in engine.waiting)])
        parked, shared = max(parked, engine.scheduler.parked), max(shared, engine.scheduler.prefilling)
    assert overtaken == MAX_OVERTAKES
    assert parked >= 1
    assert shared >= 3


def test_the_same_calls_give_the_same_decisions() -> None:
    engines = [CountingEngine(lanes=2, num_blocks=14, staging=24, max_queue=4, quantum=2) for _ in range(2)]
    for engine in engines:
        crowd(engine, seed=7, turns=200)
    assert engines[0].log == engines[1].log
