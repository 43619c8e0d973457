"""Kueue's objects as a real controller (0.19.2) wrote them: a Workload evicted, returned, and admitted again."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainium_operator.cluster.cache.kueue_views import (
    parse_flavor,
    parse_priority_class,
    parse_workload,
    set_conditions,
)
from trainium_operator.plan.features.kueue.requests import build_quota_return
from trainium_operator.plan.model.quota import PodSetGrant, WorkloadCondition, WorkloadConditionView

NOW = "2026-11-23T09:20:00Z"


def read_workload(name: str) -> dict[str, Any]:
    workload: dict[str, Any] = json.loads((Path(__file__).parent / "kueue_recorded" / f"{name}.json").read_text())
    return workload


def test_an_eviction_overrides_the_admission() -> None:
    view = parse_workload(read_workload("evicted"))
    assert view.is_true(WorkloadCondition.ADMITTED)
    assert view.is_true(WorkloadCondition.EVICTED)
    assert (view.admitted, view.holds_quota) == (False, True)
    assert view.grants == (PodSetGrant(name="workers", count=2, flavors=("trn1",)),)
    assert view.requested_pods == {"workers": 2}


def test_returned_quota_is_not_held_and_readmission_ends_the_eviction() -> None:
    cleared, readmitted = parse_workload(read_workload("cleared")), parse_workload(read_workload("readmitted"))
    assert (cleared.admitted, cleared.holds_quota, cleared.is_true(WorkloadCondition.EVICTED)) == (False, False, True)
    assert (readmitted.admitted, readmitted.is_true(WorkloadCondition.EVICTED)) == (True, False)


def test_the_conditions_that_return_quota_equal_the_recorded_ones() -> None:
    raw = read_workload("evicted")
    written = set_conditions(raw["status"]["conditions"], build_quota_return(parse_workload(raw)).conditions, NOW)
    taken = read_workload("cleared")["status"]["conditions"]

    def without_messages(conditions: list[dict[str, Any]]) -> set[tuple[str, str, str, str]]:
        return {
            (condition["type"], condition["status"], condition["reason"], condition["lastTransitionTime"])
            for condition in conditions
        }

    assert without_messages(written) == without_messages(taken)


def test_the_time_of_a_condition_changes_only_with_its_status() -> None:
    old = [{"type": "PodsReady", "status": "True", "reason": "Started", "message": "", "lastTransitionTime": "then"}]
    again = WorkloadConditionView(WorkloadCondition.PODS_READY, is_true=True, reason="Recovered", message="x" * 5000)
    (same,) = set_conditions(old, [again], NOW)
    assert (same["lastTransitionTime"], same["reason"], len(same["message"])) == ("then", "Recovered", 1024)


def test_a_workload_without_a_part_is_foreign() -> None:
    raw = read_workload("evicted")
    del raw["metadata"]["annotations"]["trainium.dev/part"]
    with pytest.raises(KeyError):
        parse_workload(raw)


def test_ready_admission_checks_update_pod_sets() -> None:
    raw = read_workload("readmitted")
    update = {"name": "workers", "nodeSelector": {"zone": "a"}, "tolerations": [{"key": "k", "operator": "Exists"}]}
    raw["status"]["admissionChecks"] = [
        {"name": "a", "state": "Ready", "podSetUpdates": [update]},
        {"name": "b", "state": "Pending", "podSetUpdates": [{"name": "workers", "nodeSelector": {"zone": "b"}}]},
    ]
    found = parse_workload(raw).updates["workers"]
    assert found.node_selector == {"zone": "a"}
    assert found.tolerations == ({"key": "k", "operator": "Exists"},)


def test_flavors_and_priorities_are_read_without_what_plans_do_not_need() -> None:
    assert parse_flavor({"metadata": {"name": "any"}}).node_selector == {}
    flavor = parse_flavor({"spec": {"nodeLabels": {"pool": "blue"}, "nodeTaints": [], "tolerations": [{"key": "p"}]}})
    assert (flavor.node_selector, flavor.tolerations) == ({"pool": "blue"}, ({"key": "p"},))
    assert parse_priority_class({"value": 100}) == (100, False)
    assert parse_priority_class({"value": 1, "globalDefault": True}) == (1, True)
