"""The operator in virtual time: the same `plan` and the same plan of the fleet; the simulated cluster obeys them.

Invariants: the status is what the operator would have written, nothing else is remembered; while the API server is
away nothing is planned. The interval of status writes that only contains progress is set beyond the end, so that a
job at rest is not planned again and again: ledger and deadlines follow from times and do not depend on it.
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
from trainium_simulator.virtual.timeline import EPOCH, EventClock
from trainium_simulator.virtual.training import State
from trainium_simulator.virtual.workforce import JOB, NAMESPACE, Workforce

if TYPE_CHECKING:
    from trainium_contract.status.interruptions import Interruption
    from trainium_contract.wire.messages import Membership
    from trainium_operator.plan.fleet.memory import Memory
    from trainium_simulator.virtual.nodes import Nodes
    from trainium_simulator.virtual.run import Run

_NEVER = 1e12
_EVENT_SECONDS = 0.02
"""From a change until the operator's watches have shown it and it is planned."""
_SETTINGS = PlanSettings(
    image="trainer:1",
    coordinator="coordinator.system.svc:8443",
    status_interval_seconds=_NEVER,
    extra_priority_class="idle-nodes",
)
_WRITES_ALL = replace(_SETTINGS, status_interval_seconds=0.001)
_CA = "-----BEGIN CERTIFICATE-----\n"
_DELAY_RATIO = 0.03
"""Share of the time without a change by which a simulated operator may look later than a real one."""

EntryKey = tuple[int, int, int, str]


def _quiet(spec: TrainingJobSpec) -> TrainingJobSpec:
    """Return the job without what only reports people, or drains, how old checkpoints are.

    Each look at it would cost a plan.
    """
    durable = spec.checkpoint.durable.replaced(every_seconds=None, every_steps=None)
    return spec.replaced(checkpoint=spec.checkpoint.replaced(storage=StorageSpec(), durable=durable))


class SimulatedOperator:
    """Plans and acts; `wake()` whenever something has changed."""

    def __init__(self, timeline: EventClock, nodes: Nodes, spec: TrainingJobSpec, *, reconnect_seconds: float) -> None:
        """`reconnect_seconds`: until agents have found an operator that is back."""
        self.status = TrainingJobStatus()
        self.incarnation = 0
        """Counts the jobs that a person had to create again."""
        self.entries: dict[EntryKey, Interruption] = {}
        """Every interruption that was ever in the history, as it was last seen."""
        self.membership: Membership | None = None
        self.workforce: Workforce
        self.run: Run
        self._timeline = timeline
        self._nodes = nodes
        self._spec = _quiet(spec)
        self._generation = 1
        self._reconnect_seconds = reconnect_seconds
        self._children: dict[str, str] = {}
        self._since = EPOCH - 3600.0
        self._published = 0
        self._woken = False
        self._check = 0
        self._news_at = 0.0
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
    def stopped(self) -> bool:
        """The job has ended."""
        return is_terminal(self.status)

    # --- when it looks ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something has changed."""
        self._news_at = self._timeline.now
        if self._up and not self._woken:
            self._woken = True
            self._timeline.after(_EVENT_SECONDS, self._reconcile)

    def nodes_changed(self) -> None:
        """Take note that a node has changed."""
        self._fleet_stale = True
        self.wake()

    def ticks(self, moments: tuple[float, ...], *, always: bool = False) -> None:
        """Look at these moments, where a status at rest still waits for figures of the steps."""
        for moment in moments:
            self._timeline.at(moment, partial(self._tick, always=always))

    def go_away(self) -> None:
        """Put the API server out of reach: the operator ends with its Lease."""
        self._up, self._woken = False, False
        self._check += 1

    def come_back(self) -> None:
        """Let a new process lead, which has seen no agent."""
        self._up, self._published, self._fleet_stale = True, 0, True
        self._since = self._timeline.now
        self._timeline.after(self._reconnect_seconds, self.wake)

    def ask_for(self, nodes: int) -> None:
        """Change `workers.replicas`, as a person does."""
        self._spec = self._spec.replaced(workers=self._spec.workers.replaced(replicas=nodes))
        self._generation += 1
        self.wake()

    def create_again(self) -> None:
        """Delete the job and create it again, as a person does; it finds its newest checkpoint."""
        self.incarnation += 1
        self.status, self.membership, self._published = TrainingJobStatus(), None, 0
        self._children.clear()
        self.wake()

    def observe(self) -> None:
        """Observe the agents once more: some report nothing from now on, and this was their last heartbeat."""
        if self._up:
            self._agents()

    def settle_accounts(self) -> None:
        """Update the ledger."""
        if not self.stopped:
            self._plan_once(_WRITES_ALL)

    def _tick(self, *, always: bool) -> None:
        if not self._up or self.stopped or self.run.training.state is not State.RUNNING:
            return
        if always or self._waits_for_figures():
            self._plan_once(_WRITES_ALL)

    def _waits_for_figures(self) -> bool:
        size = self.run.training.size
        settled = any(each.size == size and each.settled for each in self.status.goodput.sizes)
        unreported = any(not each.reported for each in self.status.stragglers)
        return not settled or unreported or self.run.training.slowness > 1.0

    # --- what it does -----------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        self._woken = False
        if not self._up or self.stopped:
            return
        requeue = self._plan_once(_SETTINGS)
        self._check += 1
        number = self._check
        if requeue is not None and requeue < _NEVER / 2:
            seconds = self._limited_requeue(requeue)
            self._timeline.after(seconds, lambda: self._reconcile() if number == self._check else None)

    def _limited_requeue(self, requeue: float) -> float:
        """Return when to look again: the operator polls while somebody is missing, and for hours that would cost much.

        The longer nothing has changed, the seldomer; the end of the wait for capacity is met exactly.
        """
        now, since = self._timeline.now, self.status.waiting_since
        seconds = max(requeue, _DELAY_RATIO * (now - self._news_at))
        deadline = None if since is None else since + self._spec.recovery.rescale_after_seconds - now
        return seconds if deadline is None or not 0 < deadline < seconds else max(requeue, deadline)

    def _plan_once(self, settings: PlanSettings) -> float | None:
        self._plan_fleet()
        result = plan(self._observe(), settings)
        if result.actions:
            self._news_at = self._timeline.now
        if result.status != self.status:
            self._news_at = self._timeline.now
            self._written = self._timeline.now
            self.status = result.status
            for entry in result.status.history:
                self.entries[self.incarnation, entry.generation, entry.attempt, entry.time] = entry
            if result.status.failures != self._failures:
                self._failures = result.status.failures
                self._fleet_stale = True
                self.wake()
        for action in result.actions:
            self._act(action)
        return result.requeue_after

    def _observe(self) -> Observed:
        now = self._timeline.now
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
            pods=tuple(pod.view for pod in self.workforce.pods.values()),
            nodes=self._nodes.views,
            agents=self._agents(),
            membership=self.membership,
            published=self._published,
            children=self._children,
            ca_bundle=_CA,
            coordinator_since=self._since,
            now=now,
            fleet=self._fleet,
            status_written=self._written,
        )

    def _agents(self) -> dict[str, AgentView]:
        return self.workforce.agents(self._timeline.now, self.run.report(), deaf_until=self._since)

    def _act(self, action: Action) -> None:
        match action:
            case ApplyObject(manifest):
                metadata = manifest["metadata"]
                key = f"{manifest['kind']}/{metadata['name']}"
                self._children[key] = metadata["annotations"][names.ANNOTATION_CONTENT_HASH]
            case PublishMembership(membership):
                self.membership, self._published = membership, membership.generation
                self.run.publish(membership)
            case CreatePod(manifest):
                self.workforce.create(manifest, self.status.avoided_nodes)
            case DeletePod(name, uid, grace):
                self.workforce.delete(name, uid, grace)
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
                carrying=frozenset(pod.view.node for pod in self.workforce.pods.values()) - {""},
                jobs=(records,),
                memory=self._memory,
                now=self._timeline.now,
                machines=self._nodes.deleted,
            )
        )
        self._memory, self._fleet = result.memory, result.view
        self._fleet_check += 1
        number = self._fleet_check
        if result.requeue_after is not None:
            self._timeline.after(
                max(1.0, result.requeue_after), lambda: self.nodes_changed() if number == self._fleet_check else None
            )
