"""Probes of ports of silent members: only a refusal after an earlier answer is evidence."""

import asyncio

import pytest

from tests.testing.operator.wire_messages import heartbeat, member, membership, registration
from tests.testing.suite.virtual_time import in_virtual_time, run_virtual
from trainium_contract.wire.messages import Member
from trainium_operator.coordinator.probe import Prober
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.plan.model.names import JobId

JOB = JobId("ns", "job", "job-uid")

PODS = ("a", "b")
IPS = {"a": "10.0.0.1", "b": "10.0.0.2"}
SILENCE = [("ns", "j", True)]
"""The notification when members of the job fall silent."""
PODS_BY_IP = {ip: pod for pod, ip in IPS.items()}


def build_member(pod: str, pod_ip: str = "", port: int = 4000) -> Member:
    return member(pod, pod_uid=pod, pod_ip=pod_ip or IPS[pod], rendezvous_port=port)


class Network:
    """Connections that answer, refuse or drop, by host."""

    def __init__(self) -> None:
        self.behaviors: dict[str, object] = {}
        self.connected_to: list[str] = []

    async def connect(self, host: str, port: int) -> None:
        pod = PODS_BY_IP[host]
        self.connected_to.append(pod)
        behavior = self.behaviors.get(pod)
        if behavior == "drop":
            await asyncio.sleep(3600)
        if isinstance(behavior, OSError):
            raise behavior


async def probe_once(prober: Prober) -> None:
    """Do what `run` does in one interval, and wait for its probes."""
    prober._report_silence()
    async with asyncio.TaskGroup() as probes:
        prober._probe_all(probes)


class ProberHarness:
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
            notify=lambda *notification: self.notified.append(notification),
            find_address=lambda target: self.addresses[target.pod],
            connect=self.network.connect,
        )
        self.state.publish(JOB, membership(1, *map(build_member, PODS)))
        for pod in PODS:
            self.register(pod)

    def register(self, pod: str) -> None:
        self.state.register(JOB, registration(build_member(pod)))

    def send_heartbeats(self, *pods: str) -> None:
        for pod in pods:
            self.state.record_heartbeat(JOB, heartbeat(pod, pod_uid=pod))

    def probe(self) -> list[str]:
        """Probe once and return the pods that were connected to."""
        self.network.connected_to.clear()
        run_virtual(probe_once(self.prober))
        return sorted(self.network.connected_to)

    def is_refused(self, pod: str) -> bool:
        return self.state.list_agents(JOB)[pod].refused_at is not None


@pytest.fixture
def harness() -> ProberHarness:
    return ProberHarness()


def test_members_are_probed_when_new_and_while_silent(harness: ProberHarness) -> None:
    assert harness.probe() == ["a", "b"]
    harness.now += 1
    harness.send_heartbeats("a", "b")
    assert harness.probe() == []
    harness.now += 2.5
    harness.send_heartbeats("a")
    assert harness.probe() == ["b"]


def test_a_refusal_after_an_answer_is_evidence_and_notifies_the_plan_at_once(harness: ProberHarness) -> None:
    harness.probe()
    harness.network.behaviors["b"] = ConnectionRefusedError()
    harness.now += 2.5
    harness.send_heartbeats("a")
    harness.probe()
    assert harness.is_refused("b")
    assert not harness.is_refused("a")
    assert harness.notified == [("ns", "j", True)] * 2, "the silence, and the refusal"
    assert harness.probe() == [], "once is enough"


def test_each_silence_notifies_the_plan_once(harness: ProberHarness) -> None:
    harness.probe()
    harness.now += 1.9
    harness.probe()
    assert harness.notified == []
    harness.now += 0.1
    harness.probe()
    harness.probe()
    assert harness.notified == [("ns", "j", True)], "once for all that fell silent"
    harness.send_heartbeats("a", "b")
    harness.probe()
    harness.now += 2
    harness.send_heartbeats("a")
    harness.probe()
    assert harness.notified == [("ns", "j", True)] * 2


@pytest.mark.parametrize("answer", ["drop", TimeoutError(), OSError(113, "No route to host")])
def test_an_error_other_than_a_refusal_is_no_evidence(harness: ProberHarness, answer: object) -> None:
    harness.probe()
    harness.network.behaviors["b"] = answer
    harness.now += 30
    harness.probe()
    assert not harness.is_refused("b")
    assert harness.notified == SILENCE


def test_a_refusal_without_an_earlier_answer_is_no_evidence(harness: ProberHarness) -> None:
    harness.network.behaviors = {pod: ConnectionRefusedError() for pod in PODS}
    harness.probe()
    harness.now += 60
    harness.probe()
    assert not harness.is_refused("a")
    assert harness.notified == SILENCE


def test_a_message_from_the_agent_clears_the_evidence(harness: ProberHarness) -> None:
    harness.probe()
    harness.network.behaviors["b"] = ConnectionRefusedError()
    harness.now += 2.5
    harness.probe()
    harness.send_heartbeats("b")
    assert not harness.is_refused("b")
    harness.now += 2.5
    harness.probe()
    assert harness.is_refused("b")
    harness.register("b")
    assert not harness.is_refused("b")


def test_a_refusal_older_than_a_message_is_ignored(harness: ProberHarness) -> None:
    harness.probe()
    harness.now += 2.5
    (target, _) = harness.state.list_probe_targets()
    harness.send_heartbeats("a")
    assert not harness.state.record_port_refused(target)
    assert not harness.is_refused("a")


@pytest.mark.parametrize("address", ["169.254.169.254", "10.0.0.9", ""])
def test_only_the_address_of_the_pod_is_probed(harness: ProberHarness, address: str) -> None:
    harness.addresses["b"] = address
    assert harness.probe() == ["a"]
    harness.now += 2.5
    assert harness.probe() == ["a"]
    assert not harness.is_refused("b")


def test_equal_ipv6_notations_are_one_address(harness: ProberHarness) -> None:
    harness.state.register(JOB, registration(build_member("b", "fd00::2")))
    PODS_BY_IP["fd00:0:0::2"] = "b"
    harness.addresses["b"] = "fd00:0:0::2"
    assert harness.probe() == ["a", "b"]


class TwoJobs:
    """A job of a thousand members behind a network that drops everything, and a job of one member."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.state = CoordinatorState(self.clock)
        self.notified: list[tuple[float, str]] = []
        self.connected = 0
        self.at_once = 0
        self.small_exited = False
        for job, pod_ip, count in (("dark", "10.0.0.1", 1000), ("small", "10.0.0.2", 1)):
            members = [build_member(f"{job}-{rank}", pod_ip) for rank in range(count)]
            self.state.publish(JobId("ns", job, job), membership(1, *members))
            for job_member in members:
                self.state.register(JobId("ns", job, job), registration(job_member, job=job))
        self.prober = Prober(
            self.state,
            is_serving=lambda: True,
            notify=lambda _namespace, job, _urgent: self.notified.append((self.clock(), job)),
            find_address=lambda target: target.host,
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
        """Let all ports answer, silence the thousand, and 5 s later end the agent of the other job."""
        task = asyncio.create_task(self.prober.run())
        await asyncio.sleep(1)
        self.silent = True
        for _ in range(10):
            self.state.record_heartbeat(
                JobId("ns", "small", "small"), heartbeat("small-0", pod_uid="small-0", job="small")
            )
            await asyncio.sleep(0.5)
        self.small_exited = True
        await asyncio.sleep(4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)


@in_virtual_time
async def test_unresponsive_ports_of_one_job_do_not_delay_another() -> None:
    harness = TwoJobs()
    began = harness.clock()
    await harness.run()
    dark, *_ = [round(when - began, 1) for when, job in harness.notified if job == "dark"]
    small = [round(when - began, 1) for when, job in harness.notified if job == "small"]
    assert dark <= 2.5, "silent for 2 s, reported by the next probe"
    assert small[0] <= 8.0, "last seen at 5.5 s: the next probe reports its silence"
    assert small[1] <= small[0] + 1.5, "and of the refusal a connection later"
    assert harness.at_once == 16, "one job's ports take a quarter of the slots"
    assert harness.connected == 0, "nothing is connected when the prober has ended"


@in_virtual_time
async def test_a_follower_does_not_probe() -> None:
    harness = ProberHarness()
    prober = Prober(
        harness.state,
        is_serving=lambda: False,
        notify=lambda *_: None,
        find_address=lambda target: target.host,
        connect=harness.network.connect,
    )
    task = asyncio.create_task(prober.run())
    await asyncio.sleep(5)
    task.cancel()
    assert harness.network.connected_to == []


async def test_a_closed_real_port_refuses() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    harness = ProberHarness()
    harness.state.register(JOB, registration(build_member("b", "127.0.0.1", port)))
    prober = Prober(
        harness.state,
        is_serving=lambda: True,
        notify=lambda *notification: harness.notified.append(notification),
        find_address=lambda target: target.host,
    )
    harness.state.forget_pod(JOB, "a")
    await probe_once(prober)
    server.close()
    await server.wait_closed()
    harness.now += 2.5
    await probe_once(prober)
    assert harness.is_refused("b")
