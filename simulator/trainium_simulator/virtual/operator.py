"""Run the operator's `plan` and `plan_fleet` in virtual time, and apply their actions to the simulated cluster.

Guarantees:
- The status is what the operator would have written; nothing else is kept between plans.
- Nothing is planned while the API server is unavailable.

The status is not written for progress alone, so that a job without faults costs no plans; ledger and deadlines are
computed from times and do not need these writes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.spec.storage import StorageSpec
from trainium_operator.plan.fleet.quarantine import FleetObserved, JobRecords, plan_fleet
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import (
    Action,
    ApplyObject,
    ApplyOptional,
    CreatePod,
    DeletePod,
    PublishMembership,
)
from trainium_operator.plan.model.conditions import is_terminal
from trainium_operator.plan.model.observed import AgentView, FleetView, JobView, Observed, PlanSettings
from trainium_operator.plan.plan import plan
from trainium_simulator.virtual.clock import EPOCH, EventClock
from trainium_simulator.virtual.training import State
from trainium_simulator.virtual.workers import JOB, NAMESPACE, WorkerPods

if TYPE_CHECKING:
    from trainium_contract.status.interruptions import Interruption
    from trainium_contract.wire.messages import Membership
    from trainium_operator.plan.fleet.memory import Memory
    from trainium_simulator.virtual.nodes import Nodes
    from trainium_simulator.virtual.ranks import TrainingRanks

_NEVER = 1e12
_EVENT_SECONDS = 0.02
"""From a change until its plan: the delay of watch and work queue."""
_SETTINGS = PlanSettings(
    image="trainer:1",
    coordinator="coordinator.system.svc:8443",
    status_interval_seconds=_NEVER,
    extra_priority_class="idle-nodes",
)
_LEDGER_SETTINGS = replace(_SETTINGS, status_interval_seconds=0.001)
_CA = "-----BEGIN CERTIFICATE-----\n"
_MAX_DELAY_RATIO = 0.03
"""A simulated requeue may be late by this share of the time without a change."""

InterruptionKey = tuple[int, int, int, str]


def _remove_checkpoint_ages(spec: TrainingJobSpec) -> TrainingJobSpec:
    """Return the spec without the rules that watch the age of checkpoints: each check would cost a plan."""
    durable = spec.checkpoint.durable.replaced(every_seconds=None, every_steps=None)
    return spec.replaced(checkpoint=spec.checkpoint.replaced(storage=StorageSpec(), durable=durable))


class SimulatedOperator:
    """Plans and applies actions; call `enqueue()` after each change."""

    def __init__(self, clock: EventClock, nodes: Nodes, spec: TrainingJobSpec, *, reconnect_seconds: float) -> None:
        """Start as the leader, connected; agents connect to a later leader within `reconnect_seconds`."""
        self.status = TrainingJobStatus()
        self.incarnation = 0
        """Number of times that a user recreated the job."""
        self.interruptions: dict[InterruptionKey, Interruption] = {}
        """The newest version of each interruption of the history, also of entries that the status no longer holds."""
        self.membership: Membership | None = None
        self.workers: WorkerPods
        self.ranks: TrainingRanks
        self._clock = clock
        self._nodes = nodes
        self._spec = _remove_checkpoint_ages(spec)
        self._generation = 1
        self._reconnect_seconds = reconnect_seconds
        self._children: dict[str, str] = {}
        self._leader_since = EPOCH - 3600.0
        self._published_generation = 0
        self._is_queued = False
        self._requeues = 0
        self._changed_at = 0.0
        self._status_written_at = 0.0
        self._is_connected = True
        self._memory: Memory | None = None
        self._fleet = FleetView()
        self._fleet_requeues = 0
        self._fleet_is_stale = True
        self._known_failures: object = None

    @property
    def is_connected(self) -> bool:
        """Whether it reaches the API server."""
        return self._is_connected

    @property
    def job_ended(self) -> bool:
        """Whether the job has ended."""
        return is_terminal(self.status)

    # --- queue ------------------------------------------------------------------------------------------------------

    def enqueue(self) -> None:
        """Schedule a reconcile after a change, unless one is scheduled."""
        self._changed_at = self._clock.now
        if self._is_connected and not self._is_queued:
            self._is_queued = True
            self._clock.call_later(_EVENT_SECONDS, self._reconcile)

    def enqueue_fleet(self) -> None:
        """Schedule a reconcile of fleet and job, after a change of a node."""
        self._fleet_is_stale = True
        self.enqueue()

    def requeue_at(self, times: tuple[float, ...], *, always: bool = False) -> None:
        """Reconcile at these times (Unix seconds) if step times are not measured yet, or in any case (`always`)."""
        for time in times:
            self._clock.call_at(time, partial(self._requeue, always=always))

    def disconnect(self) -> None:
        """Lose the API server, and with it the Lease."""
        self._is_connected, self._is_queued = False, False
        self._requeues += 1

    def reconnect(self) -> None:
        """Elect a new leader, which has seen no agent."""
        self._is_connected, self._published_generation, self._fleet_is_stale = True, 0, True
        self._leader_since = self._clock.now
        self._clock.call_later(self._reconnect_seconds, self.enqueue)

    def set_replicas(self, nodes: int) -> None:
        """Change `workers.replicas`, as a user does."""
        self._spec = self._spec.replaced(workers=self._spec.workers.replaced(replicas=nodes))
        self._generation += 1
        self.enqueue()

    def recreate_job(self) -> None:
        """Delete and recreate the job, as a user does; it resumes from its newest checkpoint."""
        self.incarnation += 1
        self.status, self.membership, self._published_generation = TrainingJobStatus(), None, 0
        self._children.clear()
        self.enqueue()

    def record_heartbeats(self) -> None:
        """Record the current heartbeats, the last ones of agents whose nodes then lose power."""
        if self._is_connected:
            self._build_agent_views()

    def update_ledger(self) -> None:
        """Plan once and write the status, so that its ledger includes the time until now."""
        if not self.job_ended:
            self._plan_once(_LEDGER_SETTINGS)

    def _requeue(self, *, always: bool) -> None:
        if not self._is_connected or self.job_ended or self.ranks.training.state is not State.RUNNING:
            return
        if always or self._is_missing_measurements():
            self._plan_once(_LEDGER_SETTINGS)

    def _is_missing_measurements(self) -> bool:
        size = self.ranks.training.size
        settled = any(entry.size == size and entry.settled for entry in self.status.goodput.sizes)
        unreported = any(not entry.reported for entry in self.status.stragglers)
        return not settled or unreported or self.ranks.training.slowness > 1.0

    # --- plans ------------------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        self._is_queued = False
        if not self._is_connected or self.job_ended:
            return
        requeue_after = self._plan_once(_SETTINGS)
        self._requeues += 1
        number = self._requeues
        if requeue_after is not None and requeue_after < _NEVER / 2:
            seconds = self._requeue_delay(requeue_after)
            self._clock.call_later(seconds, lambda: self._reconcile() if number == self._requeues else None)

    def _requeue_delay(self, requeue_after: float) -> float:
        """Return the seconds until the next reconcile.

        The operator polls while a member is missing. Here the interval grows with the time without a change, but never
        beyond the end of the wait for capacity.
        """
        now, since = self._clock.now, self.status.waiting_since
        seconds = max(requeue_after, _MAX_DELAY_RATIO * (now - self._changed_at))
        deadline = None if since is None else since + self._spec.recovery.rescale_after_seconds - now
        return seconds if deadline is None or not 0 < deadline < seconds else max(requeue_after, deadline)

    def _plan_once(self, settings: PlanSettings) -> float | None:
        self._plan_fleet()
        result = plan(self._observe(), settings)
        if result.actions:
            self._changed_at = self._clock.now
        if result.status != self.status:
            self._changed_at = self._clock.now
            self._status_written_at = self._clock.now
            self.status = result.status
            for entry in result.status.history:
                self.interruptions[self.incarnation, entry.generation, entry.attempt, entry.time] = entry
            if result.status.failures != self._known_failures:
                self._known_failures = result.status.failures
                self._fleet_is_stale = True
                self.enqueue()
        for action in result.actions:
            self._apply(action)
        return result.requeue_after

    def _observe(self) -> Observed:
        now = self._clock.now
        job = JobView(
            namespace=NAMESPACE,
            name=JOB,
            uid=f"job-{self.incarnation}",
            generation=self._generation,
            deleting=False,
            spec=self._spec,
            status=self.status,
            created=EPOCH,
        )
        return Observed(
            job=job,
            pods=tuple(pod.view for pod in self.workers.pods.values()),
            nodes=self._nodes.views,
            agents=self._build_agent_views(),
            membership=self.membership,
            published=self._published_generation,
            children=self._children,
            ca_bundle=_CA,
            coordinator_since=self._leader_since,
            now=now,
            fleet=self._fleet,
            status_written=self._status_written_at,
        )

    def _build_agent_views(self) -> dict[str, AgentView]:
        return self.workers.observe_agents(self._clock.now, self.ranks.build_reports(), leader_since=self._leader_since)

    def _apply(self, action: Action) -> None:
        match action:
            case ApplyObject(manifest) | ApplyOptional(manifest):
                metadata = manifest["metadata"]
                key = f"{manifest['kind']}/{metadata['name']}"
                self._children[key] = metadata["annotations"][names.ANNOTATION_CONTENT_HASH]
            case PublishMembership(membership):
                self.membership, self._published_generation = membership, membership.generation
                self.ranks.publish(membership)
            case CreatePod(manifest):
                self.workers.create_pod(manifest, self.status.avoided_nodes)
            case DeletePod(name, uid, grace):
                self.workers.delete_pod(name, uid, grace)
            case _:
                pass

    def _plan_fleet(self) -> None:
        if not self._fleet_is_stale:
            return
        self._fleet_is_stale = False
        quarantine = self._spec.health.quarantine
        records = JobRecords(
            uid=f"job-{self.incarnation}",
            name=f"{NAMESPACE}/{JOB}",
            failures=self.status.failures,
            takes_part=quarantine.enabled,
            debounce_seconds=float(quarantine.debounce_seconds),
        )
        result = plan_fleet(
            FleetObserved(
                nodes=self._nodes.views,
                worker_nodes=frozenset(pod.view.node for pod in self.workers.pods.values()) - {""},
                jobs=(records,),
                memory=self._memory,
                now=self._clock.now,
                deleted_provider_ids=self._nodes.deleted_provider_ids,
            )
        )
        self._memory, self._fleet = result.memory, result.view
        self._fleet_requeues += 1
        number = self._fleet_requeues
        if result.requeue_after is not None:
            self._clock.call_later(
                max(1.0, result.requeue_after), lambda: self.enqueue_fleet() if number == self._fleet_requeues else None
            )
