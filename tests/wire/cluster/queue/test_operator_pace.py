"""The delay between changes and the plan of a job, in virtual time."""

from __future__ import annotations

import asyncio

from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from trainium_operator.cluster.cache.store import Key
from trainium_operator.cluster.queue.pace import LONGEST_PAUSE, LONGEST_UNHURRIED_PAUSE, Pace
from trainium_operator.cluster.queue.work_queue import WorkQueue

JOB = ("default", "llama")
OTHER = ("default", "other")


async def plans(cost: float, changes: list[float], until: float, faults: tuple[float, ...] = ()) -> list[float]:
    """When plans begin that take `cost` seconds, for a job that changes at these times.

    With `faults` only those are in a hurry.
    """
    loop, queue = asyncio.get_running_loop(), WorkQueue[Key]()
    pace, began, start = Pace(queue), list[float](), loop.time()

    async def work() -> None:
        while True:
            key = await queue.get()
            began.append(loop.time())
            # Planning is one uninterrupted stretch, so nothing changes in its middle.
            pace.planned(key, cost, began[-1])
            queue.done(key)

    worker = asyncio.create_task(work())
    for at in sorted([*changes, *faults]):
        await asyncio.sleep(start + at - loop.time())
        pace.put(JOB, hurry=not faults or at in faults)
    await asyncio.sleep(start + until - loop.time())
    worker.cancel()
    return [round(at - start, 3) for at in began]


def test_a_change_after_a_quiet_while_is_planned_at_once() -> None:
    assert run_virtual(plans(0.1, [1.0, 5.0], 9.0)) == [1.0, 5.0]


def test_a_thousand_changes_are_planned_in_a_fifth_of_the_time_and_the_last_is_not_missed() -> None:
    began = run_virtual(plans(0.02, [1.0 + number / 1000 for number in range(1000)], 9.0))
    assert began[0] == 1.0
    assert 12 <= len(began) <= 14
    assert began[-1] >= 1.999


def test_even_a_plan_that_takes_long_does_not_hold_up_the_next_for_more_than_a_second() -> None:
    began = run_virtual(plans(3.0, [1.0, 1.1, 4.5], 20.0))
    assert began[1] <= began[0] + LONGEST_PAUSE


def test_changes_on_which_nothing_hangs_wait_longer_and_the_last_is_not_missed() -> None:
    calm = [1.0 + number / 1000 for number in range(5000)]
    began = run_virtual(plans(0.02, calm, 9.0, faults=(8.0,)))
    assert began[-1] == 8.0
    assert 13 <= len(began) <= 16
    assert began[-2] >= 5.999
    slow = run_virtual(plans(3.0, calm, 20.0, faults=(19.0,)))
    assert slow[:2] == [1.0, 1.0 + LONGEST_UNHURRIED_PAUSE]


def test_a_fault_does_not_wait_with_the_changes_on_which_nothing_hangs() -> None:
    began = run_virtual(plans(0.1, [1.0, 1.1], 9.0, faults=(1.5,)))
    assert began == [1.0, 1.5]


@in_virtual_time
async def test_jobs_have_their_own_pace_and_a_forgotten_one_starts_again() -> None:
    loop, queue = asyncio.get_running_loop(), WorkQueue[Key]()
    pace, waiting = Pace(queue), list[bool]()
    pace.planned(JOB, 0.1, loop.time() + 0.1)
    pace.put(JOB)
    waiting.append(len(queue) == 0)
    pace.put(OTHER)
    waiting.append(len(queue) == 1)
    pace.forget(JOB)
    pace.put(JOB)
    waiting.append(len(queue) == 2)
    assert waiting == [True, True, True]
