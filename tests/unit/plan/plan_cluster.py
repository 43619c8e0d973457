"""A fake cluster in virtual time that executes plans, with an operator that can crash after any write.

A restarted operator knows no agents; a write whose precondition does not hold fails, as at the API server.
"""

from dataclasses import replace
from typing import Any, Self

from tests.testing.operator.job_views import job_view
from tests.unit.plan.data_plane_faults import FaultyDataPlane
from tests.unit.plan.fake_data_plane import STEPS_PER_SECOND, Pod
from tests.unit.plan.plan_builders import CA, NOW, SETTINGS
from trainium_contract.faults.classify import get_budget
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import Interruption, RecoveryResponse
from trainium_operator.cluster.cache.views import parse_worker_pod
from trainium_operator.plan.model import actions, devices, names, observed
from trainium_operator.plan.plan import plan
from trainium_operator.plan.view.size import SizeDecision, decide_size

_SETTINGS = replace(
    SETTINGS, worker_ingress=observed.WorkerIngress(operator_namespace="system", operator_labels={"a": "b"})
)


class ConflictError(Exception):
    """A precondition of a write did not hold."""


class FakeCluster(FaultyDataPlane):
    """One TrainingJob, its nodes, and an operator that can crash after any write."""

    def __init__(self, spec: TrainingJobSpec, nodes: int, name: str = "demo") -> None:
        super().__init__(spec, nodes, name)
        self.generation = 1
        self.children: dict[str, str] = {}
        self.operator_since = self.now
        self.fleet = observed.FleetView()
        self.device_taints: dict[str, devices.DeviceTaint] = {}
        """By pod uid, of a device that it holds."""
        self.requeue_at: float | None = None
        self.dirty = True
        self.last_reconciled_state: Any = None
        """State of the operator's watches and of the agents at the end of the last tick."""
        self.names_used: set[str] = set()
        self.first_nodes = tuple(self.nodes)
        self.published_members: dict[int, dict[str, int]] = {}
        """By generation: rank by pod uid."""
        self.uids = 0
        self.plans = 0
        self._decided = (self.spec, decide_size(self.spec))
        """The newest spec whose size was decided, and that size; each tick needs it."""

    def clone(self) -> Self:
        """Return an independent copy of the current state."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.nodes = {name: replace(node) for name, node in self.nodes.items()}
        copy.pods = {name: _copy_pod(pod) for name, pod in self.pods.items()}
        copy.known_agents, copy.children, copy.stepped = (
            dict(self.known_agents),
            dict(self.children),
            dict(self.stepped),
        )
        copy.foreign_nodes, copy.foreign_pending_pods = set(self.foreign_nodes), self.foreign_pending_pods
        copy.device_taints = dict(self.device_taints)
        copy.names_used, copy.published_members = set(self.names_used), dict(self.published_members)
        return copy

    @property
    def decided_size(self) -> SizeDecision:
        """The size that the spec asks for."""
        if self._decided[0] is not self.spec:
            self._decided = (self.spec, decide_size(self.spec))
        return self._decided[1]

    @property
    def size(self) -> int:
        return self.status.membership.size

    def member_names(self) -> list[str]:
        """Return the pods of the members, by rank."""
        assert self.membership is not None
        return [member.pod_name for member in self.membership.members]

    def node_of_rank(self, rank: int) -> str:
        return self.members()[rank].view.node

    @property
    def newest_entry(self) -> Interruption:
        """The newest interruption of the history."""
        return self.status.history[-1]

    def responses(self) -> list[RecoveryResponse]:
        return [entry.response for entry in self.status.history]

    # --- the operator -------------------------------------------------------------------------------------------

    def observe(self) -> observed.Observed:
        job = job_view(self.spec, self.status, name=self.name, generation=self.generation, created=NOW)
        return observed.Observed(
            job=job,
            pods=tuple(pod.view for pod in self.pods.values()),
            nodes={name: self._node_view(node) for name, node in self.nodes.items()},
            agents=dict(self.known_agents),
            membership=self.membership,
            published=self.published.generation if self.published and self.operator_up else 0,
            children=dict(self.children),
            ca_bundle=CA,
            coordinator_since=self.operator_since,
            now=self.now,
            fleet=self.fleet,
            nodes_wanted_by_gangs=self.nodes_wanted_by_gangs,
            policies_listed=True,
            devices=devices.DevicesView(taints={uid: (taint,) for uid, taint in self.device_taints.items()}),
        )

    def reconcile(self, crash_after: int | None = None) -> actions.Plan | None:
        """Plan and execute once; crash the operator after `crash_after` writes."""
        if not self.operator_up:
            return None
        self.plans += 1
        result = plan(self.observe(), _SETTINGS)
        status: list[Any] = [] if result.status == self.status else [result.status]
        for done, write in enumerate([*status, *result.actions]):
            if crash_after is not None and done >= crash_after:
                self.crash_operator()
                return None
            self._write(write)
        self.requeue_at = None if result.requeue_after is None else self.now + result.requeue_after
        return result

    def pending_writes(self) -> int:
        """Count the writes that the next plan asks for."""
        result = plan(self.observe(), _SETTINGS)
        return len(result.actions) + (result.status != self.status)

    def settle(self) -> None:
        """Reconcile up to four times, and assert that a further plan has no actions."""
        for _ in range(4):
            before = self.status
            result = self.reconcile()
            if result is None or result.requeue_after is None or result.requeue_after >= 0.1:
                break
        if result is not None and (result.actions or result.status != before):
            again = plan(self.observe(), _SETTINGS)
            assert again.actions == (), "the plan does not converge"
            assert again.events == (), "an event is reported twice"
            assert again.status == self.status

    def crash_operator(self, seconds: float = 1.0) -> None:
        self.operator_down_until = self.now + seconds
        self.operator_since = self.now + seconds
        self.known_agents, self.stepped = {}, {}
        self.published = None
        self.requeue_at = None
        self.dirty = True

    def _write(self, write: TrainingJobStatus | actions.Action) -> None:
        match write:
            case TrainingJobStatus():
                self._check_records(write)
                self.status = TrainingJobStatus.model_validate_json(write.model_dump_json(by_alias=True))
            case actions.ApplyObject(manifest) | actions.ApplyOptional(manifest):
                metadata = manifest["metadata"]
                key = f"{manifest['kind']}/{metadata['name']}"
                self.children[key] = metadata["annotations"][names.ANNOTATION_CONTENT_HASH]
            case actions.PublishMembership():
                self._publish(write)
            case actions.CreatePod(manifest):
                self._create(manifest)
            case actions.DeletePod(name, uid, grace):
                self._delete(name, uid, grace)

    def _check_records(self, status: TrainingJobStatus) -> None:
        for record in set(status.failures) - set(self.status.failures):
            pod = self.pods.get(record.pod)
            was_asked_to_stop = pod is not None and pod.view.deleting and pod.view.exit_code in (None, 75)
            agent_works = pod is not None and pod.agent is not None and pod.agent.verdict is None
            # A process that crashed before its pod was asked to stop did crash.
            news = [entry for entry in status.history if entry not in self.status.history]
            crashed = any(entry.response is RecoveryResponse.IN_PLACE and entry.pod == record.pod for entry in news)
            if was_asked_to_stop and not crashed and (agent_works or (pod is not None and pod.agent is None)):
                problem = f"{record.pod} was asked to stop, and counts as {record.cause}"
                assert get_budget(record.cause) is None or self._has_bad_node(pod), problem

    def _has_bad_node(self, pod: Pod | None) -> bool:
        node = self.nodes.get(pod.view.node) if pod is not None else None
        return node is None or not node.up or node.partitioned

    def _publish(self, write: actions.PublishMembership) -> None:
        recorded = self.membership.generation if self.membership else 0
        if self.membership != write.membership and recorded != write.replaces:
            raise ConflictError
        members = {member.pod_uid: member.node_rank for member in write.membership.members}
        before = self.published_members.setdefault(write.membership.generation, members)
        assert before == members, "one generation has two memberships"
        assert write.membership.generation >= recorded, "a generation decreased"
        size, size_before = len(members), len(self.membership.members) if self.membership else 0
        assert size >= min(size_before or size, self.decided_size.floor), f"{size} nodes are fewer than it may have"
        self.membership = self.published = write.membership

    def _create(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        assert name not in self.names_used, f"{name} is used twice"
        self.names_used.add(name)
        self.uids += 1
        view = parse_worker_pod({**manifest, "metadata": {**manifest["metadata"], "uid": f"uid-{self.uids}"}})
        self.pods[name] = Pod(replace(view, created=self.now), manifest, self.now)

    def _delete(self, name: str, uid: str, grace: int | None) -> None:
        pod = self.pods.get(name)
        if pod is None or pod.view.uid != uid:
            return
        if grace == 0 or not pod.view.node or pod.view.phase in (observed.PodPhase.FAILED, observed.PodPhase.SUCCEEDED):
            del self.pods[name]
        elif not pod.view.deleting:
            pod.view = replace(pod.view, deleting=True)
            pod.since = self.now

    def taint_device(self, name: str, effect: str, *, evicts: bool) -> bool:
        """Taint a device of the pod, and evict the pod if the effect demands it."""
        pod = self.pods.get(name)
        if pod is None or not pod.view.node:
            return False
        self.device_taints[pod.view.uid] = devices.DeviceTaint(f"{pod.view.node}/d3", "neuron.aws.com/x", effect)
        if evicts and effect == "NoExecute":
            pod.view = replace(pod.view, disrupted=True, disruption="DeletionByDeviceTaintManager")
            self._delete(name, pod.view.uid, None)
        self.dirty = True
        return True

    def run(self, seconds: float, tick: float = 1.0) -> None:
        """Advance time; the operator reconciles on every change and at its requeue times."""
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            self._schedule()
            self._run_kubelets()
            self._run_agents()
            self._train(int(STEPS_PER_SECOND * tick))
            self._send_heartbeats()
            if self.progressed:
                by = self.now + SETTINGS.status_interval_seconds
                self.requeue_at = by if self.requeue_at is None else min(by, self.requeue_at)
                self.progressed = False
            requeued = self.requeue_at is not None and self.now >= self.requeue_at
            visible = self._comparable_state()
            if self.operator_up and (self.dirty or requeued or visible != self.last_reconciled_state):
                self.dirty = False
                self.settle()
                visible = self._comparable_state()
            self.last_reconciled_state = visible
            self.check()

    def check(self) -> None:
        """Assert the invariants of every state."""
        status, job = self.status, self.spec
        requested = (status.desired or job.workers.replicas) - status.idle_nodes.taken
        limit = requested + status.idle_nodes.wanted + self.decided_size.reserve + job.workers.spares
        live = [pod for pod in self.pods.values() if self._alive(pod)]
        members = {member.pod_uid for member in self.membership.members} if self.membership else set()
        extra = sum(pod.view.uid in members or pod.view.ip != "" for pod in live)
        assert len(live) <= limit + extra, f"{len(live)} live pods"
        assert len(status.history) <= 10
        if self.membership is not None:
            shape = self.decided_size.shape
            assert shape is not None
            assert shape.is_legal(len(self.membership.members)), "an illegal size"
            assert [member.node_rank for member in self.membership.members] == list(range(len(self.membership.members)))

    def _comparable_state(self) -> Any:
        beats = {
            uid: (
                view.heartbeat.phase,
                view.heartbeat.attempt,
                view.heartbeat.generation,
                view.heartbeat.ready,
                view.heartbeat.progress and (view.heartbeat.progress.stage, view.heartbeat.progress.artifacts),
            )
            for uid, view in self.known_agents.items()
            if view.heartbeat
        }
        silent = {
            uid
            for uid, view in self.known_agents.items()
            if self.now - view.last_seen >= observed.SILENCE_REPORTED_SECONDS
        }
        return (
            {name: pod.view for name, pod in self.pods.items()},
            {name: self._node_view(node) for name, node in self.nodes.items()},
            beats,
            silent,
            dict(self.stepped),
            self.spec,
        )

    def _alive(self, pod: Pod) -> bool:
        node = self.nodes.get(pod.view.node)
        ended = pod.view.phase in (observed.PodPhase.FAILED, observed.PodPhase.SUCCEEDED)
        return not pod.view.deleting and not ended and (not pod.view.node or (node is not None and node.up))

    def change(self, **workers: Any) -> None:
        """Patch spec.workers, as `kubectl scale` does."""
        changed = self.spec.workers.model_copy(update=workers)
        self.spec = self.spec.model_copy(update={"workers": changed})
        self.generation += 1
        self.dirty = True

    def suspend(self, value: bool) -> None:
        self.spec = self.spec.model_copy(update={"suspend": value})
        self.generation += 1
        self.dirty = True


def start_cluster(job_spec: TrainingJobSpec, nodes: int, seconds: float = 15.0) -> FakeCluster:
    """Return a cluster whose job trains after these seconds."""
    cluster = FakeCluster(job_spec, nodes)
    cluster.run(seconds)
    assert cluster.status.phase is Phase.RUNNING
    return cluster


def _copy_pod(pod: Pod) -> Pod:
    agent = pod.agent
    if agent is not None:
        agent = replace(agent, failures=list(agent.failures), restarts=list(agent.restarts))
    return replace(pod, agent=agent)
