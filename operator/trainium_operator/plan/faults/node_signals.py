"""Translate the signals of a node into problems: conditions, capacity, taints, labels, deletion, kernel lines.

What each stands for, and which status is bad, is in the contract's table of faults (`signs`, `node_polarity`). A rule
of `spec.recovery.rules` without exit codes applies to nodes too: its reason is compared with the reason of a bad
condition and the key of a taint, its message with the text of a condition or a kernel line.

Guarantees:
- A missing or Unknown signal is neither healthy nor bad; nothing here raises or depends on the time
  (`view.node_problems` debounces).
- A rule takes precedence over the built-in rows. A kernel line is a problem only when the table calls it decisive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.faults import classify
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import POLARITIES, Severity, bad_when
from trainium_contract.faults.responses import Response
from trainium_contract.sizes import INSTANCES
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, NodeView, Taint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainium_contract.faults.rules import RecoveryRule
    from trainium_contract.wire.messages import HeartbeatRequest


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """One thing that is wrong with a node, from any source."""

    severity: Severity
    cause: Cause
    source: str
    """Its reporter: `condition NeuronHealth`, `capacity aws.amazon.com/neuron`, `taint karpenter.sh/disrupted`, ..."""
    reason: str
    """Why, as the source words it."""
    since: float | None = None
    """Unix seconds by the source's clock; None when it does not report."""
    message: str = ""

    def __str__(self) -> str:
        return f"{self.source} ({self.reason})" if self.reason else self.source


@dataclass(frozen=True, slots=True)
class Demand:
    """Demands of a job on its nodes, as far as they decide what is a problem."""

    resources: Mapping[str, int]
    """Extended resources per worker."""
    tolerations: tuple[Mapping[str, object], ...] = ()
    """Tolerations of its pods, as in a manifest."""
    claims: bool = False
    """It claims its devices, which a node's allocatable resources do not count."""


_READ_ELSEWHERE = ("node.kubernetes.io/", names.TAINT_QUARANTINED)
"""Beginnings of taints that only repeat what is read elsewhere (Ready, pressure, cordon, our own memory)."""
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_STATUS = {True: NodeReadiness.TRUE, False: NodeReadiness.FALSE}


def bad_status(kind: str) -> NodeReadiness:
    """Return the status of a condition of this type that means trouble."""
    return _STATUS[bad_when(kind)]


def problems_of(node: NodeView, demand: Demand | None = None) -> tuple[NodeProblem, ...]:
    """Return everything that is wrong with a node, the worst first; with a demand also what is wrong for that job."""
    found = [
        *_readiness(node),
        *(problem for condition in node.conditions for problem in _condition(condition)),
        *_capacity(node, demand),
        *(problem for taint in node.taints for problem in _taint(taint, demand)),
        *_labels(node),
    ]
    if node.deleting:
        found.append(NodeProblem(Severity.DRAIN, Cause.PREEMPTED, "deletion", "the node is being deleted"))
    if not found:
        return ()
    return tuple(sorted(found, key=lambda problem: -problem.severity))


def _readiness(node: NodeView) -> Iterator[NodeProblem]:
    """Yield a node that is not ready as a suspect: it may train on, and the worker's silence decides."""
    if node.ready is not NodeReadiness.TRUE:
        text = f"Ready is {node.ready.value}"
        yield NodeProblem(Severity.SUSPECT, Cause.NODE_LOST, "condition Ready", text, node.unready_since)


def _condition(condition: NodeCondition) -> Iterator[NodeProblem]:
    known = POLARITIES.get(condition.type)
    if known is None or condition.status is not _STATUS[known.bad_when]:
        return
    cause = classify.cause_of_condition(condition.type, condition.reason)
    if cause is None:
        return
    source, reason = f"condition {condition.type}", condition.reason or condition.status.value
    yield NodeProblem(known.severity, cause, source, reason, condition.since, condition.message)


def _capacity(node: NodeView, demand: Demand | None) -> Iterator[NodeProblem]:
    """Yield None of a resource is a device plugin that is away, fewer than there must be are devices that are lost."""
    if not node.capacity:
        return
    instance = INSTANCES.get(node.labels.get(names.LABEL_INSTANCE_TYPE, ""))
    counted = instance is not None and not (demand is not None and demand.claims)
    full = {names.NEURON: instance.devices} if counted and instance is not None else {}
    needed = demand.resources if demand is not None else {}
    for resource in sorted(full.keys() | needed.keys()):
        has = node.capacity.get(resource)
        wanted = max(full.get(resource, 0), needed.get(resource, 0))
        if has is None or has >= wanted:
            continue
        short = has < (needed.get(resource, 0) if demand is not None else wanted)
        severity = Severity.DRAIN if short and has > 0 else Severity.SUSPECT
        cause = Cause.NETWORK if resource == names.EFA else Cause.DEVICE
        yield NodeProblem(severity, cause, f"capacity {resource}", f"{has} of {wanted}")


def _taint(taint: Taint, demand: Demand | None) -> Iterator[NodeProblem]:
    source, reason = f"taint {taint.key}", taint.value or taint.effect
    if taint.key.startswith(_READ_ELSEWHERE) and taint.key != _OUT_OF_SERVICE:
        return
    if demand is not None and tolerates(demand.tolerations, taint):
        return
    cause = classify.cause_of_taint(taint.key)
    if taint.key == names.LABEL_HYPERPOD_HEALTH:
        known = classify.cause_of_label(taint.key, taint.value)
        yield NodeProblem(Severity.DRAIN if known else Severity.SUSPECT, known or Cause.HOST, source, reason)
    elif cause is not None:
        yield NodeProblem(Severity.DRAIN, cause, source, reason)
    elif taint.effect == "NoExecute" and demand is not None:
        # The pods that do not tolerate it are about to be evicted, at once or when their time is over.
        yield NodeProblem(Severity.DRAIN, Cause.PREEMPTED, source, reason)


def tolerates(tolerations: tuple[Mapping[str, object], ...], taint: Taint) -> bool:
    """Return whether pods with these tolerations may stay on a node with this taint for good."""
    for each in tolerations:
        exists, key = each.get("operator") == "Exists", each.get("key") or ""
        same_key = key == taint.key or (exists and not key)
        same_value = exists or (each.get("value") or "") == taint.value
        same_effect = each.get("effect") in (None, "", taint.effect)
        if same_key and same_value and same_effect and each.get("tolerationSeconds") is None:
            return True
    return False


def _labels(node: NodeView) -> Iterator[NodeProblem]:
    """HyperPod's verdicts; a node in its deep check is merely not for new workers."""
    status = node.labels.get(names.LABEL_HYPERPOD_HEALTH, "Schedulable")
    if status.startswith("Unschedulable"):
        known = classify.cause_of_label(names.LABEL_HYPERPOD_HEALTH, status)
        severity = Severity.DRAIN if known else Severity.SUSPECT
        yield NodeProblem(severity, known or Cause.HOST, f"label {names.LABEL_HYPERPOD_HEALTH}", status)
    if node.labels.get(names.LABEL_HYPERPOD_DEEP_CHECK) == "Failed":
        yield NodeProblem(Severity.DRAIN, Cause.DEVICE, f"label {names.LABEL_HYPERPOD_DEEP_CHECK}", "Failed")


KERNEL_LOG = "kernel log"


def with_rules(
    node: NodeView, problems: Sequence[NodeProblem], rules: Sequence[RecoveryRule]
) -> tuple[NodeProblem, ...]:
    """Return the problems of a node as the job's rules see them, the worst first."""
    if not rules:
        return tuple(problems)
    ruled = {
        source: (verdict, reason, message, since) for verdict, source, reason, message, since in _signs(node, rules)
    }
    kept = [problem for problem in problems if problem.source not in ruled]
    added = [
        NodeProblem(Severity.DRAIN, verdict.cause, source, reason, since, f"{message} ({verdict.sentence})".strip())
        for source, (verdict, reason, message, since) in ruled.items()
        if verdict.response is not Response.RESTART_IN_PLACE
    ]
    return tuple(sorted([*kept, *added], key=lambda problem: -problem.severity))


def kernel_problem(beat: HeartbeatRequest | None, rules: Sequence[RecoveryRule]) -> NodeProblem | None:
    """Return the problem of the agent's node by the newest kernel line that is a fault by itself."""
    for event in reversed(beat.kernel if beat is not None else ()):
        sign = classify.match_kernel_line(event.line)
        ruled = classify.match_rules(rules, texts=(event.line,))
        if ruled is not None:
            if ruled.response is not Response.RESTART_IN_PLACE:
                return NodeProblem(Severity.DRAIN, ruled.cause, KERNEL_LOG, ruled.sentence, event.at, event.line)
        elif sign is not None and sign.decisive:
            sentence = classify.classify_sign(sign).sentence
            return NodeProblem(Severity.FATAL, sign.cause, KERNEL_LOG, sentence, event.at, event.line)
    return None


def stopping_sign(node: NodeView, rules: Sequence[RecoveryRule]) -> tuple[classify.Verdict, str] | None:
    """Return the verdict of a rule that stops the job, and the sign on the node."""
    if not rules:
        return None
    for verdict, source, reason, message, _ in _signs(node, rules):
        if verdict.response is Response.STOP:
            return verdict, f"{source} ({reason}) {message}".strip()
    return None


def _signs(
    node: NodeView, rules: Sequence[RecoveryRule]
) -> Iterator[tuple[classify.Verdict, str, str, str, float | None]]:
    """Yield conditions and taints that a rule names: verdict, source, reason, message, since when."""
    for condition in node.conditions:
        if condition.status is not bad_status(condition.type):
            continue
        found = classify.match_rules(rules, reason=condition.reason, texts=(condition.message,))
        if found is not None:
            yield found, f"condition {condition.type}", condition.reason, condition.message, condition.since
    for taint in node.taints:
        found = classify.match_rules(rules, reason=taint.key)
        if found is not None:
            yield found, f"taint {taint.key}", taint.value or taint.effect, "", None
