"""Whatever an object or a message holds, reading it ends with a value or with the one error that is expected.

Real objects are changed in a few random places; `make test-long TRIALS=1000` tries as many as a person has time for.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.testing.fuzz.objects import (
    CLAIM,
    FLAVOR,
    HEARTBEAT,
    MACHINE,
    NODE,
    POD,
    PRIORITY,
    REGISTER,
    SLICE,
    WORKLOAD,
)
from tests.testing.suite.any_json import ANYTHING, PATIENT, as_sent, changed
from trainium_contract.wire.messages import HeartbeatRequest, RegisterRequest
from trainium_operator.cluster.cache.device_views import claim_view, slice_view
from trainium_operator.cluster.cache.kueue_views import flavor_view, priority_view, workload_view
from trainium_operator.cluster.cache.membership_record import membership_of
from trainium_operator.cluster.cache.reflector import UNREADABLE
from trainium_operator.cluster.cache.views import child_record, job_record, node_view, pod_view
from trainium_operator.cluster.fleet.fleet_record import ACCOUNTED, decode, encode
from trainium_operator.plan.view.size import decide_size

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDED = Path(__file__).parents[3] / "testing/api/recorded"
JOB = json.loads((RECORDED / "job.json").read_text())
MEMBERSHIP = json.loads((RECORDED / "membership.json").read_text())
LONGEST_SENTENCE = 4096
"""Characters; whatever a message quotes is cut."""


def bounded(answer: object, raw: Any) -> None:
    """Check that a view has at most four times the size of its object, plus the size of an empty view."""
    assert len(repr(answer)) <= 4 * len(json.dumps(raw)) + 4096


@PATIENT
@given(changed(JOB["spec"]), changed(JOB["status"], most=12))
def test_any_job_becomes_a_record_whose_status_can_be_written_again(spec: Any, status: Any) -> None:
    record = job_record({**JOB, "spec": as_sent(spec), "status": as_sent(status)})

    assert (record.namespace, record.name) == (JOB["metadata"]["namespace"], JOB["metadata"]["name"])
    if record.view is None:
        assert 0 < len(record.error) <= LONGEST_SENTENCE
        return
    json.dumps(record.view.status.to_wire(), allow_nan=False)
    json.dumps(record.view.spec.to_wire(), allow_nan=False)
    decide_size(record.view.spec)


@PATIENT
@given(changed({"data": MEMBERSHIP.get("data", {}), "binaryData": MEMBERSHIP.get("binaryData", {})}), st.text())
def test_any_config_map_holds_a_membership_or_none(parts: Any, text: str) -> None:
    raw = {**parts, "metadata": {"annotations": {}}}  # which no object is without
    for each in (raw, {**raw, "data": {"membership.json": text}}):
        membership_of(each)
        assert child_record(each).content_hash == ""


@PATIENT
@given(
    st.dictionaries(
        st.sampled_from(["node-1", "aws.us-west-2a.i-0abc", ACCOUNTED]), changed(MACHINE) | ANYTHING, max_size=3
    ),
    st.text(),
)
def test_any_note_about_machines_is_read_without_an_error_and_can_be_written_again(
    notes: dict[str, Any], text: str
) -> None:
    data = {key: yaml.safe_dump(as_sent(note)) for key, note in notes.items()}
    for each in (data, {**data, "free": text}):
        written = encode(decode(each))
        assert encode(decode(written)) == written


@PATIENT
@given(changed(REGISTER) | ANYTHING, changed(HEARTBEAT, most=8) | ANYTHING)
def test_any_message_is_taken_or_a_validation_error(register: Any, heartbeat: Any) -> None:
    for model, message in ((RegisterRequest, register), (HeartbeatRequest, heartbeat)):
        try:
            taken = model.model_validate_json(json.dumps(message))
        except ValidationError:
            continue
        bounded(json.dumps(taken.to_wire(), allow_nan=False), message)


@pytest.mark.parametrize(
    ("view", "known"),
    [
        (pod_view, POD),
        (node_view, NODE),
        (workload_view, WORKLOAD),
        (flavor_view, FLAVOR),
        (priority_view, PRIORITY),
        (slice_view, SLICE),
        (claim_view, CLAIM),
    ],
)
def test_any_watched_object_is_read_or_left_out_with_an_error_that_is_expected(
    view: Callable[[Any], object], known: dict[str, Any]
) -> None:
    hash(repr(view(known)))

    @PATIENT
    @given(changed(known, most=6))
    def read(raw: Any) -> None:
        try:
            bounded(view(as_sent(raw)), raw)
        except UNREADABLE:
            return

    read()


@pytest.mark.parametrize("stamp", ["0000-12-31T00:01:00Z", "soon", 7])
def test_an_invalid_time_stamp_does_not_mark_a_pod_as_finished(stamp: Any) -> None:
    pod: Any = copy.deepcopy(POD)
    pod["metadata"]["creationTimestamp"] = stamp
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = stamp
    seen = pod_view(pod)

    assert (seen.created, seen.finished, seen.exit_code) == (0.0, None, 70)


@pytest.mark.parametrize("loss", ['"inf"', '"nan"', '"9e999"', f'"{"9" * 400}"', "1e999", "Infinity", "NaN"])
def test_a_figure_that_is_no_number_is_none_however_it_is_written(loss: str) -> None:
    message = json.dumps({**HEARTBEAT, "progress": {"step": 7, "loss": 0}}).replace('"loss": 0', f'"loss": {loss}')

    taken = HeartbeatRequest.model_validate_json(message)

    assert taken.progress is not None
    assert taken.progress.loss is None


def test_numbers_without_an_end_are_left_out() -> None:
    memory = decode({"node": "quarantines: .inf", ACCOUNTED: "uid: .nan", "node-3": "state: Permanent\n"})

    assert set(memory.machines) == {"node-3"}
    assert memory.accounted == {}


def test_a_note_that_would_unfold_to_gigabytes_is_left_out() -> None:
    laughs = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    laughs += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]
    memory = decode({"node": "\n".join([*laughs, "machine: *a11"]), "node-3": "state: Permanent\n"})

    assert set(memory.machines) == {"node-3"}
