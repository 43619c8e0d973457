"""The condition NodesHealthy: what is wrong with the nodes in use, the worst first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.node_polarity import Severity
from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.model.conditions import with_condition
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import rfc3339

if TYPE_CHECKING:
    from trainium_operator.plan.faults.node_signals import NodeProblem
    from trainium_operator.plan.model.conditions import AnyShown
    from trainium_operator.plan.view.facts import Facts

_SHOWN = 3


def note_nodes(facts: Facts, status: AnyShown) -> AnyShown:
    """The status with the condition, as it was while no node is known."""
    if facts.lost_contact:
        kind, reason = ConditionType.NODES_HEALTHY, Reason.CONTACT_LOST
        return with_condition(status, kind, None, reason, facts.lost_contact, now=facts.now)
    if not facts.observed.nodes:
        return status
    frozen = facts.observed.fleet.frozen
    found: dict[str, NodeProblem] = {}
    for uid, problem in facts.troubles.items():
        found.setdefault(facts.workers[uid].pod.node, problem)
    if not found:
        reason = Reason.NODE_ACTIONS_FROZEN if frozen else Reason.NODES_HEALTHY
        message = frozen or "nothing is wrong with the nodes in use"
        return with_condition(status, ConditionType.NODES_HEALTHY, True, reason, message, now=facts.now)
    worst = sorted(found, key=lambda node: (-found[node].severity, node))
    told = "; ".join(_told(node, found[node]) for node in worst[:_SHOWN])
    more = f"; and {len(worst) - _SHOWN} more nodes" if len(worst) > _SHOWN else ""
    reason = Reason.NODE_ACTIONS_FROZEN if frozen else Reason.NODE_UNHEALTHY
    message = f"{told}{more}. {frozen}" if frozen else told + more
    return with_condition(status, ConditionType.NODES_HEALTHY, False, reason, message, now=facts.now)


def _told(node: str, problem: NodeProblem) -> str:
    since = f" since {rfc3339(problem.since)}" if problem.since is not None else ""
    answer = {
        Severity.FATAL: "its workers are replaced",
        Severity.DRAIN: "its workers are handed over",
        Severity.SUSPECT: "other nodes are preferred",
    }
    return f"{node}: {problem}{since} ({problem.cause.value}; {answer[problem.severity]})"
