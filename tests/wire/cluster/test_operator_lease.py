"""The Lease of the operator: acquired, renewed, lost and released by two replicas."""

import asyncio
import contextlib
from typing import Any

import pytest

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.suite.virtual_time import in_virtual_time
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import LEASES
from trainium_operator.cluster.lease import LeaseElector, LeaseLostError, LeaseTimes
from trainium_operator.settings import Settings


def create_elector(
    cluster: FakeApiServer, identity: str, *, clock_error: float = 0.0, times: LeaseTimes | None = None
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


class LeaseReplica:
    """A replica that acquires the Lease and holds it."""

    def __init__(self, cluster: FakeApiServer, identity: str, **options: Any) -> None:
        self.elector = create_elector(cluster, identity, **options)
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

    async def wait_until_leading(self) -> None:
        await self._leads.wait()


async def start_leader() -> tuple[FakeApiServer, LeaseReplica]:
    cluster = FakeApiServer()
    first = LeaseReplica(cluster, "a")
    await first.wait_until_leading()
    return cluster, first


def holder(cluster: FakeApiServer) -> str:
    return cluster.get(LEASES, "ns", "lease")["spec"]["holderIdentity"]


@in_virtual_time
async def test_a_free_lease_is_acquired_at_once_and_held() -> None:
    cluster = FakeApiServer()
    started = asyncio.get_running_loop().time()
    replica = LeaseReplica(cluster, "a")
    await replica.wait_until_leading()
    assert asyncio.get_running_loop().time() - started < 0.2
    await asyncio.sleep(600)
    assert holder(cluster) == "a"
    assert not replica.task.done()


@in_virtual_time
async def test_only_one_of_two_leads_despite_wrong_clocks() -> None:
    cluster, _first = await start_leader()
    second = LeaseReplica(cluster, "b", clock_error=86_400.0)
    await asyncio.sleep(600)
    assert second.led_at is None
    assert holder(cluster) == "a"


@in_virtual_time
async def test_a_candidate_waits_for_the_whole_lease_after_a_crash() -> None:
    (cluster, first), loop = await start_leader(), asyncio.get_running_loop()
    second = LeaseReplica(cluster, "b")
    await asyncio.sleep(30)
    crashed = loop.time()
    await first.crash()
    await second.wait_until_leading()
    await second.crash()
    assert cluster.get(LEASES, "ns", "lease")["spec"]["leaseTransitions"] == 1
    assert 3 <= ((second.led_at or 0) - crashed) < 5


@pytest.mark.parametrize(("duration", "deadline", "retry"), [(3, 2.4, 0.2), (6, 4.5, 0.5), (15, 10, 2), (60, 48, 24)])
@in_virtual_time
async def test_a_holder_that_cannot_renew_stops_before_the_candidate_leads(
    duration: int, deadline: float, retry: float
) -> None:
    cluster = FakeApiServer()
    times = LeaseTimes.of(duration=duration, renew_deadline=deadline, retry=retry)
    first, loop = LeaseReplica(cluster, "a", times=times), asyncio.get_running_loop()
    await first.wait_until_leading()
    second = LeaseReplica(cluster, "b")  # with other times, as during an upgrade; those of the holder count
    await asyncio.sleep(600)
    assert second.led_at is None
    cut_off = loop.time()
    cluster.faults.append(
        lambda method, _path: http_error(500, "InternalError") if method == "PUT" and holder(cluster) == "a" else None
    )
    with pytest.raises(LeaseLostError):
        await first.task
    assert not first.elector.may_act()
    assert not first.elector.leading
    assert second.led_at is None
    stopped = loop.time()
    cluster.faults.clear()
    await second.wait_until_leading()
    await second.crash()
    stopped, gap = stopped - cut_off, (second.led_at or 0) - stopped
    assert deadline - retry <= stopped <= deadline + 0.5
    assert 0 < gap < duration


def test_the_default_settings_are_the_times_of_a_lease() -> None:
    settings = Settings()
    times = LeaseTimes.of(
        duration=settings.lease_duration, renew_deadline=settings.lease_renew_deadline, retry=settings.lease_retry
    )
    assert times == LeaseTimes()


@in_virtual_time
async def test_a_candidate_is_pending_after_a_missed_renewal() -> None:
    cluster, first = await start_leader()
    second = LeaseReplica(cluster, "b")
    await asyncio.sleep(60)
    assert first.elector.is_pending()
    assert not second.elector.is_pending()
    await first.crash()
    await asyncio.sleep(3)
    assert second.elector.is_pending()
    assert second.led_at is None


@in_virtual_time
async def test_a_released_lease_is_acquired_within_one_retry() -> None:
    (cluster, first), loop = await start_leader(), asyncio.get_running_loop()
    second = LeaseReplica(cluster, "b")
    await asyncio.sleep(30)
    released_at = loop.time()
    await first.leave()
    await second.wait_until_leading()
    await second.crash()
    assert ((second.led_at or 0) - released_at) < 2.6


@in_virtual_time
async def test_a_nudged_candidate_checks_within_a_fifth_of_a_second() -> None:
    (cluster, first), loop = await start_leader(), asyncio.get_running_loop()
    second = LeaseReplica(cluster, "b")
    await asyncio.sleep(30.3)
    second.elector.read_soon()  # before the holder releases the Lease
    await asyncio.sleep(0.05)
    released_at = loop.time()
    await first.leave()
    second.elector.read_soon()
    await second.wait_until_leading()
    await second.crash()
    assert ((second.led_at or 0) - released_at) < 0.25


@in_virtual_time
async def test_nudges_cause_at_most_five_checks_a_second() -> None:
    cluster, first = await start_leader()
    second = LeaseReplica(cluster, "b")
    await asyncio.sleep(30)
    before = len(cluster.requests)
    for _ in range(1000):
        second.elector.read_soon()
        await asyncio.sleep(0.01)
    await first.crash()
    await second.crash()
    assert (len(cluster.requests) - before) <= 65, "with the leader's renewals"


@in_virtual_time
async def test_a_restarted_container_acquires_its_lease_at_once() -> None:
    cluster = FakeApiServer()
    first, loop = LeaseReplica(cluster, "pod-1_uid"), asyncio.get_running_loop()
    await first.wait_until_leading()
    await first.crash()
    restarted = loop.time()
    second = LeaseReplica(cluster, "pod-1_uid")
    await second.wait_until_leading()
    await second.crash()
    assert ((second.led_at or 0) - restarted) < 0.2


@in_virtual_time
async def test_a_replaced_holder_stops_at_once() -> None:
    cluster, first = await start_leader()
    cluster.change(LEASES, "ns", "lease", lambda raw: raw["spec"].update(holderIdentity="b"))
    with pytest.raises(LeaseLostError, match="b holds the lease now"):
        async with asyncio.timeout(3):
            await first.task


@in_virtual_time
async def test_a_label_on_the_lease_is_kept_and_changes_no_leader() -> None:
    cluster, first = await start_leader()
    cluster.change(LEASES, "ns", "lease", lambda raw: raw["metadata"].update(labels={"x": "y"}))
    await asyncio.sleep(60)
    assert not first.task.done()
    assert cluster.get(LEASES, "ns", "lease")["metadata"]["labels"] == {"x": "y"}


@in_virtual_time
async def test_a_deleted_lease_is_recreated_by_its_holder() -> None:
    cluster, _first = await start_leader()
    cluster.remove(LEASES, "ns", "lease")
    await asyncio.sleep(10)
    assert holder(cluster) == "a"


@in_virtual_time
async def test_a_candidate_waits_for_the_api_server() -> None:
    cluster = FakeApiServer()
    cluster.down = True
    first = LeaseReplica(cluster, "a")
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
async def test_a_malformed_lease_can_be_acquired_and_held(spec: Any) -> None:
    cluster = FakeApiServer()
    cluster.add(LEASES, {"metadata": {"name": "lease", "namespace": "ns"}, "spec": spec})
    replica = LeaseReplica(cluster, "a")
    await replica.wait_until_leading()
    await asyncio.sleep(30)
    assert holder(cluster) == "a"
    assert 0 <= cluster.get(LEASES, "ns", "lease")["spec"]["leaseTransitions"] < 2**31
    await replica.leave()
