"""The work queue: one worker for each key, no duplicates, the earliest delay wins, and errors back off."""

import asyncio

import pytest

from tests.testing.suite.virtual_time import in_virtual_time, run_pending_tasks
from trainium_operator.cluster.queue.work_queue import ClosedError, WorkQueue


@in_virtual_time
async def test_a_queued_key_is_deduplicated() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(3):
        queue.put("a")
    assert len(queue) == 1
    assert await queue.get() == "a"
    queue.mark_done("a")
    assert len(queue) == 0


@in_virtual_time
async def test_a_key_is_processed_by_one_worker_at_a_time() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.put("a")
    await queue.get()
    queue.put("a")
    second = asyncio.create_task(queue.get())
    await run_pending_tasks()
    assert not second.done()
    queue.mark_done("a")
    await run_pending_tasks()
    assert second.result() == "a"


@in_virtual_time
async def test_a_key_put_during_processing_is_queued_once_more() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.put("a")
    await queue.get()
    queue.put("a")
    queue.put("a")
    queue.mark_done("a")
    assert await queue.get() == "a"
    queue.mark_done("a")
    assert len(queue) == 0


@in_virtual_time
async def test_keys_are_first_in_first_out() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in "cabac":
        queue.put(key)
    assert [await queue.get() for _ in range(3)] == ["c", "a", "b"]


@in_virtual_time
async def test_of_several_delays_the_earliest_wins() -> None:
    loop = asyncio.get_running_loop()
    queue: WorkQueue[str] = WorkQueue()
    started = loop.time()
    queue.put_after("a", 30)
    queue.put_after("a", 5)
    queue.put_after("a", 60)
    await queue.get()
    assert loop.time() - started == pytest.approx(5, abs=0.01)
    queue.mark_done("a")
    await asyncio.sleep(100)
    assert len(queue) == 0


@in_virtual_time
async def test_get_clears_the_delay_of_a_key_but_not_a_later_one() -> None:
    loop = asyncio.get_running_loop()
    queue: WorkQueue[str] = WorkQueue()
    queue.put_after("a", 5)
    queue.put("a")
    await queue.get()
    queue.put_after("a", 30)
    queue.mark_done("a")
    started = loop.time()
    await queue.get()
    assert loop.time() - started == pytest.approx(30, abs=0.01)


@in_virtual_time
async def test_a_delay_of_zero_is_now() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.put_after("a", 0)
    assert len(queue) == 1


@in_virtual_time
async def test_the_back_off_grows_per_key_and_is_reset_by_a_success() -> None:
    queue: WorkQueue[str] = WorkQueue(first_delay=1, longest_delay=5)
    assert [queue.retry("a") for _ in range(4)] == [1, 2, 4, 5]
    assert queue.retry("b") == 1
    queue.forget("a")
    assert queue.retry("a") == 1


@in_virtual_time
async def test_a_closed_queue_raises_and_drains() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.put("a")
    queue.put("b")
    await queue.get()
    await queue.get()
    queue.mark_done("b")
    waiting = asyncio.create_task(queue.get())
    await run_pending_tasks()
    queue.put_after("c", 1)
    queue.close()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await queue.get()
    drained = asyncio.create_task(queue.wait_until_idle())
    await asyncio.sleep(2)
    assert not drained.done()
    queue.mark_done("a")
    await drained
    assert len(queue) == 0


@in_virtual_time
async def test_a_cancelled_get_does_not_lose_a_key() -> None:
    queue: WorkQueue[str] = WorkQueue()
    first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
    await run_pending_tasks()
    queue.put("a")
    first.cancel()
    assert await second == "a"
