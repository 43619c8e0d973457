from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_builders import pod

from trainium_contract.exit_codes import Blame, Cause, Response
from trainium_contract.faults import KERNEL_ROWS, NO_FAULT_CAUSES, STATUSES, USER_CAUSES
from trainium_contract.recovery import RecoveryRule
from trainium_operator.plan.faults.causes import (
    budget_of,
    cause_of_condition,
    cause_of_failed_pod,
    cause_of_label,
    cause_of_taint,
    died_by_itself,
    meaning_of_pod,
    row_of,
    severity,
    suspects_node,
)
from trainium_operator.plan.faults.fault_table import CAUSES, CONDITIONS, LABELS, POD_REASONS, TAINTS, Budget
from trainium_operator.plan.model.observed import PodPhase


def failed(**changes: Any) -> Any:
    return replace(pod(1, phase=PodPhase.FAILED), **changes)


def test_every_cause_has_one_row() -> None:
    assert [row.cause for row in CAUSES] == list(dict.fromkeys(row.cause for row in CAUSES))
    assert {row.cause for row in CAUSES} == set(Cause)
    assert sorted(severity(cause) for cause in Cause) == list(range(len(Cause)))


@pytest.mark.parametrize("cause", Cause)
def test_users_errors_suspect_no_node_and_infrastructure_never_uses_the_process_budget(cause: Cause) -> None:
    row = row_of(cause)
    if row.blame is Blame.USER:
        assert not suspects_node(cause)
        assert cause in USER_CAUSES
    if row.blame in (Blame.NODE, Blame.PEER, Blame.STORAGE):
        assert budget_of(cause) is not Budget.PROCESS
    if cause in NO_FAULT_CAUSES:
        assert budget_of(cause) is None
        assert not suspects_node(cause)
    if row.again is Response.REPLACE_NODE:
        assert suspects_node(cause)


def test_the_rows_of_the_contract_agree_with_the_rows_of_their_causes() -> None:
    for sign in (*STATUSES, *KERNEL_ROWS):
        row, verdict = row_of(sign.verdict.cause), sign.verdict
        if row.blame is Blame.USER:
            assert verdict.blame is Blame.USER
        if Response.REPLACE_NODE in (verdict.response, verdict.again):
            assert row.suspects_node, sign.name


def test_a_lost_peer_is_the_least_telling_cause_and_a_users_error_the_most() -> None:
    assert severity(Cause.PEER_LOST) == len(Cause) - 1
    assert severity(Cause.USER_CODE) == 0
    assert severity(Cause.DEVICE) < severity(Cause.CRASH) < severity(Cause.NODE_LOST) < severity(Cause.POD_LOST)


@pytest.mark.parametrize(
    ("kind", "reason", "cause"),
    [
        ("NeuronHealth", "NeuronHasError_SRAM_UNCORRECTABLE_ERROR", Cause.DEVICE),
        ("AcceleratedHardwareReady", "NeuronDMAError", Cause.DEVICE),
        ("AcceleratedHardwareReady", "", Cause.DEVICE),
        ("NetworkingReady", "InterfaceNotUp", Cause.NETWORK),
        ("KernelReady", "ForkFailedOutOfPIDs", Cause.HOST),
        ("StorageReady", "IODelays", Cause.HOST),
        ("ContainerRuntimeReady", "PodStuckTerminating", Cause.HOST),
        ("MemoryPressure", "", Cause.HOST),
        ("DiskPressure", "", Cause.HOST),
        ("PIDPressure", "", Cause.HOST),
        ("Ready", "NodeStatusUnknown", Cause.NODE_LOST),
        ("Ready", "KubeletNotReady", Cause.HOST),
        ("MyOwnCondition", "", None),
    ],
)
def test_node_conditions_have_causes(kind: str, reason: str, cause: Cause | None) -> None:
    assert cause_of_condition(kind, reason) is cause


@pytest.mark.parametrize(
    ("key", "cause"),
    [
        ("node.kubernetes.io/unreachable", Cause.NODE_LOST),
        ("node.kubernetes.io/disk-pressure", Cause.HOST),
        ("karpenter.sh/disrupted", Cause.PREEMPTED),
        ("aws-node-termination-handler/spot-itn", Cause.PREEMPTED),
        ("aws-node-termination-handler/scheduled-maintenance", Cause.PREEMPTED),
        ("ToBeDeletedByClusterAutoscaler", Cause.PREEMPTED),
        ("aws.amazon.com/neuron", None),
        ("", None),
    ],
)
def test_taints_have_causes(key: str, cause: Cause | None) -> None:
    assert cause_of_taint(key) is cause


def test_labels_of_hyperpod_have_causes() -> None:
    key = "sagemaker.amazonaws.com/node-health-status"
    assert cause_of_label(key, "UnschedulablePendingReboot") is Cause.DEVICE_REPAIRABLE
    assert cause_of_label(key, "UnschedulablePendingReplacement") is Cause.DEVICE
    assert cause_of_label(key, "Schedulable") is None


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"reason": "OutOfaws.amazon.com/neuron"}, Cause.CAPACITY),
        ({"reason": "OutOfcpu"}, Cause.CAPACITY),
        ({"reason": "Evicted"}, Cause.PREEMPTED),
        ({"reason": "Shutdown"}, Cause.NODE_LOST),
        ({"reason": "OOMKilled", "exit_code": 137}, Cause.MEMORY),
        ({"reason": "StartError", "exit_code": 128}, Cause.USER_CODE),
        ({"reason": "Error", "exit_code": 80}, Cause.DEVICE),
        ({"reason": "Error", "exit_code": 137}, Cause.POD_LOST),
        ({"reason": "Error", "exit_code": 64, "disrupted": True}, Cause.PREEMPTED),
        ({}, Cause.POD_LOST),
    ],
)
def test_failed_pods_have_causes(changes: dict[str, Any], cause: Cause) -> None:
    assert cause_of_failed_pod(failed(**changes)) is cause
    assert meaning_of_pod(failed(**changes), ()).cause is cause


def test_a_container_that_cannot_start_ended_by_its_own_fault() -> None:
    assert died_by_itself(failed(reason="StartError", exit_code=128))
    assert not died_by_itself(failed(reason="OutOfcpu"))


def test_a_rule_of_the_job_says_what_a_pods_end_means() -> None:
    rule = RecoveryRule.model_validate({"reason": "OOMKilled", "cause": "UserCode", "action": "Stop"})
    assert meaning_of_pod(failed(reason="OOMKilled", exit_code=137), (rule,)).response is Response.STOP


def test_every_sign_of_the_table_leads_to_a_fault() -> None:
    found = [*POD_REASONS.values(), *CONDITIONS.values(), *TAINTS.values(), *LABELS.values()]
    assert not NO_FAULT_CAUSES & set(found)
