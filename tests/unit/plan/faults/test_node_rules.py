"""The job's own rules about nodes: conditions, taints and kernel lines, before the built-in table."""

from __future__ import annotations

from typing import Any

import pytest
from plan_builders import heartbeat

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.faults.rules import RecoveryRule, RuleAction
from trainium_contract.wire.messages import KernelEvent
from trainium_operator.plan.faults.node_signals import NodeProblem, kernel_problem, stopping_sign, with_rules
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, NodeView, Taint

BAD_DISK = NodeCondition("DiskPressure", NodeReadiness.TRUE, "ScratchFull", "no space on /scratch", since=7.0)
FINE_DISK = NodeCondition("DiskPressure", NodeReadiness.FALSE, "ScratchFull", "no space on /scratch", since=7.0)
TAINT = Taint("acme.com/recall", "batch-7", "NoSchedule")
FULL = NodeProblem(Severity.SUSPECT, Cause.NODE_LOST, "condition DiskPressure", "ScratchFull", 7.0)
OTHER = NodeProblem(Severity.FATAL, Cause.DEVICE, "condition Neuron", "Broken", 8.0)
DECISIVE = "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 nd-id=0 nc-id=0 action=TERMINATE_INSTANCE"


def rule(action: RuleAction, **changes: Any) -> tuple[RecoveryRule, ...]:
    return (RecoveryRule(cause=Cause.DEVICE, action=action, **changes),)


def node(*conditions: NodeCondition, taints: tuple[Taint, ...] = ()) -> NodeView:
    return NodeView(name="n", conditions=conditions, taints=taints)


@pytest.mark.parametrize(
    ("view", "rules"),
    [
        (node(BAD_DISK), rule(RuleAction.AVOID_NODE, reason="ScratchFull")),
        (node(BAD_DISK), rule(RuleAction.AVOID_NODE, message="/scratch")),
    ],
)
def test_a_rule_decides_what_a_bad_condition_means(view: NodeView, rules: tuple[RecoveryRule, ...]) -> None:
    worst, second = with_rules(view, (FULL, OTHER), rules)
    assert worst == OTHER
    assert (second.severity, second.cause, second.source, second.since) == (
        Severity.DRAIN,
        Cause.DEVICE,
        "condition DiskPressure",
        7.0,
    )
    assert second.message.startswith("no space on /scratch (")


def test_a_rule_that_restarts_in_place_takes_a_problem_away() -> None:
    assert with_rules(node(BAD_DISK), (FULL, OTHER), rule(RuleAction.RESTART_IN_PLACE, reason="ScratchFull")) == (
        OTHER,
    )


def test_a_condition_that_is_not_bad_and_one_that_no_rule_names_are_as_they_were() -> None:
    named = rule(RuleAction.AVOID_NODE, reason="ScratchFull")
    assert with_rules(node(FINE_DISK), (OTHER,), named) == (OTHER,)
    assert with_rules(node(BAD_DISK), (FULL,), rule(RuleAction.AVOID_NODE, reason="Another")) == (FULL,)
    assert with_rules(node(BAD_DISK), (FULL,), ()) == (FULL,)


def test_a_rule_names_a_taint_by_its_key() -> None:
    (found,) = with_rules(node(taints=(TAINT,)), (), rule(RuleAction.AVOID_NODE, reason="acme.com/recall"))
    assert (found.severity, found.source, found.reason) == (Severity.DRAIN, "taint acme.com/recall", "batch-7")
    bare = Taint("acme.com/recall")
    (found,) = with_rules(node(taints=(bare,)), (), rule(RuleAction.AVOID_NODE, reason="acme.com/recall"))
    assert found.reason == "NoSchedule"


@pytest.mark.parametrize(
    ("view", "seen"),
    [
        (node(BAD_DISK), "condition DiskPressure (ScratchFull) no space on /scratch"),
        (node(FINE_DISK), None),
    ],
)
def test_a_rule_stops_the_job_for_a_condition(view: NodeView, seen: str | None) -> None:
    found = stopping_sign(view, rule(RuleAction.STOP, reason="ScratchFull"))
    assert (None if found is None else found[1]) == seen
    assert stopping_sign(view, rule(RuleAction.AVOID_NODE, reason="ScratchFull")) is None
    assert stopping_sign(view, ()) is None


def test_a_rule_stops_the_job_for_a_taint() -> None:
    found = stopping_sign(node(BAD_DISK, taints=(TAINT,)), rule(RuleAction.STOP, reason="acme.com/recall"))
    assert found is not None
    assert found[1] == "taint acme.com/recall (batch-7)"
    assert found[0].cause is Cause.DEVICE
    assert stopping_sign(node(taints=(Taint("other"),)), rule(RuleAction.STOP, reason="acme.com/recall")) is None


def with_kernel_lines(*lines: str) -> Any:
    events = tuple(KernelEvent(sequence=at, line=line, at=float(at)) for at, line in enumerate(lines))
    return heartbeat(0, kernel=events)


def test_a_rule_comes_before_the_entry_of_a_kernel_line_in_the_table() -> None:
    beat = with_kernel_lines(DECISIVE)
    plain = kernel_problem(beat, ())
    assert plain is not None
    assert plain.severity is Severity.FATAL
    ruled = kernel_problem(beat, rule(RuleAction.AVOID_NODE, message="SRAM_UNCORRECTABLE"))
    assert ruled is not None
    assert (ruled.severity, ruled.cause, ruled.message) == (Severity.DRAIN, Cause.DEVICE, DECISIVE)
    assert kernel_problem(beat, rule(RuleAction.RESTART_IN_PLACE, message="SRAM_UNCORRECTABLE")) is None


def test_the_newest_line_that_means_something_decides() -> None:
    spared = rule(RuleAction.RESTART_IN_PLACE, message="a harmless word")
    found = kernel_problem(with_kernel_lines(DECISIVE, "eth0: link up", "a harmless word"), spared)
    assert found is not None
    assert found.message == DECISIVE
    assert kernel_problem(with_kernel_lines("eth0: link up"), spared) is None
    assert kernel_problem(None, spared) is None
