"""A status that was edited by hand is read as far as it can be."""

from __future__ import annotations

from typing import Any

import pytest

from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_operator.cluster.cache.lenient import readable_status
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
    "history": [{"generation": 1, "time": "2027-01-15T08:00:00Z", "cause": "Crash", "rung": "InPlace"}],
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
def test_what_cannot_be_read_is_left_out_and_nothing_else(change: dict[str, Any], lost: str) -> None:
    status = readable_status({**GOOD, **change}, "default/demo")
    assert is_terminal(status)
    assert status.next_pod_ordinal == 7
    if "history" not in change:
        assert len(status.history) == 1
    if "membership" not in change:
        assert status.membership.generation == 3
    if lost:
        assert getattr(status, lost) == getattr(TrainingJobStatus(), lost)


def test_good_entries_of_a_list_outlive_their_neighbours() -> None:
    history = [{"cause": "Weather"}, *GOOD["history"], 7]
    conditions = [{"type": "Sunny", "status": "True"}, COMPLETE]
    status = readable_status({**GOOD, "history": history, "conditions": conditions}, "default/demo")
    assert [entry.rung.value for entry in status.history] == ["InPlace"]
    assert [condition.type for condition in status.conditions] == [ConditionType.COMPLETE]
    assert status.phase is Phase.RUNNING


@pytest.mark.parametrize("raw", [None, "x", 5, [], {}, {"conditions": None}])
def test_no_status_at_all_reads_as_an_empty_one(raw: Any) -> None:
    assert readable_status(raw, "default/demo") == TrainingJobStatus()


def test_the_given_object_is_not_changed() -> None:
    raw = {**GOOD, "phase": "Dancing"}
    readable_status(raw, "default/demo")
    assert raw["phase"] == "Dancing"


def test_numbers_that_json_cannot_carry_are_left_out_of_a_status() -> None:
    raw = {"goodput": {"ratio": float("inf")}, "gang": {"holdingSince": float("nan"), "givenBack": 2}}
    status = readable_status(raw, "team/llama")
    assert (status.goodput.ratio, status.gang.holding_since, status.gang.given_back) == (0.0, None, 2)
