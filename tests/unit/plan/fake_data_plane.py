"""A fake data plane, which the operator does not control: nodes, kubelets, agents, training, and faults.

As on a real cluster:
- Each pod takes a whole node.
- Pods start and stop with a delay, and are deleted only when their node confirms it, or by force.
- Agents register, become warm and join the published generation; they make steps only when all members are present.
- Steps are kept in memory, and every tenth step is committed.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from tests.testing.operator.reporting_agent import ReportingAgent
from tests.testing.operator.wire_messages import member, registration
from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.spec.precompile import CompiledSize
from trainium_contract.status.conditions import Phase
from trainium_contract.status.results import ArtifactReport
from trainium_contract.wire.messages import (
    HeartbeatRequest,
    Membership,
    Progress,
    StepTiming,
    WorkerPhase,
)
from trainium_operator.plan.model.observed import AgentView, NodeReadiness, NodeView, PodPhase, PodView

START_SECONDS = 1.0
STOP_SECONDS = 2.0
NODE_GRACE_SECONDS = 40.0
VERDICT_SECONDS = 3.0
"""Delay after which an agent with a verdict that ends the job ends its pod."""
STEPS_PER_SECOND = 2


@dataclass
class Node:
    name: str
    up: bool = True
    """Runs its pods and confirms deletions."""
    down_since: float = 0.0
    partitioned: bool = False
    """Its agents cannot reach the operator; training and the kubelet continue."""
    slowness: float = 1.0
    """Factor by which a step's own work takes longer here."""
    view: NodeView | None = None
    """Further state at the API server: conditions, taints, a cordon; None while there is none."""


@dataclass
class Agent(ReportingAgent):
    """The agent of a pod, and how far its ranks are."""

    phase: WorkerPhase = WorkerPhase.STANDBY
    ready: bool = False
    step: int = 0
    stage: str = "Train"
    stage_since: float = 0.0
    waiting_for: tuple[int, ...] = ()


@dataclass
class Pod:
    view: PodView
    manifest: dict[str, Any]
    since: float
    """When it reached its present phase, or was asked to stop."""
    agent: Agent | None = None


class FakeDataPlane:
    """Nodes, pods and the training that runs in them."""

    def __init__(self, spec: TrainingJobSpec, nodes: int, name: str) -> None:
        self.now = NOW
        self.spec = spec
        self.status = TrainingJobStatus()
        self.name = name
        self.nodes = {f"node-{number}": Node(f"node-{number}") for number in range(nodes)}
        self.pods: dict[str, Pod] = {}
        self.membership: Membership | None = None
        self.published: Membership | None = None
        self.known_agents: dict[str, AgentView] = {}
        self.foreign_nodes: set[str] = set()
        """Nodes with pods of other users."""
        self.foreign_pending_pods = 0
        """Number of pods of other users that wait for a node."""
        self.nodes_wanted_by_gangs = 0
        """Number of nodes that a gang of another job waits for."""
        self.ignores_preferences = False
        """Whether the scheduler puts pods on avoided nodes first."""
        self.stepped: dict[str, tuple[int, int]] = {}
        """Generation and attempt of the last heartbeat with a higher step, by pod uid."""
        self.progressed = False
        """A heartbeat had nothing but progress since the last plan."""
        self.operator_down_until = 0.0
        self.best_step = 0
        self.committed = 0
        self.stages: tuple[tuple[str, float], ...] = ()
        """Stages after the last step, each with its length in seconds; a fault restarts the present one."""
        self.completed_stages = 0
        self.compiled: tuple[CompiledSize, ...] = ()
        """Graphs that every agent reports."""
        self.trained_at = 0.0
        """When the last step ended."""
        self.total = spec.trainer.steps if spec.trainer is not None else 100
        """Steps after which the ranks end."""
        self.reports_steps = True
        """Whether heartbeats have the steps, as of every trainer and some programs."""

    @property
    def operator_up(self) -> bool:
        return self.now >= self.operator_down_until

    def _node_view(self, node: Node) -> NodeView:
        lost = not node.up and self.now - node.down_since >= NODE_GRACE_SECONDS
        return replace(
            node.view or NodeView(name=node.name), ready=NodeReadiness.UNKNOWN if lost else NodeReadiness.TRUE
        )

    def _accepts_pods(self, node: Node) -> bool:
        view = self._node_view(node)
        tainted = any(taint.effect in ("NoSchedule", "NoExecute") for taint in view.taints)
        return view.ready is NodeReadiness.TRUE and view.schedulable and not view.deleting and not tainted

    def _schedule(self) -> None:
        """Bind pods, extras last; a pod without a node preempts an extra, which saves first."""
        active = [pod for pod in self.pods.values() if pod.view.phase not in (PodPhase.FAILED, PodPhase.SUCCEEDED)]
        occupied = {pod.view.node for pod in active if pod.view.node} | self.foreign_nodes
        extras = [pod for pod in active if pod.view.extra and pod.view.node and not pod.view.deleting]
        leaving = sum(pod.view.extra and pod.view.disrupted for pod in active)
        for _ in range(self.foreign_pending_pods):
            free = [name for name in self._free_nodes(occupied) if self.nodes[name].up]
            if free:
                self.foreign_pending_pods -= 1
                self.foreign_nodes.add(free[0])
                occupied.add(free[0])
            elif leaving:
                leaving -= 1
            elif extras:
                self._preempt(extras.pop())
        for pod in sorted(self.pods.values(), key=lambda pod: pod.view.extra):
            if pod.view.node:
                continue
            free = self._free_nodes(occupied | pod.view.avoided_nodes)
            free = [name for name in free if self._meets_affinity(pod, name)]
            avoided = set(self.status.avoided_nodes)
            free.sort(key=lambda name: ((name in avoided) is not self.ignores_preferences, name))
            if not free:
                pod.view = replace(pod.view, unschedulable_message="0 nodes are available")
                if leaving:
                    leaving -= 1
                elif extras and not pod.view.extra:
                    self._preempt(extras.pop())
                continue
            occupied.add(free[0])
            pod.view = replace(pod.view, node=free[0], scheduled=True, unschedulable_message="")
            pod.since = self.now

    def _free_nodes(self, occupied: Collection[str]) -> list[str]:
        return [name for name, node in self.nodes.items() if name not in occupied and self._accepts_pods(node)]

    def _meets_affinity(self, _pod: Pod, _node: str) -> bool:
        """Return whether the pod's terms on other pods allow the node; here nodes have no labels that they refer to."""
        return True

    def _preempt(self, extra: Pod) -> None:
        extra.view = replace(extra.view, deleting=True, disrupted=True)
        extra.since = self.now

    def _run_kubelets(self) -> None:
        for name, pod in list(self.pods.items()):
            node = self.nodes.get(pod.view.node)
            if pod.view.node and node is None:
                del self.pods[name]
            elif node is None or not node.up:
                continue
            elif pod.view.deleting and self.now - pod.since < STOP_SECONDS:
                if pod.agent is not None and pod.agent.phase is WorkerPhase.TRAINING:
                    self.committed = max(self.committed, pod.agent.step)  # on SIGTERM the ranks save and leave
            elif pod.view.deleting and self.now - pod.since >= STOP_SECONDS:
                if pod.agent is None:
                    del self.pods[name]
                else:  # the API server shows how it ended before it is deleted
                    pod.view = replace(pod.view, phase=PodPhase.FAILED, exit_code=75, reason="Error", ready=False)
                    pod.agent = None
            elif pod.view.phase is PodPhase.PENDING and self.now - pod.since >= START_SECONDS:
                view = replace(pod.view, phase=PodPhase.RUNNING, ready=True, ip=build.pod_ip(pod.view.ordinal))
                identity = member(view.name, pod_uid=view.uid, pod_ip=view.ip, node_name=view.node)
                pod.view, pod.agent = view, Agent(registration(identity, "default", self.name))
            elif pod.agent is not None and pod.agent.phase is WorkerPhase.FINISHED:
                report = self._heartbeat(pod, pod.agent)
                pod.view = replace(
                    pod.view, phase=PodPhase.SUCCEEDED, exit_code=0, ready=False, finished=self.now, last_report=report
                )
                pod.agent = None
            elif pod.agent is not None and (code := self._exit_code(pod.agent)) and not node.partitioned:
                pod.view = replace(pod.view, phase=PodPhase.FAILED, exit_code=code, reason="Error", ready=False)
                pod.agent = None

    def _exit_code(self, agent: Agent) -> int:
        """Return the exit code with which an agent ends its pod once it knows that the job failed; 0 while it runs."""
        verdict = agent.verdict
        if verdict is None or agent.phase is not WorkerPhase.FAILED or self.status.phase is not Phase.FAILED:
            return 0
        return verdict.exit_code if self.operator_up and self.now >= verdict.at + VERDICT_SECONDS else 0

    def _training_agents(self) -> list[tuple[Pod, Agent]]:
        return [
            (pod, pod.agent)
            for pod in self.pods.values()
            if pod.agent is not None and self.nodes.get(pod.view.node) is not None and self.nodes[pod.view.node].up
        ]

    def _run_agents(self) -> None:
        for pod, agent in self._training_agents():
            agent.ready = agent.verdict is None
            published = self.published if self.operator_up and not self.nodes[pod.view.node].partitioned else None
            if published is None or published.generation <= agent.generation:
                continue
            is_member = published.find_node_rank(pod.view.uid) is not None
            if is_member or agent.phase not in (WorkerPhase.STANDBY, WorkerPhase.FINISHED):
                agent.enter(published.generation)
                agent.phase = WorkerPhase.JOINING if is_member else WorkerPhase.STANDBY

    def _train(self, steps: int) -> None:
        """Let members of a generation join, load and step together, or wait for missing members."""
        for generation in {agent.generation for _, agent in self._training_agents()} - {0}:
            membership = next((m for m in (self.membership, self.published) if m and m.generation == generation), None)
            if membership is None:
                continue
            present = {
                pod.view.uid: agent
                for pod, agent in self._training_agents()
                if agent.generation == generation
                and not pod.view.deleting
                and membership.find_node_rank(pod.view.uid) is not None
            }
            missing = tuple(m.node_rank for m in membership.members if m.pod_uid not in present)
            self._advance(list(present.values()), missing, steps)

    def _advance(self, agents: list[Agent], missing: tuple[int, ...], steps: int) -> None:
        active = [agent for agent in agents if agent.phase not in (WorkerPhase.FAILED, WorkerPhase.FINISHED)]
        if missing:
            for agent in active:
                if agent.phase is WorkerPhase.TRAINING:
                    agent.attempt += 1
                agent.phase, agent.waiting_for = WorkerPhase.JOINING, missing
            return
        if len(active) < len(agents):
            return
        if all(agent.phase is WorkerPhase.JOINING for agent in agents):
            attempt = max(agent.attempt for agent in agents)
            resume = max([*(agent.step for agent in agents), self.committed])
            for agent in agents:
                agent.phase, agent.waiting_for, agent.attempt, agent.step = WorkerPhase.LOADING, (), attempt, resume
                agent.stage, agent.stage_since = "Train", 0.0
        elif all(agent.phase is WorkerPhase.LOADING for agent in agents):
            for agent in agents:
                agent.phase = WorkerPhase.TRAINING
        elif all(agent.phase is WorkerPhase.TRAINING for agent in agents):
            self._step(agents, steps)
        else:
            for agent in agents:
                agent.phase = WorkerPhase.JOINING

    def _step(self, agents: list[Agent], steps: int) -> None:
        total = self.total
        if agents[0].step >= total and self.stages:
            self._advance_stage(agents)
            return
        reached = min(total, agents[0].step + steps)
        self.trained_at = self.now
        self.best_step = max(self.best_step, reached)
        self.committed = max(self.committed, reached - reached % 10)
        for agent in agents:
            agent.step = reached
            agent.record_resumption(self.now, reached=reached)
            if reached == total and not self.stages:
                agent.phase = WorkerPhase.FINISHED

    def _advance_stage(self, agents: list[Agent]) -> None:
        """Advance the current stage by one tick."""
        if self.completed_stages < len(self.stages):
            name, seconds = self.stages[self.completed_stages]
            if agents[0].stage == name and self.now - agents[0].stage_since >= seconds:
                self.completed_stages += 1
        if self.completed_stages == len(self.stages):
            for agent in agents:
                agent.phase = WorkerPhase.FINISHED
            return
        name = self.stages[self.completed_stages][0]
        for agent in agents:
            if agent.stage == name:
                continue
            agent.stage, agent.stage_since = name, self.now
            agent.record_resumption(self.now)

    def _progress(self, agent: Agent) -> Progress:
        if not self.reports_steps:
            return Progress(step=0, hang_detection="Output")
        seconds = dict(self.stages).get(agent.stage)
        return Progress(
            step=agent.step,
            memory_step=agent.step,
            durable_step=self.committed,
            updated=self.now if agent.stage == "Train" else self.trained_at,
            stage=agent.stage,
            stage_progress=None if seconds is None else min(1.0, (self.now - agent.stage_since) / seconds),
            stage_since=agent.stage_since,
            artifacts=(ArtifactReport(kind="Model", path="/out", step=agent.step),) if self.completed_stages else (),
        )

    def _timing(self, pod: Pod) -> StepTiming | None:
        if all(node.slowness == 1.0 for node in self.nodes.values()):
            return None
        own = self.nodes[pod.view.node].slowness / STEPS_PER_SECOND
        slowest = max(node.slowness for node in self.nodes.values()) / STEPS_PER_SECOND
        return StepTiming(steps=10, step_seconds=slowest, own_seconds=own)

    def _heartbeat(self, pod: Pod, agent: Agent) -> HeartbeatRequest:
        return agent.build_heartbeat(
            agent.phase,
            progress=self._progress(agent) if agent.generation else None,
            waiting_for=agent.waiting_for,
            ready=agent.ready,
            timing=self._timing(pod) if agent.phase is WorkerPhase.TRAINING else None,
            compiled=self.compiled,
        )

    def _send_heartbeats(self) -> None:
        """Send a heartbeat of every agent that can reach the operator."""
        if not self.operator_up:
            return
        for pod, agent in self._training_agents():
            if self.nodes[pod.view.node].partitioned:
                continue
            uid = pod.view.uid
            old = self.known_agents.get(uid)
            stepped = bool(
                self.reports_steps
                and old
                and old.heartbeat
                and old.heartbeat.progress
                and agent.step > old.heartbeat.progress.step
            )
            if stepped:
                self.progressed = True
                self.stepped[uid] = (agent.generation, agent.attempt)
            self.known_agents[uid] = AgentView(
                registration=agent.registration,
                last_seen=self.now,
                first_seen=old.first_seen if old else self.now,
                heartbeat=self._heartbeat(pod, agent),
                progressed_at=self.now if stepped else old.progressed_at if old else None,
                step_seconds=1 / STEPS_PER_SECOND if stepped else old.step_seconds if old else None,
            )
