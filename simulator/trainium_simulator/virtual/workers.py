"""Simulate worker pods and their agents: scheduling, start, stop, and the heartbeats of each agent.

Guarantees:
- A pod keeps its slot; on a node without power it neither ends nor confirms a deletion.
- An agent without power keeps the time of its last heartbeat.

The ranks are simulated by `ranks.TrainingRanks`.
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
    from trainium_simulator.virtual.clock import EventClock
    from trainium_simulator.virtual.nodes import Nodes, Slot

NAMESPACE, JOB = "default", "simulated"
MEAN_HEARTBEAT_AGE_SECONDS = 0.5
"""Mean time between the last heartbeat of a node and the loss of its power."""
_UNSCHEDULABLE = "0 nodes are available"


@dataclass(slots=True)
class Agent:
    """One worker's agent."""

    registration: RegisterRequest
    registered_at: float
    """When it registered (Unix seconds)."""
    heartbeat_template: HeartbeatRequest
    """The fields that are the same in all its heartbeats."""
    phase: WorkerPhase = WorkerPhase.STANDBY
    generation: int = 0
    attempt: int = 0
    joining_since: float | None = None
    failures: tuple[ProcessFailure, ...] = ()
    restarts: tuple[RestartRecord, ...] = ()
    verdict: ProcessFailure | None = None
    waiting_for: tuple[int, ...] = ()
    silent_since: float | None = None
    """When it sent its last heartbeat (Unix seconds) if its node lost power; else None."""
    last_view: AgentView | None = None
    """The operator's view of it in the last plan."""
    last_heartbeat: HeartbeatRequest | None = None
    heartbeat_values: tuple[object, ...] | None = None
    """Values of the last heartbeat, compared by equality."""
    heartbeat_records: tuple[object, ...] = ()
    """Failures, restarts and verdict of the last heartbeat, compared by identity."""

    def set_phase(self, phase: WorkerPhase, now: float) -> None:
        """Enter a phase."""
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
class RankReports:
    """Reports of the members' ranks."""

    progress: Progress | None
    first_rank_pod: str
    """UID of the pod with node rank 0."""
    last_step_at: float | None
    """When the newest step ended (Unix seconds)."""
    step_seconds: float | None
    timings: Mapping[float, StepTiming]
    """Step times of a node by its slowness."""


class WorkerPods:
    """All pods of the job."""

    def __init__(
        self,
        clock: EventClock,
        nodes: Nodes,
        stages: StageTimes,
        *,
        on_change: Callable[[], None],
        compiled: tuple[CompiledSize, ...] = (),
    ) -> None:
        """Start without pods; `on_change()` is called where a watch would report, and agents report `compiled`."""
        self.pods: dict[str, Pod] = {}
        self._clock = clock
        self._nodes = nodes
        self._stages = stages
        self._on_change = on_change
        self._compiled = compiled
        self._used_slots: set[int] = set()
        self._uids = 0
        self._scheduling = False

    # --- requests of the operator ------------------------------------------------------------------------------------

    def create_pod(self, manifest: dict[str, Any], avoided: Collection[str]) -> None:
        """Create a pod from its manifest and schedule it, on nodes in `avoided` only if no other is free."""
        metadata = manifest["metadata"]
        name, annotations = metadata["name"], metadata["annotations"]
        ordinal = names.parse_ordinal(JOB, name)
        assert ordinal is not None
        assert name not in self.pods, f"{name} is used twice"
        self._uids += 1
        avoided_nodes = frozenset(annotations.get(ANNOTATION_AVOIDED_NODES, "").split(",")) - {""}
        view = PodView(
            name=name,
            uid=f"uid-{self._uids}",
            ordinal=ordinal,
            phase=PodPhase.PENDING,
            created=self._clock.now,
            template_hash=annotations[ANNOTATION_TEMPLATE_HASH],
            avoided_nodes=avoided_nodes,
            extra=LABEL_EXTRA in metadata["labels"],
        )
        self.pods[name] = Pod(view, avoided=frozenset(avoided))
        self._schedule_soon()

    def delete_pod(self, name: str, uid: str, grace: int | None) -> None:
        """Delete a pod within its grace period; at once for 0 seconds. A node without power never confirms it."""
        pod = self.pods.get(name)
        if pod is None or pod.view.uid != uid:
            return
        if grace == 0 or pod.slot is None or pod.view.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED):
            self._remove_pod(pod)
        elif not pod.view.deleting:
            pod.view = replace(pod.view, deleting=True)
            self._clock.call_later(self._stages.pod_stop_seconds, lambda: self._finish_deletion(pod))

    def _finish_deletion(self, pod: Pod) -> None:
        if self.pods.get(pod.view.name) is pod and pod.slot is not None and pod.slot.has_power:
            self._remove_pod(pod)

    def _remove_pod(self, pod: Pod) -> None:
        self.pods.pop(pod.view.name, None)
        if pod.slot is not None and pod.view.phase is not PodPhase.FAILED:
            self._used_slots.discard(pod.slot.number)
        pod.agent = None
        self._on_change()
        self.schedule()

    # --- scheduling and starting ------------------------------------------------------------------------------------

    def _schedule_soon(self) -> None:
        """Schedule all pods of a plan at once: each pass reads all nodes."""
        if not self._scheduling:
            self._scheduling = True
            self._clock.call_later(0.0, self._schedule_now)

    def _schedule_now(self) -> None:
        self._scheduling = False
        self.schedule()

    def schedule(self) -> None:
        """Bind pending pods to free nodes, avoided nodes last."""
        pending = [pod for pod in self.pods.values() if pod.slot is None]
        if not pending:
            return
        used = self._used_slots
        free = [
            slot for slot in self._nodes.slots if slot.number not in used and slot.has_power and slot.is_schedulable
        ]
        for pod in sorted(pending, key=lambda pending_pod: pending_pod.view.extra):
            avoided_nodes = pod.view.avoided_nodes
            candidates = [slot for slot in free if slot.name not in avoided_nodes] if avoided_nodes else free
            if not candidates:
                if not pod.view.unschedulable_message:
                    pod.view = replace(pod.view, unschedulable_message=_UNSCHEDULABLE)
                    self._on_change()
                    if not pod.view.extra:
                        self._preempt_for(pod)
                continue
            avoided = pod.avoided
            slot = min(candidates, key=lambda candidate: candidate.name in avoided) if avoided else candidates[0]
            free.remove(slot)
            self._used_slots.add(slot.number)
            pod.slot = slot
            pod.view = replace(pod.view, node=slot.name, scheduled=True, unschedulable_message="")
            delay = self._stages.pod_seconds + self._stages.warm_seconds
            self._clock.call_later(delay, partial(self._start_agent, pod))

    def _preempt_for(self, pod: Pod) -> None:
        """Preempt an extra pod for a requested pod that is unschedulable."""
        for other in list(self.pods.values()):
            slot = other.slot
            if slot is None or not slot.is_schedulable or slot.name in pod.view.avoided_nodes:
                continue
            if self.preempt_extra_pod(slot):
                return

    def preempt_extra_pod(self, slot: Slot) -> bool:
        """Preempt the extra pod on this slot, which saves and exits; return False without one."""
        for pod in self.list_pods_on(slot):
            if pod.view.extra and not pod.view.deleting:
                pod.view = replace(pod.view, disrupted=True)
                self.delete_pod(pod.view.name, pod.view.uid, None)
                self._on_change()
                return True
        return False

    def _start_agent(self, pod: Pod) -> None:
        slot = pod.slot
        if self.pods.get(pod.view.name) is not pod or slot is None or not slot.has_power or pod.view.deleting:
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
        pod.agent = Agent(registration, self._clock.now, base)
        self._on_change()

    # --- nodes ------------------------------------------------------------------------------------------------------

    def list_pods_on(self, slot: Slot) -> Iterator[Pod]:
        """Yield the pods that are bound to this slot and have not failed."""
        for pod in self.pods.values():
            if pod.slot is slot and pod.view.phase is not PodPhase.FAILED:
                yield pod

    def power_off(self, slot: Slot) -> None:
        """Silence the agents of the node that loses power; their last heartbeat is half a heartbeat old on average."""
        for pod in self.list_pods_on(slot):
            if pod.agent is not None and pod.agent.silent_since is None:
                pod.agent.silent_since = self._clock.now - MEAN_HEARTBEAT_AGE_SECONDS

    def power_on(self, slot: Slot) -> None:
        """Report all pods of the node as failed, as its kubelet does after a reboot."""
        for pod in list(self.list_pods_on(slot)):
            self._used_slots.discard(slot.number)
            if pod.view.deleting:
                self._remove_pod(pod)
                continue
            pod.agent = None
            pod.view = replace(
                pod.view,
                phase=PodPhase.FAILED,
                ready=False,
                reason="ContainerStatusUnknown",
                exit_code=137,
                finished=self._clock.now,
            )
        self._on_change()
        self.schedule()

    def delete_pods_of_node(self, slot: Slot, node: str) -> None:
        """Remove the pods of a node object that was deleted, as the garbage collector does."""
        for pod in [bound for bound in self.pods.values() if bound.view.node == node]:
            self._remove_pod(pod)
        self._used_slots.discard(slot.number)
        self._on_change()
        self.schedule()

    def delete_all(self) -> None:
        """Remove all pods with their job."""
        for pod in list(self.pods.values()):
            self._remove_pod(pod)
        self._used_slots.clear()

    # --- heartbeats --------------------------------------------------------------------------------------------------

    def observe_agents(self, now: float, reports: RankReports, *, leader_since: float) -> dict[str, AgentView]:
        """Return the view of each agent by pod UID, for an operator that leads since `leader_since` (Unix seconds).

        Only the first rank reports each step; the others report their changes.
        """
        views: dict[str, AgentView] = {}
        for pod in self.pods.values():
            agent = pod.agent
            if agent is None:
                continue
            if agent.silent_since is not None:
                if agent.last_view is not None and agent.silent_since > leader_since:
                    views[pod.view.uid] = replace(agent.last_view, last_seen=agent.silent_since)
                continue
            is_member = agent.generation > 0 and reports.progress is not None
            agent.last_view = AgentView(
                registration=agent.registration,
                last_seen=now,
                first_seen=max(agent.registered_at, leader_since),
                heartbeat=_build_heartbeat(pod, agent, reports),
                progressed_at=reports.last_step_at if is_member else None,
                step_seconds=reports.step_seconds if is_member else None,
                joining_since=agent.joining_since,
            )
            views[pod.view.uid] = agent.last_view
        return views


def _build_heartbeat(pod: Pod, agent: Agent, reports: RankReports) -> HeartbeatRequest:
    slowness = pod.slot.slowness if pod.slot is not None else 1.0
    timing = reports.timings.get(slowness) if agent.phase is WorkerPhase.TRAINING else None
    values = (agent.generation, agent.attempt, agent.phase, agent.waiting_for, id(timing))
    records = (agent.failures, agent.restarts, agent.verdict)
    is_unchanged = values == agent.heartbeat_values and all(map(operator.is_, records, agent.heartbeat_records))
    is_first_rank = reports.progress is not None and pod.view.uid == reports.first_rank_pod
    if agent.last_heartbeat is None or not is_unchanged or is_first_rank:
        progress = reports.progress if agent.generation > 0 else None
        agent.heartbeat_values, agent.heartbeat_records = values, records
        agent.last_heartbeat = agent.heartbeat_template.replaced(
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
    return agent.last_heartbeat
