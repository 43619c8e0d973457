"""How cases are written, unfolded, changed and drawn from schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.testing.fuzz.hostile import LEAVES, LONGEST_TEXT, MOST_VALUES, decoded, encoded, unfolded
from tests.testing.fuzz.mutation import Mutator
from tests.testing.fuzz.runner import TARGETS
from tests.testing.fuzz.schemas import edges, everything
from tests.testing.fuzz.spec_target import SpecTarget
from trainium_contract.definition.crd import object_schema
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_operator.cluster.cache.membership_record import membership_of


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ({"$text": [3, "ab"]}, "ababab"),
        ({"$list": [2, {"a": {"$text": [2, "x"]}}]}, [{"a": "xx"}, {"a": "xx"}]),
        ({"$keys": [2, 7]}, {"k0": 7, "k1": 7}),
        ({"$deep": [2, 7]}, [[7]]),
        ({"$digits": 3}, 999),
        ({"$text": [3, 7]}, {"$text": [3, 7]}),
        ({"$text": [3, "ab"], "and": 1}, {"$text": [3, "ab"], "and": 1}),
        ({"$list": [-1, 7]}, []),
    ],
)
def test_a_word_stands_for_what_is_too_large_to_be_written_out(word: Any, meant: Any) -> None:
    assert unfolded({"part": word}) == {"part": meant}


def size(value: Any) -> tuple[int, int]:
    """Values and characters of texts."""
    if isinstance(value, str):
        return 1, len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    sizes = [size(part) for part in parts]
    return 1 + sum(values for values, _ in sizes), sum(characters for _, characters in sizes)


def test_whatever_words_say_a_case_is_bounded() -> None:
    bomb: Any = {"$text": [10**9, "x"]}
    for _ in range(6):
        bomb = {"$list": [10**9, bomb]}
    values, characters = size(unfolded([bomb, {"$keys": [10**9, 1]}, {"$text": [10**12, "y"]}]))
    assert values <= MOST_VALUES + 10
    assert characters <= LONGEST_TEXT


def test_what_is_stored_has_numbers_as_the_api_server_keeps_them() -> None:
    found = unfolded([10**30, -(10**30), float("nan"), float("inf"), 1.5, True], storable=True)
    assert found == [2**63 - 1, -(2**63), None, None, 1.5, True]


def test_a_packed_value_is_what_a_config_map_holds() -> None:
    member = {"podUid": "u", "podName": "p", "podIp": "10.0.0.1", "nodeName": "n", "nodeRank": 0, "rendezvousPort": 1}
    wire = {"generation": 3, "transition": "Immediate", "cause": "Resize", "members": [member], "processesPerNode": 1}
    found = membership_of(unfolded({"binaryData": {"membership.json.gz": {"$packed": wire}}}))
    assert found is not None
    assert found.generation == 3


@pytest.mark.parametrize("name", TARGETS)
def test_a_seed_gives_the_same_cases_each_time_and_every_case_can_be_kept(name: str) -> None:
    target = TARGETS[name]()

    def drawn() -> list[bytes]:
        mutator, dice = Mutator(target.seeds(), target.values()), random.Random(7)
        seeds = [encoded(case) for case in target.seeds()]
        return [encoded(mutator.changed(decoded(dice.choice(seeds)), dice)) for _ in range(200)]

    first = drawn()
    assert first == drawn()
    assert len(set(first)) > 180
    assert all(encoded(decoded(case)) == case for case in first)


def test_what_no_file_holds_is_an_error_of_its_own() -> None:
    for data in (b"{", b"[" * 100_000, b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            decoded(data)


def test_every_field_of_the_definition_is_in_a_case_and_is_legal_there() -> None:
    (full,) = [case["spec"] for case in SpecTarget().seeds() if "again" in case]
    TrainingJobSpec.model_validate(full)
    status = everything(TrainingJobStatus.model_json_schema(by_alias=True))
    TrainingJobStatus.model_validate(status)
    assert status.keys() == object_schema()["properties"]["status"]["properties"].keys()
    left_out = {"path", "weights", "s3", "persistentVolumeClaim", "managedBy", "adapter", "program"}
    sections = object_schema()["properties"]["spec"]["properties"]
    assert sections.keys() - full.keys() <= left_out
    assert sections["trainer"]["properties"].keys() == full["trainer"].keys()
    (other,) = [case["spec"] for case in SpecTarget().seeds() if "program" in case.get("spec", {})]
    TrainingJobSpec.model_validate(other)
    assert sections["program"]["properties"].keys() == other["program"].keys()


def test_the_edges_of_a_field_are_its_bounds_what_is_beyond_them_and_its_words() -> None:
    found = edges(object_schema()["properties"]["spec"])
    assert {0, 1, 10_000, 10_001} <= {each for each in found["minReplicas"] if isinstance(each, int)}
    assert {"Auto", "Native", "Coscheduling", "None"} <= {each for each in found["gang"] if isinstance(each, str)}


def test_leaves_are_json_but_for_numbers_that_are_none() -> None:
    json.loads(json.dumps(LEAVES))
