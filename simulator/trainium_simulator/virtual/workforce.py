"""Simulated pods and their agents: scheduled, started, stopped, and what each agent states.

Invariants: a pod has a place; a pod on a node without power neither ends nor confirms a deletion; an agent
that cannot talk is seen for the last time when it could. What the ranks do is reported in `run.Run`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.messages import HeartbeatRequest, RegisterRequest, WorkerPhase
from trainium_contract.wire.worker_env import ANNOTATION_AVOIDED_NODES, ANNOTATION_TEMPLATE_HASH, LABEL_EXTRA
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import AgentView, PodPhase, PodView

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from trainium_contract.spec.precompile import CompiledSize
    from trainium_contract.wire.messages import ProcessFailure, Progress, RestartRecord, StepTiming
    from trainium_simulator.stages import StageTimes
    from trainium_simulator.virtual.nodes import Nodes, Slot
    from trainium_simulator.virtual.timeline import EventClock

NAMESPACE, JOB = "default", "simulated"
HALF_A_HEARTBEAT = 0.5
"""A node that loses its power was seen so long before, on the average."""
_NOWHERE = "0 nodes are available"


@dataclass(slots=True)
class Agent:
    """One worker's agent."""

    registration: RegisterRequest
    since: float
    """When it first called."""
    base: HeartbeatRequest
    phase: WorkerPhase = WorkerPhase.STANDBY
    generation: int = 0
    attempt: int = 0
    joining_since: float | None = None
    failures: tuple[ProcessFailure, ...] = ()
    restarts: tuple[RestartRecord, ...] = ()
    verdict: ProcessFailure | None = None
    waiting_for: tuple[int, ...] = ()
    silent_since: float | None = None
    """Its node has no power; None while it talks."""
    known: AgentView | None = None
    """View that the operator has since the last plan."""
    beat: HeartbeatRequest | None = None
    """Its last report, and the values that it was made of."""
    reported: tuple[object, ...] | None = None
    kept: tuple[object, ...] = ()

    def turn(self, phase: WorkerPhase, now: float) -> None:
        """Do something else from now on."""
        self.joining_since = now if phase is WorkerPhase.JOINING else None
        self.phase = phase


@dataclass(slots=True)
class Pod:
    """One worker pod."""

    view: PodView
    slot: Slot | None = None
    agent: Agent | None = None
    avoided: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Reports of the members' ranks."""

    progress: Progress | None
    leader: str
    """Pod of the first rank."""
    stepped: float | None
    """When the newest step ended."""
    step_seconds: float | None
    timings: Mapping[float, StepTiming]
    """Step times of a node, by how slow it is."""


class Workforce:
    """All pods of the job."""

    def __init__(
        self,
        timeline: EventClock,
        nodes: Nodes,
        stages: StageTimes,
        *,
        changed: Callable[[], None],
        compiled: tuple[CompiledSize, ...] = (),
    ) -> None:
        """Connect `changed()`, called for what watches would show, and `compiled`, which agents report."""
        self.pods: dict[str, Pod] = {}
        self._timeline = timeline
        self._nodes = nodes
        self._stages = stages
        self._changed = changed
        self._compiled = compiled
        self._taken: set[int] = set()
        self._uids = 0
        self._scheduling = False

    # --- what the operator asks for ---------------------------------------------------------------------------------

    def create(self, manifest: dict[str, Any], avoided: Collection[str]) -> None:
        """Create a pod; the scheduler puts it where it can."""
        metadata = manifest["metadata"]
        name, annotations = metadata["name"], metadata["annotations"]
        ordinal = names.ordinal_of(JOB, name)
        assert ordinal is not None
        assert name not in self.pods, f"{name} is used twice"
        self._uids += 1
        avoided_nodes = frozenset(annotations.get(ANNOTATION_AVOIDED_NODES, "").split(",")) - {""}
        view = PodView(
            name=name,
            uid=f"uid-{self._uids}",
            ordinal=ordinal,
            phase=PodPhase.PENDING,
            created=self._timeline.now,
            template_hash=annotations[ANNOTATION_TEMPLATE_HASH],
            avoided_nodes=avoided_nodes,
            extra=LABEL_EXTRA in metadata["labels"],
        )
        self.pods[name] = Pod(view, avoided=frozenset(avoided))
        self._schedule_soon()

    def delete(self, name: str, uid: str, grace: int | None) -> None:
        """Delete a pod; a node without power does not confirm it."""
        pod = self.pods.get(name)
        if pod is None or pod.view.uid != uid:
            return
        if grace == 0 or pod.slot is None or pod.view.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED):
            self._remove(pod)
        elif not pod.view.deleting:
            pod.view = replace(pod.view, deleting=True)
            self._timeline.after(self._stages.pod_stop_seconds, lambda: self._stopped(pod))

    def _stopped(self, pod: Pod) -> None:
        if self.pods.get(pod.view.name) is pod and pod.slot is not None and pod.slot.up:
            self._remove(pod)

    def _remove(self, pod: Pod) -> None:
        self.pods.pop(pod.view.name, None)
        if pod.slot is not None and pod.view.phase is not PodPhase.FAILED:
            self._taken.discard(pod.slot.number)
        pod.agent = None
        self._changed()
        self.schedule()

    # --- scheduling and starting ------------------------------------------------------------------------------------

    def _schedule_soon(self) -> None:
        """Once for all pods of a plan, which would each look through all nodes."""
        if not self._scheduling:
            self._scheduling = True
            self._timeline.after(0.0, self._schedule_now)

    def _schedule_now(self) -> None:
        self._scheduling = False
        self.schedule()

    def schedule(self) -> None:
        """Put waiting pods on free nodes, avoided ones last."""
        waiting = [pod for pod in self.pods.values() if pod.slot is None]
        if not waiting:
            return
        free = [slot for slot in self._nodes.slots if slot.number not in self._taken and slot.up and slot.takes_pods]
        for pod in sorted(waiting, key=lambda each: each.view.extra):
            avoided_nodes = pod.view.avoided_nodes
            open_to = [slot for slot in free if slot.name not in avoided_nodes] if avoided_nodes else free
            if not open_to:
                if not pod.view.unschedulable_message:
                    pod.view = replace(pod.view, unschedulable_message=_NOWHERE)
                    self._changed()
                    if not pod.view.extra:
                        self._preempt_extra(pod)
                continue
            avoided = pod.avoided
            slot = min(open_to, key=lambda each: each.name in avoided) if avoided else open_to[0]
            free.remove(slot)
            self._taken.add(slot.number)
            pod.slot = slot
            pod.view = replace(pod.view, node=slot.name, scheduled=True, unschedulable_message="")
            self._timeline.after(self._stages.pod_seconds + self._stages.warm_seconds, partial(self._started, pod))

    def _preempt_extra(self, pod: Pod) -> None:
        """Give the node of an extra to a pod that was asked for and finds no node."""
        for other in list(self.pods.values()):
            slot = other.slot
            if slot is not None and slot.takes_pods and slot.name not in pod.view.avoided_nodes and self.preempt(slot):
                return

    def preempt(self, slot: Slot) -> bool:
        """Take the place from an extra, which saves and leaves; False where none is there."""
        for pod in self.on(slot):
            if pod.view.extra and not pod.view.deleting:
                pod.view = replace(pod.view, disrupted=True)
                self.delete(pod.view.name, pod.view.uid, None)
                self._changed()
                return True
        return False

    def _started(self, pod: Pod) -> None:
        slot = pod.slot
        if self.pods.get(pod.view.name) is not pod or slot is None or not slot.up or pod.view.deleting:
            return
        number = pod.view.ordinal
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        pod.view = replace(pod.view, phase=PodPhase.RUNNING, ready=True, ip=address)
        registration = RegisterRequest(
            namespace=NAMESPACE,
            job=JOB,
            pod_name=pod.view.name,
            pod_uid=pod.view.uid,
            pod_ip=address,
            node_name=pod.view.node,
            rendezvous_port=29500,
            agent_version="1",
        )
        base = HeartbeatRequest(
            namespace=NAMESPACE,
            job=JOB,
            pod_name=pod.view.name,
            pod_uid=pod.view.uid,
            generation=0,
            phase=WorkerPhase.STANDBY,
            ready=True,
            compiled=self._compiled,
        )
        pod.agent = Agent(registration, self._timeline.now, base)
        self._changed()

    # --- what befalls nodes -----------------------------------------------------------------------------------------

    def on(self, slot: Slot) -> Iterator[Pod]:
        """Yield pods that are bound to this place and have not ended."""
        for pod in self.pods.values():
            if pod.slot is slot and pod.view.phase is not PodPhase.FAILED:
                yield pod

    def lose_power(self, slot: Slot) -> None:
        """End what runs there, which no agent reports."""
        for pod in self.on(slot):
            if pod.agent is not None and pod.agent.silent_since is None:
                pod.agent.silent_since = self._timeline.now - HALF_A_HEARTBEAT

    def power_returns(self, slot: Slot) -> None:
        """Let the node's kubelet find that what ran there has ended."""
        for pod in list(self.on(slot)):
            self._taken.discard(slot.number)
            if pod.view.deleting:
                self._remove(pod)
                continue
            pod.agent = None
            pod.view = replace(
                pod.view,
                phase=PodPhase.FAILED,
                ready=False,
                reason="ContainerStatusUnknown",
                exit_code=137,
                finished=self._timeline.now,
            )
        self._changed()
        self.schedule()

    def node_deleted(self, slot: Slot, node: str) -> None:
        """Remove the pods of a node object that was deleted, as the garbage collector does."""
        for pod in [each for each in self.pods.values() if each.view.node == node]:
            self._remove(pod)
        self._taken.discard(slot.number)
        self._changed()
        self.schedule()

    def clear(self) -> None:
        """Remove all pods with their job."""
        for pod in list(self.pods.values()):
            self._remove(pod)
        self._taken.clear()

    # --- what the coordinator receives -------------------------------------------------------------------------------

    def agents(self, now: float, ranks: Ranks, *, deaf_until: float) -> dict[str, AgentView]:
        """Return every agent by pod uid, as a coordinator that has listened since `deaf_until` knows it.

        Only the first rank reports each step; the others are known as they were when they last did something else.
        """
        known: dict[str, AgentView] = {}
        for pod in self.pods.values():
            agent = pod.agent
            if agent is None:
                continue
            if agent.silent_since is not None:
                if agent.known is not None and agent.silent_since > deaf_until:
                    known[pod.view.uid] = replace(agent.known, last_seen=agent.silent_since)
                continue
            member = agent.generation > 0 and ranks.progress is not None
            agent.known = AgentView(
                registration=agent.registration,
                last_seen=now,
                first_seen=max(agent.since, deaf_until),
                heartbeat=_heartbeat(pod, agent, ranks),
                progressed=ranks.stepped if member else None,
                step_seconds=ranks.step_seconds if member else None,
                joining_since=agent.joining_since,
            )
            known[pod.view.uid] = agent.known
        return known


def _heartbeat(pod: Pod, agent: Agent, ranks: Ranks) -> HeartbeatRequest:
    slowness = pod.slot.slowness if pod.slot is not None else 1.0
    timing = ranks.timings.get(slowness) if agent.phase is WorkerPhase.TRAINING else None
    reported = (agent.generation, agent.attempt, agent.phase, agent.waiting_for, id(timing))
    kept = (agent.failures, agent.restarts, agent.verdict)
    same = agent.reported is not None and reported == agent.reported and all(map(operator.is_, kept, agent.kept))
    leads = ranks.progress is not None and pod.view.uid == ranks.leader
    if agent.beat is None or not same or leads:
        progress = ranks.progress if agent.generation > 0 else None
        agent.reported, agent.kept = reported, kept
        agent.beat = agent.base.replaced(
            generation=agent.generation,
            attempt=agent.attempt,
            phase=agent.phase,
            progress=progress,
            failures=agent.failures,
            restarts=agent.restarts,
            verdict=agent.verdict,
            waiting_for=agent.waiting_for,
            timing=timing,
        )
    return agent.beat
