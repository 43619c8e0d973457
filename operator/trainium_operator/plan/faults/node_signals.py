"""Translate the signals of a node into problems: conditions, capacity, taints, labels, deletion, kernel lines.

The contract's table of faults (`signs`, `node_polarity`) has the meaning of each signal and the bad status of each
condition. A rule of `spec.recovery.rules` without exit codes also applies to nodes: its reason is compared with the
reason of a bad condition and the key of a taint, its message with the text of a condition or a kernel line.

Guarantees:
- A missing or Unknown signal is neither healthy nor bad; nothing here raises or depends on the time
  (`view.node_problems` debounces).
- A rule takes precedence over the built-in rows. A kernel line is a problem only if the table calls it decisive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_contract.accelerators import EFA, INSTANCES, NEURON
from trainium_contract.faults import classify
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import POLARITIES, Severity, is_bad_when_true
from trainium_contract.faults.responses import Response
from trainium_contract.faults.signs import SignKind
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, NodeView, Taint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainium_contract.faults.rules import RecoveryRule
    from trainium_contract.wire.messages import HeartbeatRequest


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """One problem of a node, from any source."""

    severity: Severity
    cause: Cause
    source: str
    """Its reporter: `condition NeuronHealth`, `capacity aws.amazon.com/neuron`, `taint karpenter.sh/disrupted`, ..."""
    reason: str
    """The reason in the source's words."""
    since: float | None = None
    """Unix seconds by the source's clock; None if it does not report any."""
    message: str = ""

    def __str__(self) -> str:
        return f"{self.source} ({self.reason})" if self.reason else self.source


@dataclass(frozen=True, slots=True)
class PodRequirements:
    """Demands of a job on its nodes that determine what is a problem."""

    resources: Mapping[str, int]
    """Extended resources per worker."""
    tolerations: tuple[Mapping[str, object], ...] = ()
    """Tolerations of its pods, as in a manifest."""
    claims: bool = False
    """Whether it claims its devices, which a node's allocatable resources do not count."""


_READ_ELSEWHERE = ("node.kubernetes.io/", names.TAINT_QUARANTINED)
"""Prefixes of taints that repeat other signals (Ready, pressure, cordon, the operator's own memory)."""
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


def get_bad_status(kind: str) -> NodeReadiness:
    """Return the bad status of a condition of this type."""
    return NodeReadiness.TRUE if is_bad_when_true(kind) else NodeReadiness.FALSE


def find_node_problems(node: NodeView, demand: PodRequirements | None = None) -> tuple[NodeProblem, ...]:
    """Return all problems of a node, the worst first; with a demand, also those for that job."""
    problems = [
        *_find_readiness_problems(node),
        *(problem for condition in node.conditions for problem in _find_condition_problems(condition)),
        *_find_capacity_problems(node, demand),
        *(problem for taint in node.taints for problem in _find_taint_problems(taint, demand)),
        *_find_label_problems(node),
    ]
    if node.deleting:
        problems.append(NodeProblem(Severity.DRAIN, Cause.PREEMPTED, "deletion", "the node is being deleted"))
    if not problems:
        return ()
    return tuple(sorted(problems, key=lambda problem: -problem.severity))


def _find_readiness_problems(node: NodeView) -> Iterator[NodeProblem]:
    """Yield a suspicion of a node that is not ready: it may train on, and the worker's silence decides."""
    if node.ready is not NodeReadiness.TRUE:
        text = f"Ready is {node.ready.value}"
        yield NodeProblem(Severity.SUSPECT, Cause.NODE_LOST, "condition Ready", text, node.unready_since)


def _find_condition_problems(condition: NodeCondition) -> Iterator[NodeProblem]:
    polarity = POLARITIES.get(condition.type)
    if polarity is None or condition.status is not get_bad_status(condition.type):
        return
    cause = classify.find_cause(SignKind.CONDITION, condition.type, condition.reason)
    if cause is None:
        return
    source, reason = f"condition {condition.type}", condition.reason or condition.status.value
    yield NodeProblem(polarity.severity, cause, source, reason, condition.since, condition.message)


def _find_capacity_problems(node: NodeView, demand: PodRequirements | None) -> Iterator[NodeProblem]:
    """Yield problems of the capacity.

    No device at all means that the device plugin is away; fewer than expected means lost devices.
    """
    if not node.capacity:
        return
    instance = INSTANCES.get(node.labels.get(names.LABEL_INSTANCE_TYPE, ""))
    counted = instance is not None and not (demand is not None and demand.claims)
    full = {NEURON: instance.devices} if counted and instance is not None else {}
    needed = demand.resources if demand is not None else {}
    for resource in sorted(full.keys() | needed.keys()):
        available = node.capacity.get(resource)
        expected = max(full.get(resource, 0), needed.get(resource, 0))
        if available is None or available >= expected:
            continue
        is_short = available < (needed.get(resource, 0) if demand is not None else expected)
        severity = Severity.DRAIN if is_short and available > 0 else Severity.SUSPECT
        cause = Cause.NETWORK if resource == EFA else Cause.DEVICE
        yield NodeProblem(severity, cause, f"capacity {resource}", f"{available} of {expected}")


def _find_taint_problems(taint: Taint, demand: PodRequirements | None) -> Iterator[NodeProblem]:
    source, reason = f"taint {taint.key}", taint.value or taint.effect
    if taint.key.startswith(_READ_ELSEWHERE) and taint.key != _OUT_OF_SERVICE:
        return
    if demand is not None and tolerates(demand.tolerations, taint):
        return
    cause = classify.find_cause(SignKind.TAINT, taint.key)
    if taint.key == names.LABEL_HYPERPOD_HEALTH:
        label_cause = classify.find_cause(SignKind.LABEL, taint.key, taint.value)
        severity = Severity.DRAIN if label_cause else Severity.SUSPECT
        yield NodeProblem(severity, label_cause or Cause.HOST, source, reason)
    elif cause is not None:
        yield NodeProblem(Severity.DRAIN, cause, source, reason)
    elif taint.effect == "NoExecute" and demand is not None:
        # Pods that do not tolerate it are about to be evicted, at once or after their toleration time.
        yield NodeProblem(Severity.DRAIN, Cause.PREEMPTED, source, reason)


def tolerates(tolerations: tuple[Mapping[str, object], ...], taint: Taint) -> bool:
    """Return whether pods with these tolerations may stay on a node with this taint indefinitely."""
    for toleration in tolerations:
        exists, key = toleration.get("operator") == "Exists", toleration.get("key") or ""
        same_key = key == taint.key or (exists and not key)
        same_value = exists or (toleration.get("value") or "") == taint.value
        same_effect = toleration.get("effect") in (None, "", taint.effect)
        if same_key and same_value and same_effect and toleration.get("tolerationSeconds") is None:
            return True
    return False


def _find_label_problems(node: NodeView) -> Iterator[NodeProblem]:
    """Yield the verdicts of HyperPod; a node in its deep check only takes no new workers."""
    status = node.labels.get(names.LABEL_HYPERPOD_HEALTH, "Schedulable")
    if status.startswith("Unschedulable"):
        cause = classify.find_cause(SignKind.LABEL, names.LABEL_HYPERPOD_HEALTH, status)
        severity = Severity.DRAIN if cause else Severity.SUSPECT
        yield NodeProblem(severity, cause or Cause.HOST, f"label {names.LABEL_HYPERPOD_HEALTH}", status)
    if node.labels.get(names.LABEL_HYPERPOD_DEEP_CHECK) == "Failed":
        yield NodeProblem(Severity.DRAIN, Cause.DEVICE, f"label {names.LABEL_HYPERPOD_DEEP_CHECK}", "Failed")


KERNEL_LOG = "kernel log"


def apply_rules(
    node: NodeView, problems: Sequence[NodeProblem], rules: Sequence[RecoveryRule]
) -> tuple[NodeProblem, ...]:
    """Return the problems of a node after the job's rules, the worst first."""
    if not rules:
        return tuple(problems)
    matches = {problem.source: (problem, meaning) for problem, meaning in _match_signals(node, rules)}
    kept = [problem for problem in problems if problem.source not in matches]
    added = [
        replace(problem, message=f"{problem.message} ({meaning.sentence})".strip())
        for problem, meaning in matches.values()
        if meaning.response is not Response.RESTART_IN_PLACE
    ]
    return tuple(sorted([*kept, *added], key=lambda problem: -problem.severity))


def find_kernel_problem(heartbeat: HeartbeatRequest | None, rules: Sequence[RecoveryRule]) -> NodeProblem | None:
    """Return the problem of the agent's node by the newest kernel line that is a fault by itself."""
    for event in reversed(heartbeat.kernel if heartbeat is not None else ()):
        sign = classify.match_kernel_line(event.line)
        by_rule = classify.match_rules(rules, texts=(event.line,))
        if by_rule is not None:
            if by_rule.response is not Response.RESTART_IN_PLACE:
                return NodeProblem(Severity.DRAIN, by_rule.cause, KERNEL_LOG, by_rule.sentence, event.at, event.line)
        elif sign is not None and sign.decisive:
            sentence = classify.classify_sign(sign).sentence
            return NodeProblem(Severity.FATAL, sign.cause, KERNEL_LOG, sentence, event.at, event.line)
    return None


def find_stopping_signal(
    node: NodeView, rules: Sequence[RecoveryRule]
) -> tuple[NodeProblem, classify.Classification] | None:
    """Return the first signal of the node that a rule makes a reason to stop the job, and what the rule makes of it."""
    return next((match for match in _match_signals(node, rules) if match[1].response is Response.STOP), None)


def _match_signals(
    node: NodeView, rules: Sequence[RecoveryRule]
) -> Iterator[tuple[NodeProblem, classify.Classification]]:
    """Yield the bad conditions and the taints that a rule names."""
    if not rules:
        return
    for condition in node.conditions:
        if condition.status is not get_bad_status(condition.type):
            continue
        meaning = classify.match_rules(rules, reason=condition.reason, texts=(condition.message,))
        if meaning is not None:
            source, since = f"condition {condition.type}", condition.since
            yield (
                NodeProblem(Severity.DRAIN, meaning.cause, source, condition.reason, since, condition.message),
                meaning,
            )
    for taint in node.taints:
        meaning = classify.match_rules(rules, reason=taint.key)
        if meaning is not None:
            reason = taint.value or taint.effect
            yield NodeProblem(Severity.DRAIN, meaning.cause, f"taint {taint.key}", reason), meaning
