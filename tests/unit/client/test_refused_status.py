"""Show the newest status of a job, which the API server may have refused."""

import json
from typing import Any

import pytest

from trainium_client.read import apply_refused_status
from trainium_contract.wire.recorded_membership import REFUSAL_KEY, STATUS_KEY

JOB: dict[str, Any] = {"metadata": {"name": "llama", "uid": "1"}, "status": {"phase": "Running", "refusedWrites": 3}}


def record(count: int, uid: str = "1") -> dict[str, Any]:
    return {
        "metadata": {"name": "llama-membership", "ownerReferences": [{"uid": uid}]},
        "data": {STATUS_KEY: json.dumps({"phase": "Recovering", "refusedWrites": count}), REFUSAL_KEY: "no label"},
    }


def test_a_newer_status_that_was_refused_is_shown_with_the_reason() -> None:
    job, (sentence,) = apply_refused_status(JOB, record(4))
    assert job["status"]["phase"] == "Recovering"
    assert "ConfigMap llama-membership" in sentence
    assert sentence.endswith("no label")


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(record(3), id="an older one"),
        pytest.param(record(4, uid="2"), id="that of an earlier job"),
        pytest.param({"metadata": {}, "data": {STATUS_KEY: "{"}}, id="one that is no JSON"),
        pytest.param({"metadata": {}, "data": ["x"]}, id="malformed data"),
        pytest.param({"metadata": {}, "binaryData": {}}, id="none"),
    ],
)
def test_another_status_is_not_shown(other: dict[str, Any]) -> None:
    assert apply_refused_status(JOB, other) == (JOB, ())
