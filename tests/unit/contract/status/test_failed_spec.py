"""The spec that a job failed with is kept, and differences from it are reported."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.status.failed_spec import MAX_CHANGES, MAX_FIELDS, compare_failed_spec, record_failed_spec

PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=200)
SPECS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.text(min_size=1, max_size=300),
    st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner)),
    max_size=8,
)


def changes(was: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = compare_failed_spec(record_failed_spec(was), now).changes
    assert found is not None
    return [(each.field, each.was, each.now) for each in found]


def test_what_was_changed_set_and_taken_out_is_reported_by_its_path() -> None:
    was = {"trainer": {"data": {"source": "/a"}, "steps": 5}, "suspend": False}
    now = {"trainer": {"data": {"source": "/b"}, "seed": 7}, "suspend": False}
    assert changes(was, now) == [
        ("trainer.data.source", '"/a"', '"/b"'),
        ("trainer.seed", "", "7"),
        ("trainer.steps", "5", ""),
    ]
    assert changes(was, was) == []


def test_a_secret_and_a_value_of_a_template_are_never_kept_and_a_change_of_them_is_seen() -> None:
    def template(value: str) -> dict[str, Any]:
        return {"workers": {"template": {"spec": {"containers": [{"env": [{"name": "PASSWORD", "value": value}]}]}}}}

    record = record_failed_spec(template("swordfish"))
    assert "swordfish" not in str(record.to_wire())
    [(field, was, now)] = changes(template("swordfish"), template("mackerel"))
    assert field == "workers.template.spec.containers[0].env[0].value"
    assert was.startswith("#")
    assert was != now
    address = "https://me:{}@example.org/data"
    [(_, was, now)] = changes({"url": address.format("one1")}, {"url": address.format("two2")})
    assert ("one1" in was, "two2" in now, was == now) == (False, False, False)


def test_a_spec_of_any_size_is_kept_within_bounds_and_its_last_field_still_counts() -> None:
    was = {"workers": {f"{at:04}": "x" * 5000 for at in range(2000)}}
    now = {"workers": {**was["workers"], "1999": "y"}}
    record = record_failed_spec(was)
    assert len(record.fields) == MAX_FIELDS
    assert len(str(record.to_wire())) < 80_000
    assert [field for field, _, _ in changes(was, now)] == ["…"]
    assert len(changes(was, {})) == MAX_CHANGES
    long = changes({"a": "x" * 5000 + "1"}, {"a": "x" * 5000 + "2"})
    assert [each[0] for each in long] == ["a"]


@given(SPECS)
def test_any_spec_can_be_recorded_written_and_read_and_does_not_differ_from_itself(spec: dict[str, Any]) -> None:
    record = record_failed_spec(spec)
    status = TrainingJobStatus(failed_spec=record)
    assert TrainingJobStatus.model_validate(status.to_wire()) == status
    assert compare_failed_spec(record, spec).changes == ()


def test_without_a_record_nothing_is_reported_as_unchanged() -> None:
    empty = record_failed_spec({}).replaced(changes=None)
    assert compare_failed_spec(empty, {"a": 1}).changes is None


def test_the_record_of_a_usual_job_is_small() -> None:
    assert len(str(record_failed_spec(TrainingJobSpec().to_wire()).to_wire())) < 12_000
