"""Fingerprints of states of the small model: equal ones are explored once.

A fingerprint leaves out or makes relative what differs between histories alone: pods and nodes are numbered by order,
generations and attempts are relative to the current ones, times are ages. Ages are exact while a timeout or deadline
depends on them, and coarse afterwards.
"""

from typing import Any

from tests.unit.plan.fake_data_plane import Agent, Node, Pod
from tests.unit.plan.plan_cluster import FakeCluster
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.wire.messages import ProcessFailure, RestartRecord
from trainium_operator.plan.model.observed import AgentView, NodeCondition

_EXACT_SECONDS = 50.0
_COARSE_SECONDS = 60.0
_LONGEST_SECONDS = 3700.0


def fingerprint(cluster: FakeCluster) -> int:
    """Return the fingerprint of a state."""
    return hash(_Relative(cluster).all())


class _Relative:
    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.generation = max(
            cluster.membership.generation if cluster.membership else 0,
            cluster.published.generation if cluster.published else 0,
        )
        self.ordered = sorted(cluster.pods.values(), key=lambda pod: pod.view.ordinal)
        self.pods = {pod.view.name: index for index, pod in enumerate(self.ordered)}
        self.uids = {pod.view.uid: index for index, pod in enumerate(self.ordered)}
        used = [pod.view.node for pod in self.ordered if pod.view.node]
        idle = sorted(name for name in cluster.nodes if name not in used)
        self.nodes = {name: index for index, name in enumerate(dict.fromkeys([*used, *idle]))}

    def all(self) -> tuple[Any, ...]:
        cluster = self.cluster
        workers = cluster.spec.workers
        membership = cluster.membership
        members = (
            tuple((self.uids.get(member.pod_uid), member.node_rank) for member in membership.members)
            if membership
            else ()
        )
        return (
            (cluster.fleet.frozen, tuple(sorted(str(self.nodes.get(name)) for name in cluster.fleet.quarantined))),
            (workers.replicas, cluster.spec.suspend, cluster.generation - cluster.status.observed_generation),
            (cluster.operator_up, self.age(cluster.operator_since, 20), cluster.dirty, self.requeue_seconds()),
            self.status(),
            cluster.status.compiled.sizes,
            (self.idle(), len(cluster.foreign_nodes), cluster.foreign_pending_pods, cluster.nodes_wanted_by_gangs),
            members,
            membership.transition if membership else None,
            cluster.published.generation - self.generation if cluster.published else None,
            tuple(self.pod(pod) for pod in self.ordered),
            tuple(sorted(map(self.node, cluster.nodes.values()))),
            tuple(
                sorted((str(self.uids.get(uid)), self.heartbeat(view)) for uid, view in cluster.known_agents.items())
            ),
            tuple(
                sorted((str(self.uids.get(uid)), at[0] - self.generation, at[1]) for uid, at in cluster.stepped.items())
            ),
        )

    def age(self, time: float | None, cap: float = _LONGEST_SECONDS) -> float | None:
        if time is None:
            return None
        seconds = min(cap, self.cluster.now - time)
        return round(seconds) if seconds <= _EXACT_SECONDS else seconds // _COARSE_SECONDS * _COARSE_SECONDS

    def requeue_seconds(self) -> float | None:
        at = self.cluster.requeue_at
        return None if at is None else min(60, round(at - self.cluster.now))

    def status(self) -> tuple[Any, ...]:
        status = self.cluster.status
        return (
            status.phase,
            status.membership.generation - self.generation,
            status.membership.attempt,
            status.membership.size,
            (status.desired, status.replicas, status.ready_replicas, status.spares),
            self.age(status.waiting_since),
            tuple((condition.type, condition.status, condition.reason) for condition in status.conditions),
            tuple(
                (
                    entry.cause,
                    entry.response,
                    entry.generation - self.generation,
                    entry.attempt,
                    self.age(entry.failed_at),
                )
                for entry in status.history
                if entry.recovered_seconds is None and entry.response is not RecoveryResponse.STOP
            ),
            tuple((failure.cause, self.nodes.get(failure.node), self.age(failure.at)) for failure in status.failures),
            tuple(sorted(str(self.nodes.get(name)) for name in status.avoided_nodes)),
            tuple(
                (self.pods.get(straggler.pod), straggler.reported, self.steps(straggler.since_step))
                for straggler in status.stragglers
            ),
            self.age(status.leaving_since),
            self.age(status.activity.since) if self.has_deadline() else None,
            status.activity.stepped,
            (status.start_failures.rounds, self.age(status.start_failures.at), status.start_failures.batch),
            tuple((self.nodes.get(node.node), node.times, self.age(node.at)) for node in status.start_failures.nodes),
            bool(status.start_time),
            bool(status.progress.step),
        )

    def idle(self) -> tuple[Any, ...]:
        idle = self.cluster.status.idle_nodes
        retry = None if idle.retry_at is None else max(0, round(idle.retry_at - self.cluster.now))
        return (idle.taken, idle.wanted, self.age(idle.asked_at), idle.failed_requests, retry)

    def has_deadline(self) -> bool:
        spec = self.cluster.spec
        return spec.active_deadline_seconds is not None or spec.startup_deadline_seconds is not None

    def steps(self, since: int) -> int:
        return min(60, self.cluster.best_step - since)

    def pod(self, pod: Pod) -> tuple[Any, ...]:
        view = pod.view
        return (
            (self.nodes.get(view.node), view.phase, view.reason, view.exit_code, view.deleting, view.disrupted),
            (bool(view.unschedulable_message), view.extra),
            self.age(pod.since, 5),
            None if pod.agent is None else self.agent(pod.agent),
        )

    def agent(self, agent: Agent) -> tuple[Any, ...]:
        generation = agent.generation
        return (
            (generation - self.generation if generation else None, agent.attempt, agent.phase, agent.ready),
            agent.waiting_for,
            agent.step - self.cluster.best_step,
            None if agent.verdict is None else agent.verdict.exit_code,
            tuple(self.failure(failure) for failure in agent.failures if failure.generation == generation),
            tuple(self.restart(record) for record in agent.restarts if record.generation == generation),
        )

    def failure(self, failure: ProcessFailure) -> tuple[Any, ...]:
        return (failure.attempt, failure.exit_code)

    def restart(self, record: RestartRecord) -> tuple[Any, ...]:
        return (record.attempt, record.cause, record.resumed_at is not None)

    def node(self, node: Node) -> tuple[str, ...]:
        view = self.cluster._node_view(node)
        down = None if node.up else self.age(node.down_since, 60)
        marks = (view.ready, view.schedulable, view.deleting, tuple(map(self.condition, view.conditions)), view.taints)
        return tuple(map(str, (self.nodes[node.name], node.up, down, node.partitioned, node.slowness, marks)))

    def condition(self, condition: NodeCondition) -> tuple[Any, ...]:
        return (condition.type, condition.status, condition.reason, self.age(condition.since))

    def heartbeat(self, view: AgentView) -> str:
        beat = view.heartbeat
        reported = None
        if beat is not None:
            generation = beat.generation - self.generation if beat.generation else None
            reported = (generation, beat.attempt, beat.phase, beat.ready, beat.verdict is None, len(beat.failures))
        return str((self.age(view.last_seen, 70), self.age(view.progressed_at, 20), reported))
