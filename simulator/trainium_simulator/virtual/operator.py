"""Run the operator's `plan` and `plan_fleet` in virtual time, and apply their actions to the simulated cluster.

Guarantees:
- The status is what the operator would have written; nothing else is kept between plans.
- Nothing is planned while the API server is unavailable.

Status writes for progress alone are switched off, so that an idle job costs no plans: ledger and deadlines follow from
times and do not depend on them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.spec.storage import StorageSpec
from trainium_operator.plan.fleet.quarantine import FleetObserved, JobRecords, plan_fleet
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import Action, ApplyObject, CreatePod, DeletePod, PublishMembership
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
"""Delay of watch and work queue from a change until its plan."""
_SETTINGS = PlanSettings(
    image="trainer:1",
    coordinator="coordinator.system.svc:8443",
    status_interval_seconds=_NEVER,
    extra_priority_class="idle-nodes",
)
_WRITES_ALL = replace(_SETTINGS, status_interval_seconds=0.001)
_CA = "-----BEGIN CERTIFICATE-----\n"
_DELAY_RATIO = 0.03
"""A simulated requeue may be late by this share of the time without a change."""

EntryKey = tuple[int, int, int, str]


def _without_checkpoint_ages(spec: TrainingJobSpec) -> TrainingJobSpec:
    """Return the spec without the rules that watch the age of checkpoints: each check would cost a plan."""
    durable = spec.checkpoint.durable.replaced(every_seconds=None, every_steps=None)
    return spec.replaced(checkpoint=spec.checkpoint.replaced(storage=StorageSpec(), durable=durable))


class SimulatedOperator:
    """Plans and applies actions; call `enqueue()` after each change."""

    def __init__(self, clock: EventClock, nodes: Nodes, spec: TrainingJobSpec, *, reconnect_seconds: float) -> None:
        """Start idle; `reconnect_seconds`: until agents have connected to a new leader."""
        self.status = TrainingJobStatus()
        self.incarnation = 0
        """Number of times that a user recreated the job."""
        self.entries: dict[EntryKey, Interruption] = {}
        """The newest version of each interruption that was in the history."""
        self.membership: Membership | None = None
        self.workers: WorkerPods
        self.ranks: TrainingRanks
        self._clock = clock
        self._nodes = nodes
        self._spec = _without_checkpoint_ages(spec)
        self._generation = 1
        self._reconnect_seconds = reconnect_seconds
        self._children: dict[str, str] = {}
        self._listening_since = EPOCH - 3600.0
        self._published = 0
        self._queued = False
        self._check = 0
        self._changed_at = 0.0
        self._written = 0.0
        self._up = True
        self._memory: Memory | None = None
        self._fleet = FleetView()
        self._fleet_check = 0
        self._fleet_stale = True
        self._failures: object = None

    @property
    def up(self) -> bool:
        """Whether it reaches the API server."""
        return self._up

    @property
    def job_ended(self) -> bool:
        """Whether the job has ended."""
        return is_terminal(self.status)

    # --- queue ------------------------------------------------------------------------------------------------------

    def enqueue(self) -> None:
        """Reconcile soon, after a change."""
        self._changed_at = self._clock.now
        if self._up and not self._queued:
            self._queued = True
            self._clock.after(_EVENT_SECONDS, self._reconcile)

    def nodes_changed(self) -> None:
        """Reconcile fleet and job, after a change of a node."""
        self._fleet_stale = True
        self.enqueue()

    def requeue_at(self, moments: tuple[float, ...], *, always: bool = False) -> None:
        """Reconcile at these moments if figures of the steps are missing, or in any case (`always`)."""
        for moment in moments:
            self._clock.at(moment, partial(self._requeue, always=always))

    def disconnect(self) -> None:
        """Lose the API server, and with it the Lease."""
        self._up, self._queued = False, False
        self._check += 1

    def reconnect(self) -> None:
        """Elect a new leader, which has seen no agent."""
        self._up, self._published, self._fleet_stale = True, 0, True
        self._listening_since = self._clock.now
        self._clock.after(self._reconnect_seconds, self.enqueue)

    def set_replicas(self, nodes: int) -> None:
        """Change `workers.replicas`, as a user does."""
        self._spec = self._spec.replaced(workers=self._spec.workers.replaced(replicas=nodes))
        self._generation += 1
        self.enqueue()

    def recreate_job(self) -> None:
        """Delete and recreate the job, as a user does; it resumes from its newest checkpoint."""
        self.incarnation += 1
        self.status, self.membership, self._published = TrainingJobStatus(), None, 0
        self._children.clear()
        self.enqueue()

    def observe(self) -> None:
        """Record the last heartbeats of agents that report nothing from now on."""
        if self._up:
            self._agents()

    def update_ledger(self) -> None:
        """Update the ledger to the present time."""
        if not self.job_ended:
            self._plan_once(_WRITES_ALL)

    def _requeue(self, *, always: bool) -> None:
        if not self._up or self.job_ended or self.ranks.training.state is not State.RUNNING:
            return
        if always or self._waits_for_figures():
            self._plan_once(_WRITES_ALL)

    def _waits_for_figures(self) -> bool:
        size = self.ranks.training.size
        settled = any(each.size == size and each.settled for each in self.status.goodput.sizes)
        unreported = any(not each.reported for each in self.status.stragglers)
        return not settled or unreported or self.ranks.training.slowness > 1.0

    # --- plans ------------------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        self._queued = False
        if not self._up or self.job_ended:
            return
        requeue = self._plan_once(_SETTINGS)
        self._check += 1
        number = self._check
        if requeue is not None and requeue < _NEVER / 2:
            seconds = self._limited_requeue(requeue)
            self._clock.after(seconds, lambda: self._reconcile() if number == self._check else None)

    def _limited_requeue(self, requeue: float) -> float:
        """Return the seconds until the next reconcile.

        The operator polls while a member is missing; the longer nothing changes, the longer the interval here. The end
        of the wait for capacity is met exactly.
        """
        now, since = self._clock.now, self.status.waiting_since
        seconds = max(requeue, _DELAY_RATIO * (now - self._changed_at))
        deadline = None if since is None else since + self._spec.recovery.rescale_after_seconds - now
        return seconds if deadline is None or not 0 < deadline < seconds else max(requeue, deadline)

    def _plan_once(self, settings: PlanSettings) -> float | None:
        self._plan_fleet()
        result = plan(self._observe(), settings)
        if result.actions:
            self._changed_at = self._clock.now
        if result.status != self.status:
            self._changed_at = self._clock.now
            self._written = self._clock.now
            self.status = result.status
            for entry in result.status.history:
                self.entries[self.incarnation, entry.generation, entry.attempt, entry.time] = entry
            if result.status.failures != self._failures:
                self._failures = result.status.failures
                self._fleet_stale = True
                self.enqueue()
        for action in result.actions:
            self._act(action)
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
            agents=self._agents(),
            membership=self.membership,
            published=self._published,
            children=self._children,
            ca_bundle=_CA,
            coordinator_since=self._listening_since,
            now=now,
            fleet=self._fleet,
            status_written=self._written,
        )

    def _agents(self) -> dict[str, AgentView]:
        return self.workers.agents(self._clock.now, self.ranks.report(), listening_since=self._listening_since)

    def _act(self, action: Action) -> None:
        match action:
            case ApplyObject(manifest):
                metadata = manifest["metadata"]
                key = f"{manifest['kind']}/{metadata['name']}"
                self._children[key] = metadata["annotations"][names.ANNOTATION_CONTENT_HASH]
            case PublishMembership(membership):
                self.membership, self._published = membership, membership.generation
                self.ranks.publish(membership)
            case CreatePod(manifest):
                self.workers.create(manifest, self.status.avoided_nodes)
            case DeletePod(name, uid, grace):
                self.workers.delete(name, uid, grace)
            case _:
                pass

    def _plan_fleet(self) -> None:
        if not self._fleet_stale:
            return
        self._fleet_stale = False
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
                carrying=frozenset(pod.view.node for pod in self.workers.pods.values()) - {""},
                jobs=(records,),
                memory=self._memory,
                now=self._clock.now,
                machines=self._nodes.deleted,
            )
        )
        self._memory, self._fleet = result.memory, result.view
        self._fleet_check += 1
        number = self._fleet_check
        if result.requeue_after is not None:
            self._clock.after(
                max(1.0, result.requeue_after), lambda: self.nodes_changed() if number == self._fleet_check else None
            )
