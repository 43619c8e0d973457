"""What the job's own rules, and the kernel lines that agents send, make of a node; adds to `node_signals`.

A rule of `spec.recovery.rules` without exit codes applies to nodes too: its reason is compared with the reason of a
condition that is bad and with the key of a taint, its message with the text of the condition or of a kernel line.
Invariants: a rule comes before the built-in rows; a kernel line is a problem by itself only when the table calls it
decisive, the others explain the end of a process and nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.classify import classify_sign, match_kernel_line, match_rules
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.faults.responses import Response
from trainium_operator.plan.faults.node_signals import NodeProblem, bad_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainium_contract.faults.classify import Verdict
    from trainium_contract.faults.rules import RecoveryRule
    from trainium_contract.wire.messages import HeartbeatRequest
    from trainium_operator.plan.model.observed import NodeView

KERNEL_LOG = "kernel log"


def with_rules(
    node: NodeView, problems: Sequence[NodeProblem], rules: Sequence[RecoveryRule]
) -> tuple[NodeProblem, ...]:
    """The problems of a node as the job's rules see them, the worst first."""
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
    """What the newest kernel line that is a fault by itself says about the node that an agent runs on."""
    for event in reversed(beat.kernel if beat is not None else ()):
        sign = match_kernel_line(event.line)
        ruled = match_rules(rules, texts=(event.line,))
        if ruled is not None:
            if ruled.response is not Response.RESTART_IN_PLACE:
                return NodeProblem(Severity.DRAIN, ruled.cause, KERNEL_LOG, ruled.sentence, event.at, event.line)
        elif sign is not None and sign.decisive:
            sentence = classify_sign(sign).sentence
            return NodeProblem(Severity.FATAL, sign.cause, KERNEL_LOG, sentence, event.at, event.line)
    return None


def stopping_sign(node: NodeView, rules: Sequence[RecoveryRule]) -> tuple[Verdict, str] | None:
    """What a rule wants the job stopped for: its verdict and what was seen on the node."""
    if not rules:
        return None
    for verdict, source, reason, message, _ in _signs(node, rules):
        if verdict.response is Response.STOP:
            return verdict, f"{source} ({reason}) {message}".strip()
    return None


def _signs(node: NodeView, rules: Sequence[RecoveryRule]) -> Iterator[tuple[Verdict, str, str, str, float | None]]:
    """Conditions and taints that a rule names: verdict, source, reason, message, since when."""
    for condition in node.conditions:
        if condition.status is not bad_status(condition.type):
            continue
        found = match_rules(rules, reason=condition.reason, texts=(condition.message,))
        if found is not None:
            yield found, f"condition {condition.type}", condition.reason, condition.message, condition.since
    for taint in node.taints:
        found = match_rules(rules, reason=taint.key)
        if found is not None:
            yield found, f"taint {taint.key}", taint.value or taint.effect, "", None
