"""Find the problems of the nodes of a job's workers, debounced, for all other policies.

Invariants: a fatal problem counts at once. Any other counts after `spec.health.quarantine.debounceSeconds`, by the age
that its source reports (one without an age, or from the future, counts as old). While the fleet is frozen nothing
counts for more than a suspicion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.spec.health import PreflightCheck
from trainium_operator.plan.faults.node_signals import (
    NodeProblem,
    PodRequirements,
    apply_rules,
    find_kernel_problem,
    find_node_problems,
)
from trainium_operator.plan.manifests.worker_needs import build_tolerations, find_extended_resources

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.wire.messages import HeartbeatRequest
    from trainium_operator.plan.model.observed import NodeView, Observed
    from trainium_operator.plan.view.workers import Worker

    FindDeviceProblems = Callable[[Observed, Worker], Iterable[NodeProblem]]

_DETAIL_CHARACTERS = 200
_CLOCK_SKEW_SECONDS = 60.0
"""Clocks of nodes may be ahead of the operator's by this much."""


@dataclass(frozen=True, slots=True)
class NodeProblems:
    """The outcome."""

    by_pod: Mapping[str, NodeProblem]
    """The worst problem of the node of each worker, by pod uid; workers on nodes without one are left out."""
    problems_count_at: tuple[float, ...]
    """When problems that are too recent will count (Unix seconds)."""


def find_problems_by_pod(
    observed: Observed, workers: Mapping[str, Worker], find_device_problems: Collection[FindDeviceProblems]
) -> NodeProblems:
    """Return the problems of the node of each worker."""
    by_pod: dict[str, NodeProblem] = {}
    problems_count_at: set[float] = set()
    demand: PodRequirements | None = None
    by_node: dict[str, NodeProblem | None] = {}
    for uid, worker in workers.items():
        node = worker.node
        if node is None:
            continue
        if node.name not in by_node:
            demand = demand or build_pod_requirements(observed.job.spec)
            by_node[node.name] = _find_worst_problem(node, demand, observed, problems_count_at)
        problem = _select_worse(
            _add_kernel_problem(worker, by_node[node.name], observed),
            _find_worst_device_problem(worker, observed, find_device_problems),
        )
        problem = problem or _find_clock_problem(worker)
        if problem is not None:
            by_pod[uid] = problem
    return NodeProblems(by_pod, tuple(sorted(problems_count_at)))


def find_worst_problem(
    observed: Observed, node: NodeView, requirements: PodRequirements | None = None
) -> NodeProblem | None:
    """Return the worst problem of a node that counts now, for pods with these requirements; by default for workers."""
    requirements = requirements or build_pod_requirements(observed.job.spec)
    return _find_worst_problem(node, requirements, observed, set())


def build_pod_requirements(spec: TrainingJobSpec) -> PodRequirements:
    """Return the job's demands on its nodes, without quantities that are not numbers."""
    accelerator = spec.workers.accelerator
    resources = {name: int(text) for name, text in find_extended_resources(accelerator).items() if text.isdecimal()}
    return PodRequirements(resources, build_tolerations(spec), claims=accelerator.claim is not None)


def _find_worst_problem(
    node: NodeView, demand: PodRequirements, observed: Observed, counting_times: set[float]
) -> NodeProblem | None:
    debounce = observed.job.spec.health.quarantine.debounce_seconds
    for problem in apply_rules(node, find_node_problems(node, demand), observed.job.spec.recovery.rules):
        counts_at = _find_count_time(problem, observed.now, debounce)
        if counts_at > observed.now:
            counting_times.add(counts_at)
            continue
        return _cap_while_frozen(problem, observed)
    return None


def _find_worst_device_problem(
    worker: Worker, observed: Observed, find_device_problems: Collection[FindDeviceProblems]
) -> NodeProblem | None:
    """Return the worst problem of the devices that a feature gives to the worker."""
    problems = (problem for find in find_device_problems for problem in find(observed, worker))
    worst = max(problems, key=lambda problem: problem.severity, default=None)
    return None if worst is None else _cap_while_frozen(worst, observed)


def _select_worse(first: NodeProblem | None, second: NodeProblem | None) -> NodeProblem | None:
    if first is None or second is None:
        return first or second
    return max(first, second, key=lambda problem: problem.severity)


def _add_kernel_problem(worker: Worker, problem: NodeProblem | None, observed: Observed) -> NodeProblem | None:
    """Return the worse of a node's known problem and of its kernel log's."""
    kernel = find_kernel_problem(worker.heartbeat, observed.job.spec.recovery.rules)
    if kernel is None:
        return problem
    return _select_worse(problem, _cap_while_frozen(kernel, observed))


def is_clock_in_sync(heartbeat: HeartbeatRequest) -> bool:
    """Return whether the clock of its node is right, as far as its agent knows; otherwise its times date nothing."""
    return all(check.passed for check in heartbeat.checks if check.check is PreflightCheck.CLOCK)


def _find_clock_problem(worker: Worker) -> NodeProblem | None:
    """Return a suspicion of a node's clock: its times mislead readers, and certificates may not verify."""
    for check in worker.heartbeat.checks if worker.heartbeat is not None else ():
        if check.check is PreflightCheck.CLOCK and not check.passed:
            return NodeProblem(
                Severity.SUSPECT, Cause.HOST, "check Clock", check.detail[:_DETAIL_CHARACTERS].rstrip(".")
            )
    return None


def _cap_while_frozen(problem: NodeProblem, observed: Observed) -> NodeProblem:
    """Return at most a suspicion while nodes may not be acted on."""
    # A node that announces its end will leave, and so will a pod whose device is tainted.
    depends_on_freeze = problem.cause not in (Cause.PREEMPTED, Cause.DEVICE_TAINTED)
    if not observed.fleet.frozen or not depends_on_freeze or problem.severity <= Severity.SUSPECT:
        return problem
    return replace(problem, severity=Severity.SUSPECT)


def _find_count_time(problem: NodeProblem, now: float, debounce: float) -> float:
    """Return when it counts; now or earlier if it already does."""
    if problem.severity is Severity.FATAL or problem.since is None or problem.since > now + _CLOCK_SKEW_SECONDS:
        return now
    return min(problem.since, now) + debounce
