"""The recorded spec of a failed job, and reported differences from it."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.status.failed_spec import MAX_CHANGES, MAX_FIELDS, compare_failed_spec, record_failed_spec

LONG = st.integers(100, 300).map(lambda length: "x" * length)
PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=20) | LONG
SPECS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.text(min_size=1, max_size=20) | LONG,
    st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner)),
    max_size=8,
)


def compare(was: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str]]:
    changes = compare_failed_spec(record_failed_spec(was), now).changes
    assert changes is not None
    return [(change.field, change.was, change.now) for change in changes]


def test_changed_added_and_removed_fields_are_reported_by_path() -> None:
    was = {"trainer": {"data": {"source": "/a"}, "steps": 5}, "suspend": False}
    now = {"trainer": {"data": {"source": "/b"}, "seed": 7}, "suspend": False}
    assert compare(was, now) == [
        ("trainer.data.source", '"/a"', '"/b"'),
        ("trainer.seed", "", "7"),
        ("trainer.steps", "5", ""),
    ]
    assert compare(was, was) == []


def test_secrets_and_template_values_are_hashed_and_their_changes_detected() -> None:
    def template(value: str) -> dict[str, Any]:
        return {"workers": {"template": {"spec": {"containers": [{"env": [{"name": "PASSWORD", "value": value}]}]}}}}

    record = record_failed_spec(template("swordfish"))
    assert "swordfish" not in str(record.to_wire())
    [(field, was, now)] = compare(template("swordfish"), template("mackerel"))
    assert field == "workers.template.spec.containers[0].env[0].value"
    assert was.startswith("#")
    assert was != now
    address = "https://me:{}@example.org/data"
    [(_, was, now)] = compare({"url": address.format("one1")}, {"url": address.format("two2")})
    assert ("one1" in was, "two2" in now, was == now) == (False, False, False)


def test_a_large_spec_is_recorded_within_bounds_and_any_change_is_detected() -> None:
    was = {"workers": {f"{number:04}": "x" * 5000 for number in range(2000)}}
    now = {"workers": {**was["workers"], "1999": "y"}}
    record = record_failed_spec(was)
    assert len(record.fields) == MAX_FIELDS
    assert len(str(record.to_wire())) < 80_000
    assert [field for field, _, _ in compare(was, now)] == ["…"]
    assert len(compare(was, {})) == MAX_CHANGES
    long = compare({"a": "x" * 5000 + "1"}, {"a": "x" * 5000 + "2"})
    assert [field for field, _, _ in long] == ["a"]


@given(SPECS)
def test_any_spec_round_trips_and_equals_itself(spec: dict[str, Any]) -> None:
    record = record_failed_spec(spec)
    status = TrainingJobStatus(failed_spec=record)
    assert TrainingJobStatus.model_validate(status.to_wire()) == status
    assert compare_failed_spec(record, spec).changes == ()


def test_without_a_record_changes_are_unknown() -> None:
    empty = record_failed_spec({}).replaced(changes=None)
    assert compare_failed_spec(empty, {"a": 1}).changes is None


def test_the_record_of_a_usual_job_is_small() -> None:
    assert len(str(record_failed_spec(TrainingJobSpec().to_wire()).to_wire())) < 12_000
