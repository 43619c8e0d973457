"""Nodes of a fake cluster in virtual time: kubelets that run pods, and agents that train and report to the operator.

As real agents do, these ones
- find the leading operator by themselves, and register again after each loss of contact;
- train on without an operator;
- restart a crashed process in place, together with the other agents of its generation;
- leave a generation when a newer one does not name them;
- use the clock of their node.

Virtual time has no sockets, so agents call the coordinator's state directly. `tests/unit/plan/fake_data_plane` has the
same agents without an API server, for tens of thousands of histories.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.api.objects import bind_pod, end_worker, ready_node
from tests.testing.operator.reporting_agent import ReportingAgent
from tests.testing.operator.wire_messages import member, registration
from tests.testing.virtual.operator_process import OperatorProcess, wall_clock
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.last_report import encode_last_report
from trainium_contract.wire.messages import (
    CheckResult,
    HeartbeatRequest,
    Membership,
    ProcessFailure,
    Progress,
    WorkerPhase,
)
from trainium_contract.wire.worker_env import LABEL_ROLE, ROLE_WORKER
from trainium_operator.cluster.api.resources import NODES, PODS
from trainium_operator.coordinator.state import NotRegisteredError, OldGenerationError
from trainium_operator.plan.model.names import JobId

TURN_SECONDS = 0.5
STOP_SECONDS = 1.0


@dataclass
class Agent(ReportingAgent):
    """One pod's agent, as far as the operator can observe it."""

    job_uid: str = ""
    membership: Membership | None = None
    finished: bool = False

    @property
    def name(self) -> str:
        return self.registration.pod_name

    @property
    def uid(self) -> str:
        return self.registration.pod_uid

    @property
    def node(self) -> str:
        return self.registration.node_name

    @property
    def job(self) -> str:
        return self.registration.job

    @property
    def job_id(self) -> JobId:
        return JobId(self.registration.namespace, self.job, self.job_uid)

    @property
    def member(self) -> bool:
        return self.membership is not None and self.membership.find_node_rank(self.uid) is not None


class Workers:
    """All nodes of a fake cluster; `operators` are the replicas that agents may find."""

    def __init__(self, cluster: FakeApiServer, nodes: int, total_steps: int) -> None:
        self.cluster = cluster
        self.operators: list[OperatorProcess] = []
        self.total_steps = total_steps
        self.steps: dict[str, int] = {}
        """Completed steps by job."""
        self.agents: dict[str, Agent] = {}
        """By pod uid."""
        self.lost_nodes: set[str] = set()
        self.turns_per_step = 1
        self.cut_off = False
        """No agent reaches any operator."""
        self.muted_nodes: set[str] = set()
        """Nodes whose agents reach no operator."""
        self.clock_offsets: dict[str, float] = {}
        """Seconds by which the clock of a node is ahead; its agent's check reports it, and its times use it."""
        self._deletion_seen_at: dict[str, float] = {}
        for number in range(nodes):
            cluster.add(NODES, ready_node(f"node-{number}"))

    @property
    def operator(self) -> OperatorProcess | None:
        return self.operators[-1] if self.operators else None

    @operator.setter
    def operator(self, process: OperatorProcess) -> None:
        self.operators = [process]

    @property
    def step(self) -> int:
        """Return the step of the only job, or of the one that is furthest."""
        return max(self.steps.values(), default=0)

    def step_of(self, job: str) -> int:
        return self.steps.get(job, 0)

    async def run(self) -> None:
        for turn in itertools.count():
            await asyncio.sleep(TURN_SECONDS)
            self._run_kubelets()
            self._follow_pods()
            for job in sorted({agent.job for agent in self.agents.values()}):
                if turn % self.turns_per_step == 0:
                    self._train(job)
            for agent in list(self.agents.values()):
                # One heartbeat in a second and a half, and never all at the same moment.
                if int(agent.name.rpartition("-")[2]) % 3 == turn % 3 and agent.node not in self.muted_nodes:
                    for process in self._leaders():
                        self._exchange(process, agent)

    # --- nodes

    def _pods(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for plural, namespace, name in sorted(self.cluster.objects):
            if plural == PODS.plural:
                yield namespace, name, self.cluster.objects[plural, namespace, name]

    def _run_kubelets(self) -> None:
        now = asyncio.get_running_loop().time()
        busy = {raw["spec"].get("nodeName") for _, _, raw in self._pods() if raw["status"]["phase"] in _ALIVE}
        for namespace, name, raw in list(self._pods()):
            node = raw["spec"].get("nodeName")
            if "deletionTimestamp" in raw["metadata"]:
                since = self._deletion_seen_at.setdefault(raw["metadata"]["uid"], now)
                if node not in self.lost_nodes and now - since >= STOP_SECONDS:
                    self.cluster.remove(PODS, namespace, name)
            elif raw["status"]["phase"] == "Pending" and node is None:
                free = set(self.cluster.names(NODES, "")) - busy - self.lost_nodes
                if free:
                    number = min(int(name.removeprefix("node-")) for name in free)
                    busy.add(f"node-{number}")
                    self.cluster.change(PODS, namespace, name, bind_pod(f"node-{number}", number))

    def _follow_pods(self) -> None:
        running: dict[str, dict[str, Any]] = {}
        for namespace, name, raw in list(self._pods()):
            node = raw["spec"].get("nodeName")
            agent = self.agents.get(raw["metadata"]["uid"])
            if raw["metadata"].get("labels", {}).get(LABEL_ROLE) != ROLE_WORKER:
                continue
            if raw["status"]["phase"] != "Running" or node in self.lost_nodes:
                continue
            running[raw["metadata"]["uid"]] = raw
            if agent is None:
                owner = raw["metadata"]["ownerReferences"][0]
                uid = raw["metadata"]["uid"]
                identity = member(name, pod_uid=uid, pod_ip=raw["status"]["podIP"], node_name=node)
                self.agents[uid] = Agent(registration(identity, namespace, owner["name"]), job_uid=owner["uid"])
            elif agent.finished:
                message = encode_last_report(self._heartbeat(agent))
                self.cluster.change(PODS, namespace, name, end_worker(0, "Completed", "Succeeded", message))
        for uid in set(self.agents) - set(running):
            del self.agents[uid]

    # --- training

    def members(self, job: str) -> list[Agent]:
        """Return the agents of the newest generation that any agent of the job is in, by rank."""
        memberships = [
            agent.membership for agent in self.agents.values() if agent.job == job and agent.member and agent.membership
        ]
        if not memberships:
            return []
        newest = max(memberships, key=lambda membership: membership.generation)
        current = {agent.uid: agent for agent in self.agents.values() if agent.membership == newest}
        return [current[member.pod_uid] for member in newest.members if member.pod_uid in current]

    def _train(self, job: str) -> None:
        members = self.members(job)
        if not members or members[0].membership is None or len(members) < len(members[0].membership.members):
            return
        if any(agent.verdict is not None for agent in members):
            return
        attempt = max(agent.attempt for agent in members)
        self.steps[job] = min(self.total_steps, self.step_of(job) + 1)
        for agent in members:
            agent.attempt = attempt
            agent.finished = self.steps[job] >= self.total_steps
            agent.record_resumption(self._clock(agent))

    def crash_process(self, job: str, rank: int, code: int = 139) -> None:
        """Kill one rank; all ranks restart in place without the operator."""
        members = self.members(job)
        members[rank].failures.append(self._build_failure(members[rank], rank, code))
        for agent in members:
            cause = Cause.CRASH if agent is members[rank] else Cause.PEER_LOST
            agent.restart_in_place(cause, step=self.step_of(job), at=self._clock(agent))

    def give_up(self, job: str, rank: int, code: int) -> None:
        """Let an agent give up; the other agents stop."""
        agent = self.members(job)[rank]
        agent.verdict = self._build_failure(agent, rank, code)

    def _build_failure(self, agent: Agent, rank: int, code: int) -> ProcessFailure:
        return agent.build_failure(rank, code, step=self.step_of(agent.job), at=self._clock(agent))

    def _clock(self, agent: Agent) -> float:
        return wall_clock() + self.clock_offsets.get(agent.node, 0.0)

    def _check_results(self, agent: Agent) -> tuple[CheckResult, ...]:
        offset = self.clock_offsets.get(agent.node, 0.0)
        detail = f"The node's clock is {offset:.1f} s ahead of the coordinator's; check its NTP." if offset else ""
        return (CheckResult(check=PreflightCheck.CLOCK, passed=not offset, seconds=0.0, detail=detail),)

    def kill_pod(self, name: str, namespace: str = "default") -> None:
        """Kill the agent of this pod."""
        self.cluster.change(PODS, namespace, name, end_worker(137, "Error", "Failed"))

    # --- messages to the operator

    def _leaders(self) -> list[OperatorProcess]:
        if self.cut_off:
            return []
        return [process for process in self.operators if process.runtime.serving.is_set() and process.reachable]

    def _exchange(self, process: OperatorProcess, agent: Agent) -> None:
        state = process.runtime.state
        try:
            self._follow_membership(agent, state.get_membership(agent.job_id))
            with contextlib.suppress(OldGenerationError):
                result = state.record_heartbeat(agent.job_id, self._heartbeat(agent))
                if result.is_urgent:
                    process.runtime.queue.put((agent.job_id.namespace, agent.job))
                elif result.has_progressed:
                    process.runtime.queue.put_after(
                        (agent.job_id.namespace, agent.job), process.runtime.settings.status_interval
                    )
        except NotRegisteredError:
            if state.register(agent.job_id, agent.registration):
                process.runtime.queue.put((agent.job_id.namespace, agent.job))

    def _follow_membership(self, agent: Agent, membership: Membership | None) -> None:
        if membership is None or agent.finished:
            return
        if agent.membership is None or membership.generation > agent.membership.generation:
            agent.membership = membership
            agent.enter(membership.generation)

    def _heartbeat(self, agent: Agent) -> HeartbeatRequest:
        if agent.verdict is not None:
            phase = WorkerPhase.FAILED
        elif agent.finished:
            phase = WorkerPhase.FINISHED
        elif agent.member:
            stopped = any(member.verdict for member in self.members(agent.job))
            phase = WorkerPhase.FAILED if stopped else WorkerPhase.TRAINING
        else:
            phase = WorkerPhase.STANDBY
        step, now = self.step_of(agent.job), self._clock(agent)
        return agent.build_heartbeat(
            phase,
            generation=agent.generation if agent.member else 0,
            progress=self._progress(step, now) if agent.member else None,
            checks=self._check_results(agent),
            ready=True,
        )

    def _progress(self, step: int, now: float) -> Progress:
        return Progress(step=step, total_steps=self.total_steps, updated=now, durable_step=step - step % 5)


_ALIVE = ("Pending", "Running")


def lose_node(workers: Workers, node: str) -> None:
    """Power off a node: its pod stays in the API server for a while, and its agent is silent."""
    workers.lost_nodes.add(node)
    set_readiness(workers.cluster, "Unknown", [node])


def set_readiness(cluster: FakeApiServer, status: str, nodes: Iterable[str] | None = None) -> None:
    """Write the condition that the node controller sets on nodes with silent kubelets; on all without `nodes`."""
    for node in cluster.names(NODES, "") if nodes is None else nodes:
        cluster.change(NODES, "", node, lambda raw: raw["status"]["conditions"][0].update(status=status))
