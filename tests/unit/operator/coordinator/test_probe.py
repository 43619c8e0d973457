"""Ports of silent members: a refusal is evidence, a time-out is not, and a firewall's refusal is not either."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.testing.operator.wire_messages import heartbeat, member, membership, registration
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from trainium_operator.coordinator.probe import Prober
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.plan.model.names import JobId

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Member

JOB = JobId("ns", "job", "job-uid")

PODS = ("a", "b")
IPS = {"a": "10.0.0.1", "b": "10.0.0.2"}
SILENCE = [("ns", "j", True)]
"""The notification when members of the job fall silent."""
PODS_OF = {ip: pod for pod, ip in IPS.items()}


def at(pod: str, pod_ip: str = "", port: int = 4000) -> Member:
    return member(pod, pod_uid=pod, pod_ip=pod_ip or IPS[pod], rendezvous_port=port)


class Network:
    """Connections that answer, refuse or drop, by host."""

    def __init__(self) -> None:
        self.does: dict[str, object] = {}
        self.connected_to: list[str] = []

    async def connect(self, host: str, port: int) -> None:
        pod = PODS_OF[host]
        self.connected_to.append(pod)
        answer = self.does.get(pod)
        if answer == "drop":
            await asyncio.sleep(3600)
        if isinstance(answer, OSError):
            raise answer


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.state = CoordinatorState(lambda: self.now)
        self.network = Network()
        self.notified: list[tuple[str, str, bool]] = []
        self.addresses = dict(IPS)
        """The addresses that the API server reports."""
        self.prober = Prober(
            self.state,
            is_serving=lambda: True,
            notify=lambda *words: self.notified.append(words),
            address_of=lambda target: self.addresses[target.pod],
            connect=self.network.connect,
        )
        self.state.publish(JOB, membership(1, *map(at, PODS)))
        for pod in PODS:
            self.register(pod)

    def register(self, pod: str) -> None:
        self.state.register(JOB, registration(at(pod)))

    def beat(self, *pods: str) -> None:
        for pod in pods:
            self.state.heartbeat(JOB, heartbeat(pod, pod_uid=pod))

    def probe(self) -> list[str]:
        """Probe once and return the pods that were connected to."""
        self.network.connected_to.clear()
        run_virtual(self.prober.probe_once())
        return sorted(self.network.connected_to)

    def refused(self, pod: str) -> bool:
        return self.state.agents(JOB)[pod].refused is not None


@pytest.fixture
def world() -> World:
    return World()


def test_each_member_is_probed_once_when_it_is_new_and_then_only_while_it_is_silent(world: World) -> None:
    assert world.probe() == ["a", "b"]
    world.now += 1
    world.beat("a", "b")
    assert world.probe() == []
    world.now += 2.5
    world.beat("a")
    assert world.probe() == ["b"]


def test_a_refusal_after_an_answer_is_evidence_and_notifies_the_plan_at_once(world: World) -> None:
    world.probe()
    world.network.does["b"] = ConnectionRefusedError()
    world.now += 2.5
    world.beat("a")
    world.probe()
    assert world.refused("b")
    assert not world.refused("a")
    assert world.notified == [("ns", "j", True)] * 2, "the silence, and the refusal"
    assert world.probe() == [], "once is enough"


def test_each_silence_notifies_the_plan_once(world: World) -> None:
    world.probe()
    world.now += 1.9
    world.probe()
    assert world.notified == []
    world.now += 0.1
    world.probe()
    world.probe()
    assert world.notified == [("ns", "j", True)], "once for all that fell silent"
    world.beat("a", "b")
    world.probe()
    world.now += 2
    world.beat("a")
    world.probe()
    assert world.notified == [("ns", "j", True)] * 2


@pytest.mark.parametrize("answer", ["drop", TimeoutError(), OSError(113, "No route to host")])
def test_an_error_other_than_a_refusal_is_no_evidence(world: World, answer: object) -> None:
    world.probe()
    world.network.does["b"] = answer
    world.now += 30
    world.probe()
    assert not world.refused("b")
    assert world.notified == SILENCE


def test_a_port_that_never_answered_may_be_behind_a_firewall(world: World) -> None:
    world.network.does = {pod: ConnectionRefusedError() for pod in PODS}
    world.probe()
    world.now += 60
    world.probe()
    assert not world.refused("a")
    assert world.notified == SILENCE


def test_a_message_from_the_agent_clears_the_evidence(world: World) -> None:
    world.probe()
    world.network.does["b"] = ConnectionRefusedError()
    world.now += 2.5
    world.probe()
    world.beat("b")
    assert not world.refused("b")
    world.now += 2.5
    world.probe()
    assert world.refused("b")
    world.register("b")
    assert not world.refused("b")


def test_a_refusal_that_comes_after_a_newer_message_is_too_late(world: World) -> None:
    world.probe()
    world.now += 2.5
    (target, _) = world.state.probe_targets()
    world.beat("a")
    assert not world.state.record_port_refused(target)
    assert not world.refused("a")


@pytest.mark.parametrize("address", ["169.254.169.254", "10.0.0.9", ""])
def test_an_address_that_is_not_the_pods_own_is_never_connected_to(world: World, address: str) -> None:
    world.addresses["b"] = address
    assert world.probe() == ["a"]
    world.now += 2.5
    assert world.probe() == ["a"]
    assert not world.refused("b")


def test_one_address_may_be_written_in_several_ways(world: World) -> None:
    world.state.register(JOB, registration(at("b", "fd00::2")))
    PODS_OF["fd00:0:0::2"] = "b"
    world.addresses["b"] = "fd00:0:0::2"
    assert world.probe() == ["a", "b"]


class TwoJobs:
    """A thousand members of one job fall silent behind a network that drops everything; another job has one member."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.state = CoordinatorState(self.clock)
        self.notified: list[tuple[float, str]] = []
        self.connected = 0
        self.at_once = 0
        self.small_exited = False
        for job, pod_ip, count in (("dark", "10.0.0.1", 1000), ("small", "10.0.0.2", 1)):
            members = [at(f"{job}-{rank}", pod_ip) for rank in range(count)]
            self.state.publish(JobId("ns", job, job), membership(1, *members))
            for each in members:
                self.state.register(JobId("ns", job, job), registration(each, job=job))
        self.prober = Prober(
            self.state,
            is_serving=lambda: True,
            notify=lambda _namespace, job, _urgent: self.notified.append((self.clock(), job)),
            address_of=lambda target: target.host,
            connect=self.connect,
        )
        self.silent = False

    async def connect(self, host: str, _port: int) -> None:
        if host == "10.0.0.2":
            if self.small_exited:
                raise ConnectionRefusedError
            return
        if self.silent:
            self.connected += 1
            self.at_once = max(self.at_once, self.connected)
            try:
                await asyncio.sleep(3600)
            finally:
                self.connected -= 1

    async def run(self) -> None:
        """All ports answer; then the thousand fall silent; 5 s later the other job's agent has exited."""
        task = asyncio.create_task(self.prober.run())
        await asyncio.sleep(1)
        self.silent = True
        for _ in range(10):
            self.state.heartbeat(JobId("ns", "small", "small"), heartbeat("small-0", pod_uid="small-0", job="small"))
            await asyncio.sleep(0.5)
        self.small_exited = True
        await asyncio.sleep(4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)


@in_virtual_time
async def test_ports_that_do_not_answer_delay_neither_the_notification_nor_the_evidence_of_another_job() -> None:
    world = TwoJobs()
    began = world.clock()
    await world.run()
    dark, *_ = [round(when - began, 1) for when, job in world.notified if job == "dark"]
    small = [round(when - began, 1) for when, job in world.notified if job == "small"]
    assert dark <= 2.5, "silent for 2 s, reported by the next probe"
    assert small[0] <= 8.0, "last seen at 5.5 s: the next probe reports its silence"
    assert small[1] <= small[0] + 1.5, "and of the refusal a connection later"
    assert world.at_once == 16, "one job's ports take a quarter of the slots"
    assert world.connected == 0, "nothing is connected when the prober has ended"


@in_virtual_time
async def test_a_follower_probes_nobody() -> None:
    world = World()
    prober = Prober(
        world.state,
        is_serving=lambda: False,
        notify=lambda *_: None,
        address_of=lambda target: target.host,
        connect=world.network.connect,
    )
    task = asyncio.create_task(prober.run())
    await asyncio.sleep(5)
    task.cancel()
    assert world.network.connected_to == []


async def test_a_real_port_answers_while_it_is_open_and_refuses_afterwards() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    world = World()
    world.state.register(JOB, registration(at("b", "127.0.0.1", port)))
    prober = Prober(
        world.state,
        is_serving=lambda: True,
        notify=lambda *words: world.notified.append(words),
        address_of=lambda target: target.host,
    )
    world.state.forget_pod(JOB, "a")
    await prober.probe_once()
    server.close()
    await server.wait_closed()
    world.now += 2.5
    await prober.probe_once()
    assert world.refused("b")
