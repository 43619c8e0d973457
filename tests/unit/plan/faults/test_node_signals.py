"""Every signal of a node's health with its polarity, one row each."""

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


@pytest.mark.parametrize(
    ("kind", "bad", "severity", "cause"),
    [
        ("NeuronHealth", "True", FATAL, Cause.DEVICE),
        ("AcceleratedHardwareReady", "False", FATAL, Cause.DEVICE),
        ("NetworkingReady", "False", DRAIN, Cause.NETWORK),
        ("KernelReady", "False", DRAIN, Cause.HOST),
        ("StorageReady", "False", DRAIN, Cause.HOST),
        ("ContainerRuntimeReady", "False", DRAIN, Cause.HOST),
        ("KernelDeadlock", "True", DRAIN, Cause.HOST),
        ("ReadonlyFilesystem", "True", DRAIN, Cause.HOST),
        ("MemoryPressure", "True", SUSPECT, Cause.HOST),
        ("DiskPressure", "True", SUSPECT, Cause.HOST),
        ("PIDPressure", "True", SUSPECT, Cause.HOST),
        ("NetworkUnavailable", "True", SUSPECT, Cause.NETWORK),
        ("FrequentKubeletRestart", "True", SUSPECT, Cause.HOST),
    ],
)
def test_a_condition_counts_with_its_own_polarity(kind: str, bad: str, severity: Severity, cause: Cause) -> None:
    (problem,) = problems_of(with_condition(kind, NodeReadiness(bad)))
    assert (problem.severity, problem.cause) == (severity, cause)
    assert (problem.source, problem.reason, problem.since) == (f"condition {kind}", "Why", NOW - 5)
    good = NodeReadiness.FALSE if bad == "True" else NodeReadiness.TRUE
    assert problems_of(with_condition(kind, good)) == ()
    assert problems_of(with_condition(kind, NodeReadiness.UNKNOWN)) == (), "unknown is neither good nor bad"


@pytest.mark.parametrize("status", list(NodeReadiness))
def test_a_condition_that_is_not_in_the_table_is_no_signal(status: NodeReadiness) -> None:
    assert problems_of(with_condition("MoonPhaseReady", status)) == ()


def test_a_node_without_any_signal_is_not_called_bad() -> None:
    assert problems_of(GOOD) == ()
    assert problems_of(replace(TRN1, capacity={}), WHOLE_NODE) == (), "a missing capacity is unknown"


@pytest.mark.parametrize("ready", [NodeReadiness.FALSE, NodeReadiness.UNKNOWN])
def test_a_node_that_is_not_ready_is_only_suspect(ready: NodeReadiness) -> None:
    (problem,) = problems_of(replace(GOOD, ready=ready, unready_since=NOW))
    assert (problem.severity, problem.cause, problem.since) == (SUSPECT, Cause.NODE_LOST, NOW)


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
    ("taint", "severity", "cause"),
    [
        (Taint("karpenter.sh/disrupted"), DRAIN, Cause.PREEMPTED),
        (Taint("aws-node-termination-handler/spot-itn", "x"), DRAIN, Cause.PREEMPTED),
        (Taint("ToBeDeletedByClusterAutoscaler"), DRAIN, Cause.PREEMPTED),
        (Taint("node.kubernetes.io/out-of-service", "nodeshutdown", "NoExecute"), DRAIN, Cause.NODE_LOST),
        (Taint(names.LABEL_HYPERPOD_HEALTH, "Unschedulable"), SUSPECT, Cause.HOST),
        (Taint(names.LABEL_HYPERPOD_HEALTH, "UnschedulablePendingReplacement"), DRAIN, Cause.DEVICE),
        (Taint("maintenance", "", "NoExecute"), DRAIN, Cause.PREEMPTED),
    ],
)
def test_taints_that_are_a_signal_about_a_node(taint: Taint, severity: Severity, cause: Cause) -> None:
    found = problems_of(replace(GOOD, taints=(taint,)), Demand({}))
    assert [(problem.severity, problem.cause) for problem in found] == [(severity, cause)]


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


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({names.LABEL_HYPERPOD_HEALTH: "Schedulable"}, []),
        ({names.LABEL_HYPERPOD_HEALTH: "Unschedulable"}, [(SUSPECT, Cause.HOST)]),
        ({names.LABEL_HYPERPOD_HEALTH: "UnschedulablePendingReboot"}, [(DRAIN, Cause.DEVICE_REPAIRABLE)]),
        ({names.LABEL_HYPERPOD_HEALTH: "UnschedulablePendingReplacement"}, [(DRAIN, Cause.DEVICE)]),
        ({names.LABEL_HYPERPOD_DEEP_CHECK: "Failed"}, [(DRAIN, Cause.DEVICE)]),
        ({names.LABEL_HYPERPOD_DEEP_CHECK: "InProgress", names.LABEL_HYPERPOD_HEALTH: "nonsense"}, []),
    ],
)
def test_the_labels_of_hyperpod(labels: dict[str, str], expected: Any) -> None:
    found = problems_of(replace(GOOD, labels=labels))
    assert [(problem.severity, problem.cause) for problem in found] == expected


def test_a_node_that_is_being_deleted_is_leaving() -> None:
    (problem,) = problems_of(replace(GOOD, deleting=True))
    assert (problem.severity, problem.cause, problem.source) == (DRAIN, Cause.PREEMPTED, "deletion")


def test_the_worst_problem_comes_first() -> None:
    node = replace(with_condition("NeuronHealth", NodeReadiness.TRUE), deleting=True, ready=NodeReadiness.FALSE)
    assert [problem.severity for problem in problems_of(node)] == [FATAL, DRAIN, SUSPECT]
