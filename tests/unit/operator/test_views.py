from __future__ import annotations

from typing import Any

import pytest

from trainium_contract.worker_env import LABEL_JOB
from trainium_operator.cluster.views import child_record, job_record, node_view, pod_view
from trainium_operator.plan import names
from trainium_operator.plan.model import NodeReadiness, PodPhase

CREATED = "2026-01-01T00:00:00Z"


def pod(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "j-w-7",
            "namespace": "ns",
            "uid": "u",
            "creationTimestamp": CREATED,
            "labels": {LABEL_JOB: "j"},
            **metadata,
        },
        "spec": {"nodeName": "n", "containers": [{"name": "worker"}, {"name": "aside"}]},
        "status": status or {},
    }


def ended(name: str = "worker", **state: Any) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": 1, "reason": "Error", **state}}}


def test_a_running_pod() -> None:
    view = pod_view(
        pod(
            {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
            }
        )
    )
    assert (view.ordinal, view.phase, view.ip, view.node) == (7, PodPhase.RUNNING, "10.0.0.1", "n")
    assert view.ready
    assert view.scheduled
    assert not view.deleting
    assert view.created == 1767225600.0


def test_a_new_pod_without_any_status_is_pending() -> None:
    assert pod_view(pod()).phase is PodPhase.PENDING


def test_the_worker_is_found_by_name_whatever_the_order_of_statuses() -> None:
    statuses = [ended("aside", exitCode=0), ended(exitCode=137, reason="OOMKilled", finishedAt=CREATED)]
    view = pod_view(pod({"phase": "Failed", "containerStatuses": statuses}))
    assert (view.exit_code, view.reason, view.finished) == (137, "OOMKilled", 1767225600.0)


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        ({"reason": "Evicted", "message": "disk", "containerStatuses": [ended()]}, "Evicted", "disk"),
        ({"containerStatuses": [ended(message="last words")]}, "Error", "last words"),
        (
            {"containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            "ImagePullBackOff",
            "",
        ),
        (
            {"initContainerStatuses": [ended("prepare", message="no disk")], "containerStatuses": []},
            "Error",
            "init container prepare: no disk",
        ),
    ],
)
def test_the_most_telling_reason(status: dict[str, Any], reason: str, message: str) -> None:
    view = pod_view(pod(status))
    assert (view.reason, view.message) == (reason, message)


def test_disruption_deletion_and_lack_of_room_are_seen() -> None:
    conditions = [
        {"type": "DisruptionTarget", "status": "True"},
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"},
    ]
    raw = pod({"phase": "Pending", "conditions": conditions}, deletionTimestamp=CREATED)
    raw["spec"].pop("nodeName")
    view = pod_view(raw)
    assert view.disrupted
    assert view.deleting
    assert not view.scheduled
    assert view.unschedulable_message == "0/3 nodes"


def test_a_pod_with_our_labels_and_a_foreign_name_is_refused() -> None:
    with pytest.raises(ValueError, match="not a worker's name"):
        pod_view(pod(name="other"))


@pytest.mark.parametrize(
    ("conditions", "ready", "since"),
    [
        ([{"type": "Ready", "status": "True", "lastTransitionTime": CREATED}], NodeReadiness.TRUE, None),
        ([{"type": "Ready", "status": "Unknown", "lastTransitionTime": CREATED}], NodeReadiness.UNKNOWN, 1767225600.0),
        ([], NodeReadiness.UNKNOWN, None),
    ],
)
def test_nodes(conditions: list[Any], ready: NodeReadiness, since: float | None) -> None:
    raw = {
        "metadata": {"name": "n"},
        "spec": {"unschedulable": True, "taints": [{"key": "k"}]},
        "status": {"conditions": conditions},
    }
    view = node_view(raw)
    assert (view.ready, view.unready_since, view.schedulable, view.taints) == (ready, since, False, ("k",))


def test_a_job_that_cannot_be_read_says_where() -> None:
    metadata = {"name": "j", "namespace": "ns", "uid": "u", "resourceVersion": "1"}
    record = job_record({"metadata": metadata, "spec": {"workers": {"replicas": -1}}})
    assert record.view is None
    assert record.error.startswith("workers.replicas: ")
    good = job_record({"metadata": metadata, "spec": {}, "status": {"fieldOfTheFuture": 1}})
    assert good.view is not None


def test_a_membership_that_cannot_be_read_counts_as_none() -> None:
    raw = {"metadata": {"name": "m", "annotations": {names.ANNOTATION_CONTENT_HASH: "h"}}}
    assert child_record(raw).content_hash == "h"
    for text in ("{", "{}", '{"generation": 0}'):
        assert child_record({**raw, "data": {names.MEMBERSHIP_KEY: text}}).membership is None
