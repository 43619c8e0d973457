"""Cases are changed and drawn from schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.fuzz.runner import TARGETS
from tests.testing.fuzz.schemas import edges, everything
from tests.testing.fuzz.spec_target import SpecTarget
from tests.testing.suite.any_json import LARGEST, SLOW_ALLOWED, as_stored, changed, donations_of
from trainium_contract.definition.crd import object_schema
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus


def test_what_is_stored_has_numbers_as_the_api_server_keeps_them() -> None:
    found = as_stored([10**30, -(10**30), float("nan"), float("inf"), 1.5, True])
    assert found == [2**63 - 1, -(2**63), None, None, 1.5, True]


@pytest.mark.parametrize("name", TARGETS)
def test_changes_leave_a_seed_as_it_is_and_a_case_bounded(name: str) -> None:
    seeds = TARGETS[name]().seeds()
    donations = donations_of(seeds, TARGETS[name]().values())
    before, drawn = json.dumps(seeds), set()

    @settings(SLOW_ALLOWED, max_examples=200)
    @given(st.sampled_from(seeds).flatmap(lambda seed: changed(seed, 5, donations)))
    def draw(case: Any) -> None:
        text = json.dumps(case)
        assert len(text) <= 16 * LARGEST
        drawn.add(text)

    draw()
    assert json.dumps(seeds) == before
    assert len(drawn) > 50


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
