"""Combine a worker's pod, its agent and its node, and decide whether the silence of many workers is evidence.

A partition and the failure of a zone look alike from the operator. The node controller of Kubernetes stops evicting
when too much of a cluster is unreachable at once; so does this operator. Above the bound no worker is replaced because
of the control plane's reports (a node that is not ready, or deleted), nor because of its port if as many ports refuse.
Two signals still count: members that report and wait for the silent ones, because training does not progress anyway,
and a person or the cloud that declares a node out of service.

Guarantees:
- Silence is measured by the operator's clock, and only since agents have had time to find the coordinator.
- A worker whose pod is being deleted, has ended or whose node is gone never counts as alive.
- A worker has finished only if its agent reports that all of its ranks ended with code 0 by themselves. A pod that
  ended without that proof has failed, whatever its phase.
- One worker may always be replaced, so the failure of one node is answered at once, but none while the fleet is frozen:
  many jobs of one worker each must not be replaced one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.wire.messages import HeartbeatRequest, WorkerPhase
from trainium_operator.plan.model.actions import Action, DeletePod
from trainium_operator.plan.model.cached_property import cached_property
from trainium_operator.plan.model.observed import (
    SILENCE_REPORTED_SECONDS,
    AgentView,
    NodeReadiness,
    PodPhase,
    compute_max_bad_nodes,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from trainium_operator.plan.model.observed import NodeView, Observed, PodView


@dataclass(frozen=True, slots=True)
class Contact:
    """The verdict on silence and on refusing ports."""

    lost: str = ""
    """Why silence is no evidence now, as a sentence; empty if it is."""
    ports_count: bool = True
    """Whether a port that refuses is evidence that its agent has ended."""


def assess_contact(*, running: int, silent: int, refusing: int, frozen: str) -> Contact:
    """Return the verdict from counts of workers; `frozen` is why nodes may not be acted on (`FleetView`)."""
    max_silent = compute_max_bad_nodes(running)
    if silent == 0 or (silent <= max_silent and not frozen):
        return Contact()
    condition = f"while {frozen}" if frozen else "more than fail by chance"
    return Contact(
        lost=(
            f"{silent} of {running} workers are silent at once, {condition}: none of their pods is deleted unless "
            "workers that still report wait for them. If their machines are gone, delete their nodes or taint them "
            "node.kubernetes.io/out-of-service"
        ),
        ports_count=refusing <= max_silent,
    )


_JOINABLE = (
    WorkerPhase.JOINING,
    WorkerPhase.LOADING,
    WorkerPhase.TRAINING,
    WorkerPhase.YIELDED,
    WorkerPhase.FAILED,  # stopped because of another member: `has_given_up` excludes the one that failed
)
RECONNECT_SECONDS = 10.0
"""Time for agents to find a new coordinator; silence counts only after it."""
_SPARE_SILENCE_FACTOR = 10.0
_OUT_OF_SERVICE_TAINTS = frozenset({"node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/shutdown"})
"""Taints set by a person after a power loss, and by the cloud's controller for a stopped instance."""
_ENDED = (PodPhase.SUCCEEDED, PodPhase.FAILED)
_IN_CONTACT = Contact()
_MISSING_FRACTION = 0.1
"""Share of the members that may be missing when the others' messages end the wait, but always one."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker pod that exists in the API; without slots, because its properties are cached."""

    pod: PodView
    """Its phase is that of the worker container once that has terminated, because a sidecar may run on."""
    agent: AgentView | None
    node: NodeView | None
    """None if it is not scheduled, or if its node is gone."""
    silent_seconds: float
    """Seconds since its agent was last seen, without the time in which it had no coordinator."""
    timeout: float
    """Silence in seconds from which it matters."""
    contact: Contact = _IN_CONTACT
    """Whether signals of the control plane and of its port against it count."""
    holds_node: bool = True
    """Whether a container of its pod runs or may still start, so that its node and devices are not free."""
    finished: bool = False
    """Whether its ranks have finished the current generation and no other member needs them again."""

    @property
    def heartbeat(self) -> HeartbeatRequest | None:
        """The agent's newest heartbeat."""
        return self.agent.heartbeat if self.agent else None

    @cached_property
    def node_deleted(self) -> bool:
        """Whether the pod is bound to a node that no longer exists, or that was declared out of service.

        The cached nodes may be old: an agent that was seen a moment ago has a node.
        """
        if self.node is None:
            return bool(self.pod.node) and not self.contact.lost and not self.recently_seen
        return bool(self.node.taints) and any(taint.key in _OUT_OF_SERVICE_TAINTS for taint in self.node.taints)

    @property
    def recently_seen(self) -> bool:
        """Return whether its agent missed at most one heartbeat."""
        return self.agent is not None and self.silent_seconds < SILENCE_REPORTED_SECONDS

    @property
    def node_bad(self) -> bool:
        """Return whether its node was deleted, or its kubelet does not report or reports a problem."""
        return self.node_deleted or (
            self.node is not None and self.node.ready is not NodeReadiness.TRUE and not self.contact.lost
        )

    @property
    def silent(self) -> bool:
        """Return whether its agent should have been seen and was not."""
        return self.silent_seconds >= self.timeout

    @property
    def is_responsive(self) -> bool:
        """Return whether its agent reports from a healthy node, so that it can save before it leaves."""
        return not self.silent and not self.node_bad and self.agent is not None

    @property
    def is_refusing(self) -> bool:
        """Return whether its agent's port refuses connections."""
        return self.agent is not None and self.agent.refused_at is not None and self.contact.ports_count

    @property
    def ended(self) -> bool:
        """Return whether the worker container has terminated, even if other containers run."""
        return self.pod.phase in _ENDED

    @property
    def never_ran(self) -> bool:
        """Return whether its agent was never seen, not merely since the operator started a moment ago."""
        return self.agent is None and (self.silent or self.pod.phase is PodPhase.PENDING)

    @cached_property
    def alive(self) -> bool:
        """Return whether it is, or may become, a working worker."""
        if self.pod.deleting or self.ended or self.node_deleted:
            return False
        if self.agent is None:
            # Not seen yet does not mean gone: after an outage of the API server no node is ready.
            return not (self.node_bad and self.silent)
        stale = self.silent and (self.node_bad or (not self.contact.lost and self.silent_seconds >= self.stale_after))
        return not stale and not self.has_given_up

    @property
    def stale_after(self) -> float:
        """Return the silence after which a worker outside the membership is given up.

        Its node may seem healthy.
        """
        return max(60.0, _SPARE_SILENCE_FACTOR * self.timeout)

    @cached_property
    def has_given_up(self) -> bool:
        """Return whether its agent no longer restarts its processes, and it is the one that failed.

        The other members of a generation that was given up are Failed too, without a verdict.
        """
        heartbeat = self.heartbeat
        return heartbeat is not None and heartbeat.phase is WorkerPhase.FAILED and heartbeat.verdict is not None

    @cached_property
    def warm(self) -> bool:
        """Return whether it can join a generation now; a pod without a node cannot."""
        heartbeat = self.heartbeat
        if not self.alive or self.silent or self.node_bad or heartbeat is None:
            return False
        if self.pod.phase is not PodPhase.RUNNING or not self.pod.node:
            return False
        return heartbeat.phase in _JOINABLE or (heartbeat.phase is WorkerPhase.STANDBY and heartbeat.ready)


def build_workers(observed: Observed) -> dict[str, Worker]:
    """Return every worker by pod uid, in the order of their ordinals."""
    timeout = observed.job.spec.recovery.heartbeat_timeout_seconds
    expected_since, finished = _find_expected_since(observed), _find_finished(observed)
    has_witness = _has_witness(observed)
    workers: dict[str, Worker] = {}
    for pod in sorted(observed.pods, key=lambda view: view.ordinal):
        agent = observed.agents.get(pod.uid)
        seen_at = (
            agent.last_seen if agent is not None and agent.last_seen >= observed.coordinator_since else expected_since
        )
        node = observed.nodes.get(pod.node)
        if agent is None and has_witness and node is not None and node.ready is not NodeReadiness.TRUE:
            # Before this operator led, its node had stopped to report, and so had its agent.
            seen_at = min(seen_at, node.unready_since or seen_at)
        workers[pod.uid] = Worker(
            pod=_use_worker_phase(pod),
            holds_node=pod.phase not in _ENDED,
            finished=pod.uid in finished,
            agent=agent,
            node=node,
            silent_seconds=max(0.0, observed.now - seen_at),
            timeout=timeout,
        )
    return workers


def add_last_reports(observed: Observed) -> Observed:
    """Return the observation with the last heartbeats of agents that have ended, from their pods' status."""
    agents = dict(observed.agents)
    for pod in observed.pods:
        if pod.last_report is not None:
            ended_at = observed.now if pod.finished is None else min(pod.finished, observed.now)
            agent = agents.get(pod.uid) or AgentView(registration=None, last_seen=ended_at, first_seen=ended_at)
            agents[pod.uid] = replace(agent, heartbeat=pod.last_report)
    return replace(observed, agents=agents) if any(pod.last_report for pod in observed.pods) else observed


def _find_finished(observed: Observed) -> frozenset[str]:
    """Return the members that have finished the current generation, by pod uid.

    Ranks that finished an attempt that has failed elsewhere run again, and a trainer finishes with its last step.
    """
    if observed.membership is None:
        return frozenset()
    generation = observed.membership.generation
    heartbeats = {
        member: agent.heartbeat
        for member in observed.membership.members
        if (agent := observed.agents.get(member.pod_uid)) is not None
        and agent.heartbeat is not None
        and agent.heartbeat.generation == generation
    }
    newest_attempt = max((heartbeat.attempt for heartbeat in heartbeats.values()), default=0)
    needed = {rank for heartbeat in heartbeats.values() for rank in heartbeat.waiting_for}
    return frozenset(
        member.pod_uid
        for member, heartbeat in heartbeats.items()
        if heartbeat.phase is WorkerPhase.FINISHED
        and heartbeat.attempt == newest_attempt
        and member.node_rank not in needed
        and _has_last_step(observed, heartbeat)
    )


def _has_last_step(observed: Observed, heartbeat: HeartbeatRequest) -> bool:
    """Return whether the ranks have made the last step of the run, as far as they report their steps."""
    workload, progress = observed.job.spec.workload, heartbeat.progress
    if progress is None or not workload.reports_each_step:
        return not workload.reports_each_step
    total = progress.total_steps or workload.fixed_steps
    return max(progress.step, progress.resume_step or 0) >= total


def _has_witness(observed: Observed) -> bool:
    """Return whether a member reports to this operator, so that the others could too."""
    members = observed.membership.members if observed.membership is not None else ()
    agents = (observed.agents.get(member.pod_uid) for member in members)
    return any(agent is not None and agent.registration is not None and agent.heartbeat is not None for agent in agents)


def _use_worker_phase(pod: PodView) -> PodView:
    """Return the pod with the phase of its worker container, which other containers may hide."""
    if pod.exit_code is None and pod.phase is not PodPhase.SUCCEEDED:
        return pod
    has_finished = pod.last_report is not None and pod.last_report.phase is WorkerPhase.FINISHED
    return replace(pod, phase=PodPhase.SUCCEEDED if has_finished else PodPhase.FAILED)


def set_contact(workers: dict[str, Worker], contact: Contact) -> dict[str, Worker]:
    """Return the workers with the contact, which decides whether signals against silent ones count."""
    if not contact.lost:
        return workers
    return {uid: replace(worker, contact=contact) if worker.silent else worker for uid, worker in workers.items()}


def assess_workers_contact(workers: Collection[Worker], frozen: str) -> Contact:
    """Return whether the silence of many workers at once is evidence; see `Contact`."""
    if not any(worker.silent_seconds >= worker.timeout for worker in workers):
        return Contact()  # the usual case, even for thousands of workers
    running = _select_running(workers)
    return assess_contact(
        running=len(running),
        silent=sum(worker.silent for worker in running),
        refusing=sum(worker.is_refusing for worker in running),
        frozen=frozen,
    )


def has_lost_contact(workers: Collection[Worker], coordinator_since: float) -> bool:
    """Return whether a worker fell silent after contact with this coordinator, or an older one is silent.

    A new pod that has not registered yet does not count: the first pods of each job are silent too.
    """
    silent = [worker for worker in _select_running(workers) if worker.silent]
    return any(worker.agent is not None or worker.pod.created <= coordinator_since for worker in silent)


def _select_running(workers: Collection[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.pod.phase is PodPhase.RUNNING and not worker.pod.deleting]


def _find_expected_since(observed: Observed) -> float:
    """Return when an agent that was not seen yet should have been (Unix seconds).

    Agents need time to find a new coordinator, so silence counts only after it. That time ends early once nearly all
    members have sent a message, because the missing one could have sent one too.
    """
    latest_start = observed.coordinator_since + RECONNECT_SECONDS
    if observed.membership is None:
        return latest_start
    members = observed.membership.members
    agents = (observed.agents.get(member.pod_uid) for member in members)
    seen = [agent for agent in agents if agent is not None and agent.registration is not None]
    seen_at = [max(agent.first_seen, observed.coordinator_since) for agent in seen]
    if not seen_at or len(members) - len(seen_at) > max(1.0, _MISSING_FRACTION * len(members)):
        return latest_start
    return min(latest_start, max(seen_at))


def build_deletion(worker: Worker, *, force: bool = False) -> tuple[DeletePod, ...]:
    """Return the deletion of a pod, once; forced if its node cannot confirm an earlier deletion."""
    if force:
        return (DeletePod(worker.pod.name, worker.pod.uid, 0),)
    return () if worker.pod.deleting else (DeletePod(worker.pod.name, worker.pod.uid),)


def delete_ended_last(actions: tuple[Action, ...], workers: Iterable[Worker]) -> tuple[Action, ...]:
    """Move the deletions of pods that have ended behind all other actions.

    Such a pod holds no device, so nothing waits for its deletion: after the failure of a whole gang new pods come
    first.
    """
    ended_uids = {worker.pod.uid for worker in workers if not worker.holds_node}
    return tuple(sorted(actions, key=lambda action: isinstance(action, DeletePod) and action.uid in ended_uids))
