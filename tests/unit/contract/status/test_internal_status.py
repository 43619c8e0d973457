"""The internal and the public status have no common field, and no view reads an internal field."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, IdleNodesStatus, TrainingJobStatus
from trainium_contract.status.conditions import Condition, ConditionStatus, ConditionType
from trainium_contract.status.failed_spec import FailedSpecStatus
from trainium_contract.status.internal import (
    INTERNAL_KEY,
    FailureRecord,
    GangStatus,
    InternalGoodput,
    InternalIdleNodes,
    InternalStatus,
    StepWindow,
    list_internal_fields,
    pack_internal,
    unpack_internal,
)
from trainium_contract.status.ledger import PublicGoodput
from trainium_contract.status.public import PublicIdleNodes, PublicStatus

ROOT = Path(__file__).parents[4]


def test_these_fields_are_internal_and_all_others_are_public() -> None:
    assert list_internal_fields() == {
        "activity", "committedStep", "failures", "gang", "leavingSince", "nextPodOrdinal", "roleStates",
        "startFailures", "waitingSince",
        "goodput.countedStep", "goodput.earlierNodeSeconds", "goodput.earlierSeconds", "goodput.starting",
        "goodput.window",
        "idleNodes.askedAt", "idleNodes.failedRequests", "idleNodes.retryAt",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("whole", "public", "internal"),
    [
        (TrainingJobStatus, PublicStatus, InternalStatus),
        (GoodputStatus, PublicGoodput, InternalGoodput),
        (IdleNodesStatus, PublicIdleNodes, InternalIdleNodes),
    ],
)
def test_the_parts_have_no_field_in_common_and_are_the_whole(whole: Any, public: Any, internal: Any) -> None:
    assert public.model_fields.keys() & internal.model_fields.keys() == set()
    assert public.model_fields.keys() | internal.model_fields.keys() == whole.model_fields.keys()


def status_with_internal_state() -> TrainingJobStatus:
    failures = tuple(FailureRecord(at=float(number), cause=Cause.CRASH, pod=f"pod-{number}") for number in range(128))
    return TrainingJobStatus(
        failures=failures,
        next_pod_ordinal=7,
        gang=GangStatus(releases=2),
        goodput=GoodputStatus(ratio=0.5, counted_step=9, window=StepWindow(samples=(0.25,) * 15)),
        idle_nodes=IdleNodesStatus(wanted=2, asked_at=3.5),
    )


def test_the_stored_status_has_the_internal_fields_in_one_text() -> None:
    status = status_with_internal_state()
    stored = pack_internal(status)
    assert isinstance(stored[INTERNAL_KEY], str)
    assert {"failures", "gang", "nextPodOrdinal"} & stored.keys() == set()
    assert {"countedStep", "window"} & stored["goodput"].keys() == set()
    assert (stored["goodput"]["ratio"], stored["idleNodes"]) == (0.5, {"taken": 0, "wanted": 2})
    assert TrainingJobStatus.model_validate(unpack_internal(json.loads(json.dumps(stored)))) == status
    assert INTERNAL_KEY not in pack_internal(TrainingJobStatus())


def test_fields_without_a_value_are_not_stored() -> None:
    """`kubectl describe` shows each stored field in a separate line."""
    condition = Condition(
        type=ConditionType.READY, status=ConditionStatus.TRUE, reason="Training", last_transition_time="now"
    )
    status = TrainingJobStatus(conditions=(condition,), verdict="", replicas=0)
    stored = pack_internal(status)
    assert not {"verdict", "artifacts", "history", "compiled", "hangDetection"} & stored.keys()
    assert stored["conditions"][0]["message"] == "", "as in a metav1.Condition"
    failed = pack_internal(TrainingJobStatus(failed_spec=FailedSpecStatus(changes=())))
    assert failed["failedSpec"]["changes"] == [], "no changes are not unknown ones"
    assert stored["replicas"] == 0, "the scale subresource and the columns read it"
    assert TrainingJobStatus.model_validate(unpack_internal(stored)) == status


def test_the_text_changes_no_public_field_and_one_that_is_no_object_is_refused() -> None:
    edited = {"phase": "Running", INTERNAL_KEY: '{"phase": "Failed", "nextPodOrdinal": 3, "goodput": 1}'}
    assert unpack_internal(edited) == {"phase": "Running", "nextPodOrdinal": 3}
    for text in ("", "[]", "{"):
        with pytest.raises(ValueError):  # noqa: PT011 - any message
            unpack_internal({INTERNAL_KEY: text})


def test_client_pages_and_views_read_no_internal_field() -> None:
    """A view that reads the raw status has to name a field."""
    names = {name for name in list_internal_fields() if "." not in name}
    folders = ("client/trainium_client", "contract/trainium_contract/pages", "contract/trainium_contract/views")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 30
    reads = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert reads == []
