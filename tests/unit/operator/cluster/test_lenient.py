"""Lenient parsing of edited statuses."""

from typing import Any

import pytest

from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_contract.wire.messages import MAX_GENERATION
from trainium_operator.cluster.cache.lenient import read_status
from trainium_operator.plan.model.conditions import is_terminal

COMPLETE = {
    "type": "Complete",
    "status": "True",
    "reason": "Completed",
    "message": "all steps are done",
    "lastTransitionTime": "2027-01-15T08:00:00Z",
}
GOOD = {
    "phase": "Running",
    "conditions": [COMPLETE],
    "membership": {"generation": 3, "size": 4},
    "history": [{"generation": 1, "time": "2027-01-15T08:00:00Z", "cause": "Crash", "response": "InPlace"}],
    "nextPodOrdinal": 7,
}


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"phase": "Dancing"}, "phase"),
        ({"phase": 7}, "phase"),
        ({"replicas": "many"}, "replicas"),
        ({"membership": "four"}, "membership"),
        ({"membership": {"generation": "x", "size": 4}}, ""),
        ({"restarts": {"total": 1, "byCause": {"Crash": "often"}}}, ""),
        ({"history": [*GOOD["history"], {"cause": "Weather"}]}, ""),
        ({"history": [{"cause": "Weather"}, *GOOD["history"], 7]}, ""),
        ({"history": [{**GOOD["history"][0], "recoveredSeconds": float("inf")}, *GOOD["history"]]}, ""),
        ({"goodput": {"wallSeconds": float("nan")}}, "goodput"),
        ({"conditions": [{"type": "Sunny", "status": "True"}, COMPLETE, "x"]}, ""),
        ({"conditions": [{**COMPLETE, "reason": ""}, COMPLETE]}, ""),
        ({"failures": {"not": "a list"}}, "failures"),
        ({"verdict": "x" * 5000}, "verdict"),
        ({"avoidedNodes": ["a"] * 100}, "avoided_nodes"),
    ],
)
def test_only_unreadable_fields_of_a_status_are_dropped(change: dict[str, Any], lost: str) -> None:
    status = read_status({**GOOD, **change}, "default/demo")
    assert is_terminal(status)
    assert status.next_pod_ordinal == 7
    if "history" not in change:
        assert len(status.history) == 1
    if "membership" not in change:
        assert status.membership.generation == 3
    if lost:
        assert getattr(status, lost) == getattr(TrainingJobStatus(), lost)


def test_valid_entries_of_a_list_are_kept() -> None:
    history = [{"cause": "Weather"}, *GOOD["history"], 7]
    conditions = [{"type": "Sunny", "status": "True"}, COMPLETE]
    status = read_status({**GOOD, "history": history, "conditions": conditions}, "default/demo")
    assert [entry.response.value for entry in status.history] == ["InPlace"]
    assert [condition.type for condition in status.conditions] == [ConditionType.COMPLETE]
    assert status.phase is Phase.RUNNING


@pytest.mark.parametrize("raw", [None, "x", 5, [], {}, {"conditions": None}])
def test_no_status_at_all_reads_as_an_empty_one(raw: Any) -> None:
    assert read_status(raw, "default/demo") == TrainingJobStatus()


def test_the_given_object_is_not_changed() -> None:
    raw = {**GOOD, "phase": "Dancing"}
    read_status(raw, "default/demo")
    assert raw["phase"] == "Dancing"


def test_numbers_that_json_cannot_carry_are_left_out_of_a_status() -> None:
    raw = {"goodput": {"ratio": float("inf")}, "gang": {"holdingSince": float("nan"), "releases": 2}}
    status = read_status(raw, "team/llama")
    assert (status.goodput.ratio, status.gang.holding_since, status.gang.releases) == (0.0, None, 2)


@pytest.mark.parametrize("text", ["", "[1]", '{"failures": 3', 5])
def test_the_public_part_is_kept_where_the_internal_text_cannot_be_read(text: Any) -> None:
    status = read_status({**GOOD, "internal": text}, "team/llama")
    assert status == read_status(GOOD, "team/llama")


def test_false_end_conditions_are_dropped() -> None:
    others = [{**COMPLETE, "type": kind.value, "status": "False"} for kind in ConditionType]
    status = read_status({"conditions": others[:16]}, "team/llama")
    assert not {ConditionType.COMPLETE, ConditionType.FAILED} & {condition.type for condition in status.conditions}
    assert len({*(condition.type for condition in status.conditions), *ConditionType}) - 2 <= 20


def test_duplicate_conditions_count_once() -> None:
    twice = [{**COMPLETE, "type": "Running", "reason": reason} for reason in ("First", "Second")]
    status = read_status({"conditions": [*twice, COMPLETE]}, "team/llama")
    assert [(condition.type.value, condition.reason) for condition in status.conditions] == [
        ("Running", "First"),
        ("Complete", "Completed"),
    ]


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 2**53 + 1])
def test_huge_integers_are_bounded(number: int) -> None:
    raw = {"restarts": {"total": number, "byCause": {"Crash": number}}, "desired": 2, "waitingSince": 1.5}
    status = read_status(raw, "team/llama")
    assert abs(status.restarts.total) == abs(status.restarts.by_cause["Crash"]) == 2**53
    assert (status.desired, status.waiting_since) == (2, 1.5)
    assert raw["desired"] == 2


@pytest.mark.parametrize("digits", ["9" * 400, "-99999999999999999999", " 9_999_999_999_999_999_999 ", "+1" + "0" * 20])
def test_huge_digit_strings_are_bounded_in_integer_fields_only(digits: str) -> None:
    raw = {"membership": {"dataParallel": digits, "generation": 2}, "selector": "1" * 20, "desired": 2}
    status = read_status(raw, "team/llama")
    assert abs(status.membership.data_parallel) == 2**53
    assert (status.membership.generation, status.selector, status.desired) == (2, "1" * 20, 2)


@pytest.mark.parametrize(("generation", "kept"), [(-1, 0), (MAX_GENERATION, MAX_GENERATION), (2**31 - 1, 0)])
def test_an_impossible_generation_is_reset_to_zero(generation: int, kept: int) -> None:
    status = read_status({"membership": {"generation": generation, "size": 4}}, "team/llama")
    assert status.membership.generation == kept
