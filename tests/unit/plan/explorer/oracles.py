"""Invariants of every state of the small models, and the check that every state converges.

Safety:
- A generation number has one membership; the fake cluster asserts it at each write.
- No rank of a generation runs twice.
- Committed steps and counters never decrease.
- All sizes are legal.
- A failure counts towards the budget of its cause.
- The plan converges; the fake cluster asserts it at each reconciliation.

Liveness: after all faults are repaired, the job trains at its size with all its pods and no open interruption, or it
has ended with a verdict.
"""

from tests.unit.plan.explorer.transitions import UsedBudgets
from tests.unit.plan.plan_cluster import FakeCluster
from trainium_contract.faults.causes import Budget
from trainium_contract.faults.classify import get_budget
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_operator.plan.model.conditions import is_terminal, is_true

BOUND_SECONDS = 400


def check_step(before: TrainingJobStatus, cluster: FakeCluster) -> None:
    """Assert what must hold between a state and its successor."""
    status = cluster.status
    assert status.membership.generation >= before.membership.generation, "the generation decreased"
    assert status.checkpoint.durable_step >= before.checkpoint.durable_step, "a committed step decreased"
    assert status.restarts.total >= before.restarts.total, "the count of restarts decreased"
    assert status.next_pod_ordinal >= before.next_pod_ordinal, "an ordinal could be used twice"
    assert status.restarts.total == sum(status.restarts.by_cause.values())
    if is_terminal(before):
        assert is_terminal(status), "a terminal condition was removed"
    if is_true(before, ConditionType.FAILURE_TARGET):
        ends = is_true(status, ConditionType.FAILURE_TARGET) or is_true(status, ConditionType.COMPLETE)
        assert ends, "the decided end was revoked"


def check_state(cluster: FakeCluster, used_budgets: UsedBudgets) -> None:
    """Assert the safety of a state; `used_budgets` counts the faults before it."""
    _check_ranks_run_once(cluster)
    _check_sizes(cluster)
    _check_budgets(cluster.status, used_budgets)
    _check_deadline(cluster)


def _check_ranks_run_once(cluster: FakeCluster) -> None:
    running: dict[tuple[int, int], str] = {}
    for pod in cluster.pods.values():
        if pod.agent is None or not pod.agent.generation:
            continue
        members = cluster.published_members.get(pod.agent.generation, {})
        rank = members.get(pod.view.uid)
        if rank is None:
            continue
        other = running.setdefault((pod.agent.generation, rank), pod.view.uid)
        assert other == pod.view.uid, f"rank {rank} of generation {pod.agent.generation} runs twice"


def _check_sizes(cluster: FakeCluster) -> None:
    membership, workers = cluster.membership, cluster.spec.workers
    if membership is None or cluster.status.membership.size == 0:
        return
    size = len(membership.members)
    shape, floor = cluster.spec.batch_shape(), min(workers.min_replicas or 1, workers.replicas)
    assert shape.is_legal(size), f"{size} is no legal size"
    assert shape.best(size, min(size, floor)) == size, f"{size} nodes train where fewer are as fast"
    assert size >= floor, "smaller than the job allows"


def _check_budgets(status: TrainingJobStatus, used_budgets: UsedBudgets) -> None:
    used = [get_budget(record.cause) for record in status.failures]
    process, infrastructure = used.count(Budget.PROCESS), used.count(Budget.INFRASTRUCTURE)
    assert process <= used_budgets.process, f"{process} failures use the process budget of {used_budgets.process}"
    assert infrastructure <= used_budgets.infrastructure, (
        f"{infrastructure} failures use the infrastructure budget of {used_budgets.infrastructure}"
    )


def _check_deadline(cluster: FakeCluster) -> None:
    if not (is_true(cluster.status, ConditionType.FAILED) and is_true(cluster.status, ConditionType.FAILURE_TARGET)):
        return
    running = [name for name, pod in cluster.pods.items() if pod.agent is not None and not pod.view.deleting]
    assert not running, f"the job has failed at its deadline, and {running} run on"


def has_converged(cluster: FakeCluster) -> bool:
    """Return whether the job has converged: it trains at its size, or has ended with a verdict."""
    status = cluster.status
    if is_terminal(status):
        return True
    return (
        status.phase is Phase.RUNNING
        and status.replicas == status.ready_replicas == status.desired
        and status.desired - status.idle_nodes.taken == cluster.spec.workers.replicas
        and status.idle_nodes.taken == status.idle_nodes.wanted
        and status.spares == cluster.spec.workers.spares
        and len(cluster.pods) == status.desired + cluster.spec.workers.spares
        and all(entry.recovered_seconds is not None for entry in status.history)
        and cluster.membership is not None
        and status.membership.generation == cluster.membership.generation
        and status.waiting_since is None
    )


def describe(cluster: FakeCluster) -> str:
    """Describe a cluster that has not converged."""
    status = cluster.status
    pods = ", ".join(
        f"{pod.view.name} {pod.view.phase.value}{' deleting' if pod.view.deleting else ''} on {pod.view.node or '-'}"
        f" {pod.agent.phase.value + ' ' + str(pod.agent.generation) if pod.agent else ''}"
        for pod in cluster.pods.values()
    )
    recorded = cluster.membership.generation if cluster.membership else None
    open_entries = [
        (entry.cause.value, entry.response.value, entry.generation, entry.attempt)
        for entry in status.history
        if entry.recovered_seconds is None
    ]
    return (
        f"phase {status.phase.value}, generation {status.membership.generation} attempt {status.membership.attempt} "
        f"(recorded {recorded}), {status.ready_replicas} of {status.desired} train, waiting since "
        f"{status.waiting_since}, open {open_entries}; pods: {pods}"
    )
