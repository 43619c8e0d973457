from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.testing.api.fake_kubernetes import FakeCluster, refuse
from tests.testing.suite.virtual_time import in_virtual_time
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import LEASES
from trainium_operator.cluster.lease import LeaseElector, LeaseLostError, LeaseTimes
from trainium_operator.settings import Settings


def elector(
    cluster: FakeCluster, identity: str, *, clock_error: float = 0.0, times: LeaseTimes | None = None
) -> LeaseElector:
    loop = asyncio.get_running_loop()
    return LeaseElector(
        Api(cluster),
        "ns",
        "lease",
        identity,
        wall_clock=lambda: 1.7e9 + clock_error + loop.time(),
        times=times or LeaseTimes(),
        jitter=lambda: 0.5,
    )


class Operator:
    """Acquires, then holds; what a process does."""

    def __init__(self, cluster: FakeCluster, identity: str, **options: Any) -> None:
        self.elector = elector(cluster, identity, **options)
        self.led_at: float | None = None
        self._leads = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.elector.acquire()
        self.led_at = asyncio.get_running_loop().time()
        self._leads.set()
        await self.elector.hold()

    async def crash(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def leave(self) -> None:
        await self.crash()
        await self.elector.release()

    async def leads(self) -> None:
        await self._leads.wait()


async def leading() -> tuple[FakeCluster, Operator]:
    cluster = FakeCluster()
    first = Operator(cluster, "a")
    await first.leads()
    return cluster, first


def holder(cluster: FakeCluster) -> str:
    return cluster.get(LEASES, "ns", "lease")["spec"]["holderIdentity"]


@in_virtual_time
async def test_a_free_lease_is_taken_at_once_and_then_held() -> None:
    cluster = FakeCluster()
    started = asyncio.get_running_loop().time()
    only = Operator(cluster, "a")
    await only.leads()
    assert asyncio.get_running_loop().time() - started < 0.2
    await asyncio.sleep(600)
    assert holder(cluster) == "a"
    assert not only.task.done()


@in_virtual_time
async def test_only_one_of_two_leads_whatever_their_clocks_show() -> None:
    cluster, _first = await leading()
    second = Operator(cluster, "b", clock_error=86_400.0)
    await asyncio.sleep(600)
    assert second.led_at is None
    assert holder(cluster) == "a"


@in_virtual_time
async def test_after_a_crash_the_other_waits_for_the_whole_lease() -> None:
    (cluster, first), loop = await leading(), asyncio.get_running_loop()
    second = Operator(cluster, "b")
    await asyncio.sleep(30)
    crashed = loop.time()
    await first.crash()
    await second.leads()
    await second.crash()
    assert cluster.get(LEASES, "ns", "lease")["spec"]["leaseTransitions"] == 1
    assert 12 < ((second.led_at or 0) - crashed) < 20


@pytest.mark.parametrize(("duration", "deadline", "retry"), [(3, 2.4, 0.2), (6, 4.5, 0.5), (60, 48, 24)])
@in_virtual_time
async def test_with_other_times_the_candidate_waits_for_the_holders_lease_and_the_holder_stops_before(
    duration: int, deadline: float, retry: float
) -> None:
    cluster = FakeCluster()
    times = LeaseTimes.of(duration=duration, renew_deadline=deadline, retry=retry)
    first, loop = Operator(cluster, "a", times=times), asyncio.get_running_loop()
    await first.leads()
    second = Operator(cluster, "b")  # as during an upgrade that changes them: the holder's count
    await asyncio.sleep(600)
    assert second.led_at is None
    cut_off = loop.time()
    cluster.faults.append(
        lambda method, _path: refuse(500, "InternalError") if method == "PUT" and holder(cluster) == "a" else None
    )
    with contextlib.suppress(LeaseLostError):
        await first.task
    assert not first.elector.may_act()
    stopped = loop.time()
    cluster.faults.clear()
    await second.leads()
    await second.crash()
    stopped, apart = stopped - cut_off, (second.led_at or 0) - stopped
    assert deadline - retry <= stopped <= deadline + 0.5
    assert 0 < apart < duration


def test_the_default_settings_are_the_times_of_a_lease() -> None:
    given = Settings()
    made = LeaseTimes.of(
        duration=given.lease_duration, renew_deadline=given.lease_renew_deadline, retry=given.lease_retry
    )
    assert made == LeaseTimes()


@in_virtual_time
async def test_the_other_is_due_once_the_holder_has_missed_a_renewal() -> None:
    cluster, first = await leading()
    second = Operator(cluster, "b")
    await asyncio.sleep(60)
    assert first.elector.is_pending()
    assert not second.elector.is_pending()
    await first.crash()
    await asyncio.sleep(6)
    assert second.elector.is_pending()
    assert second.led_at is None


@in_virtual_time
async def test_after_a_clean_exit_the_other_takes_over_within_one_retry() -> None:
    (cluster, first), loop = await leading(), asyncio.get_running_loop()
    second = Operator(cluster, "b")
    await asyncio.sleep(30)
    left = loop.time()
    await first.leave()
    await second.leads()
    await second.crash()
    assert ((second.led_at or 0) - left) < 2.6


@in_virtual_time
async def test_a_candidate_that_is_notified_of_a_lost_holder_checks_within_a_fifth_of_a_second() -> None:
    (cluster, first), loop = await leading(), asyncio.get_running_loop()
    second = Operator(cluster, "b")
    await asyncio.sleep(30.3)
    second.elector.nudge()  # too early: the holder has not let go yet
    await asyncio.sleep(0.05)
    left = loop.time()
    await first.leave()
    second.elector.nudge()
    await second.leads()
    await second.crash()
    assert ((second.led_at or 0) - left) < 0.25


@in_virtual_time
async def test_a_candidate_that_is_notified_without_end_checks_five_times_a_second_at_most() -> None:
    cluster, first = await leading()
    second = Operator(cluster, "b")
    await asyncio.sleep(30)
    before = len(cluster.requests)
    for _ in range(1000):
        second.elector.nudge()
        await asyncio.sleep(0.01)
    await first.crash()
    await second.crash()
    assert (len(cluster.requests) - before) <= 60


@in_virtual_time
async def test_a_container_restarted_in_its_pod_takes_its_lease_back_at_once() -> None:
    cluster = FakeCluster()
    first, loop = Operator(cluster, "pod-1_uid"), asyncio.get_running_loop()
    await first.leads()
    await first.crash()
    restarted = loop.time()
    second = Operator(cluster, "pod-1_uid")
    await second.leads()
    await second.crash()
    assert ((second.led_at or 0) - restarted) < 0.2


@in_virtual_time
async def test_a_holder_that_cannot_renew_stops_before_others_may_take_over() -> None:
    (cluster, first), loop = await leading(), asyncio.get_running_loop()
    second = Operator(cluster, "b")
    await asyncio.sleep(20)
    cut_off = loop.time()
    cluster.faults.append(
        lambda method, path: (
            refuse(500, "InternalError") if method == "PUT" and holder(cluster) == "a" and not lost else None
        )
    )
    lost: list[float] = []
    with pytest.raises(LeaseLostError):
        await first.task
    lost.append(loop.time())
    assert lost[0] - cut_off < 13
    assert second.led_at is None
    assert not first.elector.leading
    await second.leads()
    assert (second.led_at or 0) > lost[0]


@in_virtual_time
async def test_a_holder_that_sees_another_in_its_place_stops_at_once() -> None:
    cluster, first = await leading()
    cluster.change(LEASES, "ns", "lease", lambda raw: raw["spec"].update(holderIdentity="b"))
    with pytest.raises(LeaseLostError, match="b holds the lease now"):
        async with asyncio.timeout(3):
            await first.task


@in_virtual_time
async def test_a_label_put_on_the_lease_does_not_end_the_reign() -> None:
    cluster, first = await leading()
    cluster.change(LEASES, "ns", "lease", lambda raw: raw["metadata"].update(labels={"x": "y"}))
    await asyncio.sleep(60)
    assert not first.task.done()
    assert cluster.get(LEASES, "ns", "lease")["metadata"]["labels"] == {"x": "y"}


@in_virtual_time
async def test_a_deleted_lease_is_made_again_by_its_holder() -> None:
    cluster, _first = await leading()
    cluster.remove(LEASES, "ns", "lease")
    await asyncio.sleep(10)
    assert holder(cluster) == "a"


@in_virtual_time
async def test_an_absent_api_server_is_waited_for() -> None:
    cluster = FakeCluster()
    cluster.down = True
    first = Operator(cluster, "a")
    await asyncio.sleep(120)
    assert first.led_at is None
    cluster.down = False
    await asyncio.sleep(5)
    assert first.led_at is not None


@pytest.mark.parametrize(
    "spec",
    [
        {"leaseTransitions": 2**31 - 1},
        {"leaseTransitions": "many", "holderIdentity": ["a"], "renewTime": 7, "leaseDurationSeconds": {}},
        [],
    ],
)
@in_virtual_time
async def test_a_lease_that_somebody_has_spoilt_can_be_taken_and_held(spec: Any) -> None:
    cluster = FakeCluster()
    cluster.add(LEASES, {"metadata": {"name": "lease", "namespace": "ns"}, "spec": spec})
    only = Operator(cluster, "a")
    await only.leads()
    await asyncio.sleep(30)
    assert holder(cluster) == "a"
    assert 0 <= cluster.get(LEASES, "ns", "lease")["spec"]["leaseTransitions"] < 2**31
    await only.leave()
