"""The scheduler's rules, one by one."""

import dataclasses

import pytest

from sparda_jax.serve.scheduler import NeverFits, Phase, QueueFull, Scheduler, Task, Turn


def make(**changed: int) -> Scheduler[Task]:
    """One with room for everything except what the test narrows."""
    roomy = {"lanes": 8, "num_blocks": 1000, "block_size": 4, "staging_tokens": 1000, "max_queue": 50, "quantum": 3}
    return Scheduler(**{**roomy, **changed})


def submitted(scheduler: Scheduler[Task], *sizes: tuple[int, int]) -> list[Task]:
    tasks = [Task(prompt_tokens=prompt, max_tokens=tokens) for prompt, tokens in sizes]
    for task in tasks:
        scheduler.submit(task)
    return tasks


def prefill_all(scheduler: Scheduler[Task], turn: Turn[Task]) -> None:
    for task in turn.admitted:
        scheduler.prefilled(task, task.prompt_tokens - task.prefilled)


def counts(scheduler: Scheduler[Task]) -> tuple[int, ...]:
    return scheduler.waiting, scheduler.prefilling, scheduler.ready, scheduler.running, scheduler.parked


def test_one_task_goes_through_the_phases() -> None:
    scheduler = make(num_blocks=10)
    (task,) = submitted(scheduler, (9, 4))
    assert (task.phase, counts(scheduler), scheduler.free_blocks) == (Phase.WAITING, (1, 0, 0, 0, 0), 10)
    assert scheduler.turn() == Turn(admitted=(task,), parked=(), placed=(), prefill=task)
    assert (task.phase, counts(scheduler), scheduler.free_blocks) == (Phase.PREFILLING, (0, 1, 0, 0, 0), 6)
    scheduler.prefilled(task, 8)
    assert (task.phase, task.prefilled) == (Phase.PREFILLING, 8)
    scheduler.prefilled(task, 1)
    assert (task.phase, task.lane, counts(scheduler)) == (Phase.READY, None, (0, 0, 1, 0, 0))
    assert scheduler.turn() == Turn(admitted=(), parked=(), placed=((0, task),), prefill=None)
    assert (task.phase, task.lane, counts(scheduler), scheduler.free_blocks) == (Phase.RUNNING, 0, (0, 0, 0, 1, 0), 6)
    for _ in range(10):  # it may go on past its quantum, since nobody waits
        scheduler.stepped([task])
        assert scheduler.turn() == Turn(admitted=(), parked=(), placed=(), prefill=None)
    assert task.decoded == 10
    scheduler.finish(task)
    assert (task.phase, task.lane, counts(scheduler), scheduler.free_blocks) == (Phase.DONE, None, (0,) * 5, 10)


def test_a_task_is_admitted_when_all_its_blocks_are_unreserved() -> None:
    scheduler = make(num_blocks=7)
    first, second, third = submitted(scheduler, (8, 8), (7, 6), (1, 15))
    assert scheduler.turn().admitted == (first,)
    assert scheduler.free_blocks == 3, "13 tokens are 4 blocks of 4"
    scheduler.cancel(first)
    assert scheduler.free_blocks == 7
    assert scheduler.turn().admitted == (second,)
    scheduler.finish(second)
    assert scheduler.turn().admitted == (third,)


def test_what_never_fits_is_refused_with_its_numbers() -> None:
    scheduler = make(num_blocks=7)
    submitted(scheduler, (20, 8))
    with pytest.raises(NeverFits, match=r"max_tokens=9 after a prompt of 20 tokens needs 8 blocks of 4 .* has 7"):
        submitted(scheduler, (20, 9))
    assert scheduler.waiting == 1


def test_only_those_that_must_wait_count_against_the_queue() -> None:
    scheduler = make(num_blocks=4, max_queue=2)
    submitted(scheduler, (4, 4), (4, 4), (4, 4), (4, 4))  # two can begin at once, two wait
    with pytest.raises(QueueFull, match=r"2 requests are waiting, 2 may \(--max-queue\)"):
        submitted(scheduler, (4, 4))
    first, second = scheduler.turn().admitted
    assert scheduler.waiting == 2
    with pytest.raises(QueueFull):
        submitted(scheduler, (4, 4))
    scheduler.finish(first)
    submitted(scheduler, (4, 4))
    with pytest.raises(QueueFull):
        submitted(scheduler, (1, 1))
    scheduler.cancel(second)
    submitted(scheduler, (4, 4))


def test_without_a_queue_only_what_begins_at_once_is_taken() -> None:
    scheduler = make(num_blocks=4, max_queue=0)
    submitted(scheduler, (4, 4))
    with pytest.raises(QueueFull, match="0 requests are waiting, 0 may"):
        submitted(scheduler, (12, 4))
    submitted(scheduler, (4, 4))
    assert len(scheduler.turn().admitted) == 2


def test_a_small_task_overtakes_a_full_queue() -> None:
    scheduler = make(num_blocks=4, max_queue=1)
    submitted(scheduler, (8, 4))
    scheduler.turn()
    submitted(scheduler, (12, 4))
    with pytest.raises(QueueFull):
        submitted(scheduler, (4, 4))
    (small,) = submitted(scheduler, (2, 2))
    assert scheduler.turn().admitted == (small,)


def test_one_that_begins_at_once_is_taken_though_too_many_wait() -> None:
    scheduler = make(num_blocks=10, max_queue=1)
    (holder,) = submitted(scheduler, (8, 4))
    scheduler.turn()
    head, *_ = submitted(scheduler, (32, 4), (4, 4), (4, 4))  # the last two could overtake
    scheduler.finish(holder)  # now the head fits instead of them
    with pytest.raises(QueueFull, match="2 requests are waiting, 1 may"):
        submitted(scheduler, (4, 4))
    (small,) = submitted(scheduler, (2, 2))
    assert scheduler.turn().admitted == (head, small)
    assert scheduler.waiting == 2


def test_a_head_that_does_not_fit_is_overtaken_16_times() -> None:
    scheduler = make(num_blocks=10)
    (holder,) = submitted(scheduler, (4, 4))
    scheduler.turn()
    head, *small = submitted(scheduler, (36, 4), *[(2, 2)] * 20)
    passed: list[Task] = []
    while len(passed) < 16:
        admitted = scheduler.turn().admitted
        assert admitted, "a task that fits waits"
        passed += admitted
        for task in admitted:
            scheduler.finish(task)
    assert passed == small[:16], "those that overtake are in order"
    assert scheduler.turn().admitted == ()
    scheduler.finish(holder)
    assert scheduler.turn().admitted == (head,)
    scheduler.finish(head)
    assert scheduler.turn().admitted == tuple(small[16:])


@pytest.mark.parametrize("how", ["admitted", "cancelled"])
def test_the_next_head_is_overtaken_16_times_too(how: str) -> None:
    scheduler = make(num_blocks=20)
    (holder,) = submitted(scheduler, (4, 4))
    scheduler.turn()
    head, following, *small = submitted(scheduler, (72, 4), (72, 8), *[(2, 2)] * 40)
    assert scheduler.turn().admitted == tuple(small[:16])
    for task in small[:16]:
        scheduler.finish(task)
    if how == "admitted":
        scheduler.finish(holder)
        assert scheduler.turn().admitted == (head, small[16])  # 19 blocks and the last one
        scheduler.finish(small[16])
        for task in small[17:32]:
            assert scheduler.turn().admitted == (task,)
            scheduler.finish(task)
    else:
        scheduler.cancel(head)
        assert scheduler.turn().admitted == tuple(small[16:32])
    assert scheduler.turn().admitted == ()
    scheduler.cancel(small[32])  # not the head: nothing changes
    assert scheduler.turn().admitted == ()
    scheduler.cancel(following)
    assert scheduler.turn().admitted


def test_prefills_share_the_staging_space() -> None:
    scheduler = make(staging_tokens=24)
    first, second, third, fourth = submitted(scheduler, (9, 1), (11, 1), (1, 1), (4, 1))  # 12, 12, 4 and 4 tokens
    assert scheduler.turn().admitted == (first, second)
    scheduler.prefilled(second, 10)
    assert scheduler.turn().admitted == (), "a part of a prompt frees nothing"
    scheduler.prefilled(second, 1)
    assert scheduler.turn().admitted == (third, fourth)
    scheduler.cancel(third)
    (fifth,) = submitted(scheduler, (5, 1))
    assert scheduler.turn().admitted == (fifth,)


def test_a_prompt_larger_than_the_staging_space_prefills_alone() -> None:
    scheduler = make(staging_tokens=8)
    small, large, last = submitted(scheduler, (4, 1), (30, 1), (8, 1))
    assert scheduler.turn().admitted == (small,)
    scheduler.prefilled(small, 4)
    assert scheduler.turn().admitted == (large,)
    scheduler.prefilled(large, 29)
    assert scheduler.turn().admitted == ()
    scheduler.prefilled(large, 1)
    assert scheduler.turn().admitted == (last,)


def test_the_shortest_rest_is_prefilled_but_every_4th_chunk_is_the_oldest_ones() -> None:
    scheduler = make()
    long, middle, short = submitted(scheduler, (100, 1), (50, 1), (20, 1))
    names = {long: "long", middle: "middle", short: "short"}
    order = []
    while (task := scheduler.turn().prefill) is not None:
        order.append(names[task])
        scheduler.prefilled(task, min(10, task.prompt_tokens - task.prefilled))
    assert order == ["short", "short", "middle", "long"] * 1 + ["middle"] * 3 + ["long", "middle"] + ["long"] * 8


def test_idle_turns_do_not_count_as_chunks() -> None:
    scheduler = make()
    for _ in range(3):
        assert scheduler.turn().prefill is None
    _, short = submitted(scheduler, (9, 1), (5, 1))
    assert [scheduler.turn().prefill for _ in range(3)] == [short] * 3


def test_free_lanes_go_to_the_line_in_the_order_of_waiting() -> None:
    scheduler = make(lanes=2)
    tasks = submitted(scheduler, *[(4, 4)] * 4)
    scheduler.turn()
    for i in (2, 0, 3, 1):  # the order in which they become ready
        scheduler.prefilled(tasks[i], 4)
    assert scheduler.turn().placed == ((0, tasks[2]), (1, tasks[0]))
    scheduler.finish(tasks[0])
    scheduler.cancel(tasks[3])
    assert scheduler.turn().placed == ((1, tasks[1]),)


def test_the_one_that_decoded_most_makes_room_after_its_quantum() -> None:
    scheduler = make(lanes=2, quantum=3)
    first, second, third = submitted(scheduler, (4, 9), (4, 9), (4, 9))
    prefill_all(scheduler, scheduler.turn())
    assert scheduler.turn().placed == ((0, first), (1, second))
    for running in ([first, second], [first, second]):
        scheduler.stepped(running)
        assert scheduler.turn().parked == (), "not before the quantum"
    scheduler.stepped([second])
    turn = scheduler.turn()
    assert (turn.parked, turn.placed) == (((1, second),), ((1, third),))
    assert (second.phase, second.lane) == (Phase.PARKED, None)
    scheduler.stepped([first, third])
    assert scheduler.free_blocks == 1000 - 12, "a parked task keeps its blocks"
    turn = scheduler.turn()
    assert (turn.parked, turn.placed) == (((0, first),), ((0, second),))
    assert second.decoded == 0, "its quantum begins anew"
    scheduler.stepped([second, third])
    assert scheduler.turn().parked == ()


def test_the_largest_count_is_parked_and_of_equal_ones_the_lowest_lane() -> None:
    scheduler = make(lanes=3, quantum=1)
    tasks = submitted(scheduler, *[(4, 9)] * 3)
    prefill_all(scheduler, scheduler.turn())
    scheduler.turn()
    scheduler.stepped(tasks)
    scheduler.stepped(tasks[1:])
    submitted(scheduler, (4, 9))
    prefill_all(scheduler, scheduler.turn())
    assert scheduler.turn().parked == ((1, tasks[1]),)


def test_no_more_are_parked_than_wait_without_a_lane() -> None:
    scheduler = make(lanes=4, quantum=1)
    running = submitted(scheduler, *[(4, 9)] * 4)
    prefill_all(scheduler, scheduler.turn())
    scheduler.turn()
    scheduler.stepped(running)
    assert scheduler.turn().parked == (), "nobody waits"
    waiting = submitted(scheduler, *[(4, 9)] * 3)
    prefill_all(scheduler, scheduler.turn())
    scheduler.finish(running[2])
    turn = scheduler.turn()
    assert turn.parked == ((0, running[0]), (1, running[1]))
    assert turn.placed == ((2, waiting[0]), (0, waiting[1]), (1, waiting[2])), "the free lane first"


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.DONE])
@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_the_end_frees_everything_in_every_phase(phase: Phase, end: str) -> None:
    scheduler = make(lanes=1, num_blocks=4, quantum=1)
    (task,) = submitted(scheduler, (4, 4))
    if phase is not Phase.WAITING:
        scheduler.turn()
    if phase not in (Phase.WAITING, Phase.PREFILLING):
        scheduler.prefilled(task, 4)
    if phase in (Phase.RUNNING, Phase.PARKED):
        (other,) = submitted(scheduler, (4, 4))
        prefill_all(scheduler, scheduler.turn())
        scheduler.stepped([task])
        if phase is Phase.PARKED:
            scheduler.turn()
        scheduler.cancel(other)
    assert task.phase is phase
    getattr(scheduler, end)(task)
    assert (task.phase, task.lane, scheduler.free_blocks, counts(scheduler)) == (Phase.DONE, None, 4, (0,) * 5)
    assert scheduler.turn() == Turn(admitted=(), parked=(), placed=(), prefill=None)
    scheduler.cancel(task)
    with pytest.raises(ValueError, match="phase=done"):
        scheduler.finish(task)
    assert scheduler.free_blocks == 4


def test_a_call_in_the_wrong_phase_changes_nothing() -> None:
    scheduler = make()
    running, prefilling, waiting = submitted(scheduler, (4, 4), (4, 4), (2000, 4))
    scheduler.turn()
    scheduler.prefilled(running, 4)
    scheduler.turn()
    with pytest.raises(ValueError, match="phase=prefilling: the task must be running"):
        scheduler.stepped([running, prefilling])
    assert running.decoded == 0
    with pytest.raises(ValueError, match="phase=running: the task must be prefilling"):
        scheduler.prefilled(running, 1)
    for tokens in (0, 5):
        with pytest.raises(ValueError, match=f"tokens={tokens} is not allowed: 4 tokens"):
            scheduler.prefilled(prefilling, tokens)
    for task in (running, waiting):
        with pytest.raises(ValueError, match="was submitted before"):
            scheduler.submit(task)
    stranger = Task(prompt_tokens=1, max_tokens=1)
    with pytest.raises(ValueError, match="phase=waiting"):
        scheduler.cancel(stranger)
    assert counts(scheduler) == (1, 1, 0, 1, 0)


@pytest.mark.parametrize("name", ["lanes", "num_blocks", "block_size", "staging_tokens", "quantum", "max_queue"])
def test_sizes_out_of_range_are_refused(name: str) -> None:
    value = -1 if name == "max_queue" else 0
    with pytest.raises(ValueError, match=f"{name}={value} is not allowed: it must be at least {value + 1}"):
        make(**{name: value})


@pytest.mark.parametrize("field", ["prompt_tokens", "max_tokens"])
def test_empty_tasks_are_refused(field: str) -> None:
    scheduler = make()
    with pytest.raises(ValueError, match=f"{field}=0 is not allowed"):
        scheduler.submit(dataclasses.replace(Task(prompt_tokens=1, max_tokens=1), **{field: 0}))
    assert scheduler.waiting == 0
