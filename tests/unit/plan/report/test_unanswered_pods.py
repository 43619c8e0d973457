"""Pods that neither a scheduler nor a kubelet reports are named in PodsReady."""

from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.report.missing_workers import UNANSWERED_SECONDS
from trainium_operator.plan.report.reconciled import DELETION_SECONDS


def plan_with_pod(**changes: Any) -> Any:
    pod = build.pod(0, **{"phase": PodPhase.PENDING, "created": NOW - 40, "ready": False, **changes})
    status = TrainingJobStatus(desired=1, next_pod_ordinal=1)
    return make_plan(build.observation(build.job(build.spec(workers={"replicas": 1}), status=status), (pod,), {}))


UNSEEN = {"node": "", "scheduled": False, "scheduler": "volcano"}


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (UNSEEN, "Unschedulable", "no scheduler has looked at demo-w-0 for 30 s or more: does the scheduler volcano"),
        ({**UNSEEN, "scheduler": ""}, "Unschedulable", "does the scheduler default-scheduler"),
        ({"scheduled": True}, "WorkerNotStarting", "the kubelet of node node-0 has not reported demo-w-0"),
        ({**UNSEEN, "created": NOW - 5}, "WaitingForWorkers", ""),
        ({**UNSEEN, "reason": "SchedulerError", "message": "boom"}, "WorkerNotStarting", "SchedulerError boom"),
        ({**UNSEEN, "unschedulable_message": "0/3 nodes"}, "Unschedulable", "0/3 nodes"),
        (
            {"scheduled": True, "reason": "ImagePullBackOff", "message": "no"},
            "WorkerNotStarting",
            "ImagePullBackOff no",
        ),
    ],
)
def test_what_a_pending_pod_waits_for_is_named(changes: Any, reason: str, words: str) -> None:
    condition = plan_with_pod(**changes).condition(ConditionType.PODS_READY)
    assert (condition.reason, words in condition.message) == (reason, True), condition.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finalizers": ("example.com/keep",)}, "was deleted and waits for its finalizers: example.com/keep"),
        ({}, "the kubelet of node node-0 has not reported its end"),
    ],
)
def test_a_pod_whose_deletion_nobody_completes_is_named(changes: Any, words: str) -> None:
    result = plan_with_pod(deleting=True, deletion_deadline=NOW - DELETION_SECONDS - 1, **changes)
    condition = result.condition(ConditionType.RECONCILED)
    assert (condition.reason, words in condition.message) == ("DeletionPending", True), condition.message
    early = plan_with_pod(deleting=True, deletion_deadline=NOW - 1, **changes)
    assert all(condition.type is not ConditionType.RECONCILED for condition in early.status.conditions)
    assert early.requeue_after is not None
    assert early.requeue_after <= DELETION_SECONDS


def test_a_new_pod_is_checked_again_in_time() -> None:
    result = plan_with_pod(**{**UNSEEN, "created": NOW - 5})
    assert result.requeue_after is not None
    assert result.requeue_after <= UNANSWERED_SECONDS - 5
