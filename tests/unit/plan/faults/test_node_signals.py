"""Signals of a node's health by the demand of a job; `every_sign.txt` has what each sign means by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_builders import NOW

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_operator.plan.faults.node_signals import Demand, problems_of, tolerates
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, NodeView, Taint

GOOD = NodeView(name="n")
TRN1 = replace(GOOD, labels={names.LABEL_INSTANCE_TYPE: "trn1.32xlarge"}, capacity={names.NEURON: 16, names.EFA: 8})
WHOLE_NODE = Demand({names.NEURON: 16, names.EFA: 8})
FATAL, DRAIN, SUSPECT = Severity.FATAL, Severity.DRAIN, Severity.SUSPECT


def with_condition(kind: str, status: NodeReadiness, reason: str = "Why") -> NodeView:
    return replace(GOOD, conditions=(NodeCondition(kind, status, reason, "", NOW - 5),))


def test_a_node_without_any_signal_is_not_called_bad() -> None:
    assert problems_of(GOOD) == ()
    assert problems_of(replace(TRN1, capacity={}), WHOLE_NODE) == (), "a missing capacity is unknown"


@pytest.mark.parametrize(
    ("capacity", "demand", "expected"),
    [
        ({names.NEURON: 15, names.EFA: 8}, WHOLE_NODE, [(DRAIN, Cause.DEVICE)]),
        ({names.NEURON: 15, names.EFA: 8}, None, [(DRAIN, Cause.DEVICE)]),
        ({names.NEURON: 15, names.EFA: 8}, Demand({names.NEURON: 8}), [(SUSPECT, Cause.DEVICE)]),
        ({names.NEURON: 0, names.EFA: 8}, WHOLE_NODE, [(SUSPECT, Cause.DEVICE)]),
        ({names.NEURON: 16, names.EFA: 7}, WHOLE_NODE, [(DRAIN, Cause.NETWORK)]),
        ({names.NEURON: 16, names.EFA: 1}, Demand({names.NEURON: 16, names.EFA: 1}), []),
        ({names.NEURON: 16, names.EFA: 8}, WHOLE_NODE, []),
        ({names.NEURON: 32, names.EFA: 8}, WHOLE_NODE, []),
        ({names.NEURON: 12}, Demand({}), [(SUSPECT, Cause.DEVICE)]),
    ],
)
def test_lost_devices_show_as_missing_capacity(capacity: Any, demand: Demand | None, expected: Any) -> None:
    found = problems_of(replace(TRN1, capacity=capacity), demand)
    assert [(problem.severity, problem.cause) for problem in found] == expected


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
    assert problems_of(replace(GOOD, taints=(taint,)), Demand({})) == ()


def test_a_taint_that_the_job_tolerates_for_good_is_no_problem_of_that_job() -> None:
    node = replace(GOOD, taints=(Taint("dedicated", "training", "NoExecute"),))
    mine = {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoExecute"}
    assert problems_of(node, Demand({}, (mine,))) == ()
    assert problems_of(node, Demand({}, ({**mine, "value": "other"},))) != ()
    assert problems_of(node, Demand({}, ({**mine, "tolerationSeconds": 60},))) != (), "it must leave in a minute"
    assert problems_of(node) == (), "the fleet does not know who tolerates it"
    assert tolerates(({"operator": "Exists"},), node.taints[0])
    assert not tolerates(({"operator": "Exists", "key": "x"}, {}), node.taints[0])


def test_a_node_that_is_being_deleted_is_leaving() -> None:
    (problem,) = problems_of(replace(GOOD, deleting=True))
    assert (problem.severity, problem.cause, problem.source) == (DRAIN, Cause.PREEMPTED, "deletion")


def test_the_worst_problem_comes_first() -> None:
    node = replace(with_condition("NeuronHealth", NodeReadiness.TRUE), deleting=True, ready=NodeReadiness.FALSE)
    assert [problem.severity for problem in problems_of(node)] == [FATAL, DRAIN, SUSPECT]
