"""Causes of a pod's end, as the operator sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_builders import pod

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.responses import Response
from trainium_contract.faults.rules import RecoveryRule
from trainium_operator.plan.faults.ends import classify_pod_failure, died_by_itself
from trainium_operator.plan.model.observed import PodPhase


def failed(**changes: Any) -> Any:
    return replace(pod(1, phase=PodPhase.FAILED), **changes)


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
    assert classify_pod_failure(failed(**changes), ()).cause is cause


def test_a_container_that_cannot_start_ended_by_its_own_fault() -> None:
    assert died_by_itself(failed(reason="StartError", exit_code=128))
    assert not died_by_itself(failed(reason="OutOfcpu"))


def test_a_rule_of_the_job_decides_what_a_pods_end_means() -> None:
    rule = RecoveryRule.model_validate({"reason": "OOMKilled", "cause": "UserCode", "action": "Stop"})
    assert classify_pod_failure(failed(reason="OOMKilled", exit_code=137), (rule,)).response is Response.STOP
