"""Signals of the health of a node, by the demand and the rules of a job; `every_sign.txt` has each sign by itself."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from trainium_contract.accelerators import EFA, NEURON
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.faults.rules import RecoveryRule, RuleAction
from trainium_contract.wire.messages import KernelEvent
from trainium_operator.plan.faults.node_signals import (
    NodeProblem,
    PodRequirements,
    apply_rules,
    find_kernel_problem,
    find_node_problems,
    find_stopping_signal,
    tolerates,
)
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, NodeView, Taint

GOOD = NodeView(name="n")
TRN1 = replace(GOOD, labels={names.LABEL_INSTANCE_TYPE: "trn1.32xlarge"}, capacity={NEURON: 16, EFA: 8})
WHOLE_NODE = PodRequirements({NEURON: 16, EFA: 8})
FATAL, DRAIN, SUSPECT = Severity.FATAL, Severity.DRAIN, Severity.SUSPECT


def with_condition(kind: str, status: NodeReadiness, reason: str = "Why") -> NodeView:
    return replace(GOOD, conditions=(NodeCondition(kind, status, reason, "", NOW - 5),))


def test_a_node_without_signals_has_no_problem() -> None:
    assert find_node_problems(GOOD) == ()
    assert find_node_problems(replace(TRN1, capacity={}), WHOLE_NODE) == (), "a missing capacity is unknown"


@pytest.mark.parametrize(
    ("capacity", "demand", "expected"),
    [
        ({NEURON: 15, EFA: 8}, WHOLE_NODE, [(DRAIN, Cause.DEVICE)]),
        ({NEURON: 15, EFA: 8}, None, [(DRAIN, Cause.DEVICE)]),
        ({NEURON: 15, EFA: 8}, PodRequirements({NEURON: 8}), [(SUSPECT, Cause.DEVICE)]),
        ({NEURON: 0, EFA: 8}, WHOLE_NODE, [(SUSPECT, Cause.DEVICE)]),
        ({NEURON: 16, EFA: 7}, WHOLE_NODE, [(DRAIN, Cause.NETWORK)]),
        ({NEURON: 16, EFA: 1}, PodRequirements({NEURON: 16, EFA: 1}), []),
        ({NEURON: 16, EFA: 8}, WHOLE_NODE, []),
        ({NEURON: 32, EFA: 8}, WHOLE_NODE, []),
        ({NEURON: 12}, PodRequirements({}), [(SUSPECT, Cause.DEVICE)]),
    ],
)
def test_lost_devices_show_as_missing_capacity(capacity: Any, demand: PodRequirements | None, expected: Any) -> None:
    problems = find_node_problems(replace(TRN1, capacity=capacity), demand)
    assert [(problem.severity, problem.cause) for problem in problems] == expected


@pytest.mark.parametrize(
    "taint",
    [
        Taint("aws.amazon.com/neuron"),
        Taint("dedicated", "training"),
        Taint("node.kubernetes.io/not-ready", "", "NoExecute"),
        Taint("node.kubernetes.io/unschedulable"),
        Taint("node.kubernetes.io/disk-pressure"),
        Taint(names.TAINT_QUARANTINED, "Device"),
    ],
)
def test_taints_that_are_no_signal(taint: Taint) -> None:
    assert find_node_problems(replace(GOOD, taints=(taint,)), PodRequirements({})) == ()


def test_a_permanently_tolerated_taint_is_no_problem() -> None:
    node = replace(GOOD, taints=(Taint("dedicated", "training", "NoExecute"),))
    toleration = {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoExecute"}
    assert find_node_problems(node, PodRequirements({}, (toleration,))) == ()
    assert find_node_problems(node, PodRequirements({}, ({**toleration, "value": "other"},))) != ()
    assert find_node_problems(node, PodRequirements({}, ({**toleration, "tolerationSeconds": 60},))) != (), (
        "it must leave in a minute"
    )
    assert find_node_problems(node) == (), "tolerations of the pod are unknown"
    assert tolerates(({"operator": "Exists"},), node.taints[0])
    assert not tolerates(({"operator": "Exists", "key": "x"}, {}), node.taints[0])


def test_a_node_that_is_being_deleted_is_leaving() -> None:
    (problem,) = find_node_problems(replace(GOOD, deleting=True))
    assert (problem.severity, problem.cause, problem.source) == (DRAIN, Cause.PREEMPTED, "deletion")


def test_the_worst_problem_comes_first() -> None:
    node = replace(with_condition("NeuronHealth", NodeReadiness.TRUE), deleting=True, ready=NodeReadiness.FALSE)
    assert [problem.severity for problem in find_node_problems(node)] == [FATAL, DRAIN, SUSPECT]


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
def test_a_rule_overrides_a_bad_condition(view: NodeView, rules: tuple[RecoveryRule, ...]) -> None:
    worst, second = apply_rules(view, (FULL, OTHER), rules)
    assert worst == OTHER
    assert (second.severity, second.cause, second.source, second.since) == (
        Severity.DRAIN,
        Cause.DEVICE,
        "condition DiskPressure",
        7.0,
    )
    assert second.message.startswith("no space on /scratch (")


def test_a_restart_in_place_rule_removes_a_problem() -> None:
    assert apply_rules(node(BAD_DISK), (FULL, OTHER), rule(RuleAction.RESTART_IN_PLACE, reason="ScratchFull")) == (
        OTHER,
    )


def test_rules_do_not_change_good_or_unnamed_conditions() -> None:
    rules = rule(RuleAction.AVOID_NODE, reason="ScratchFull")
    assert apply_rules(node(FINE_DISK), (OTHER,), rules) == (OTHER,)
    assert apply_rules(node(BAD_DISK), (FULL,), rule(RuleAction.AVOID_NODE, reason="Another")) == (FULL,)
    assert apply_rules(node(BAD_DISK), (FULL,), ()) == (FULL,)


def test_a_rule_names_a_taint_by_its_key() -> None:
    (problem,) = apply_rules(node(taints=(TAINT,)), (), rule(RuleAction.AVOID_NODE, reason="acme.com/recall"))
    assert (problem.severity, problem.source, problem.reason) == (Severity.DRAIN, "taint acme.com/recall", "batch-7")
    bare = Taint("acme.com/recall")
    (problem,) = apply_rules(node(taints=(bare,)), (), rule(RuleAction.AVOID_NODE, reason="acme.com/recall"))
    assert problem.reason == "NoSchedule"


@pytest.mark.parametrize(
    ("view", "description"),
    [
        (node(BAD_DISK), "condition DiskPressure (ScratchFull) no space on /scratch"),
        (node(FINE_DISK), None),
    ],
)
def test_a_rule_stops_the_job_for_a_condition(view: NodeView, description: str | None) -> None:
    match = find_stopping_signal(view, rule(RuleAction.STOP, reason="ScratchFull"))
    assert (None if match is None else f"{match[0]} {match[0].message}") == description
    assert find_stopping_signal(view, rule(RuleAction.AVOID_NODE, reason="ScratchFull")) is None
    assert find_stopping_signal(view, ()) is None


def test_a_rule_stops_the_job_for_a_taint() -> None:
    match = find_stopping_signal(node(BAD_DISK, taints=(TAINT,)), rule(RuleAction.STOP, reason="acme.com/recall"))
    assert match is not None
    assert (str(match[0]), match[1].cause) == ("taint acme.com/recall (batch-7)", Cause.DEVICE)
    assert find_stopping_signal(node(taints=(Taint("other"),)), rule(RuleAction.STOP, reason="acme.com/recall")) is None


def with_kernel_lines(*lines: str) -> Any:
    events = tuple(KernelEvent(sequence=number, line=line, at=float(number)) for number, line in enumerate(lines))
    return build.heartbeat(0, kernel=events)


def test_a_rule_overrides_the_table_for_a_kernel_line() -> None:
    beat = with_kernel_lines(DECISIVE)
    plain = find_kernel_problem(beat, ())
    assert plain is not None
    assert plain.severity is Severity.FATAL
    ruled = find_kernel_problem(beat, rule(RuleAction.AVOID_NODE, message="SRAM_UNCORRECTABLE"))
    assert ruled is not None
    assert (ruled.severity, ruled.cause, ruled.message) == (Severity.DRAIN, Cause.DEVICE, DECISIVE)
    assert find_kernel_problem(beat, rule(RuleAction.RESTART_IN_PLACE, message="SRAM_UNCORRECTABLE")) is None


def test_the_newest_matching_line_decides() -> None:
    spared = rule(RuleAction.RESTART_IN_PLACE, message="a harmless word")
    problem = find_kernel_problem(with_kernel_lines(DECISIVE, "eth0: link up", "a harmless word"), spared)
    assert problem is not None
    assert problem.message == DECISIVE
    assert find_kernel_problem(with_kernel_lines("eth0: link up"), spared) is None
    assert find_kernel_problem(None, spared) is None
