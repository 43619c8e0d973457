"""Mutated cases, and cases that are built from schemas."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.fuzz.runner import TARGETS
from tests.testing.fuzz.schemas import edge_values, example
from tests.testing.fuzz.spec_target import SpecTarget
from tests.testing.suite.any_json import LARGEST, SLOW_ALLOWED, as_stored, collect_values, mutated_values
from trainium_contract.definition.crd import build_object_schema
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.spec.roles import OTHER_NAMES
from trainium_contract.status.internal import pack_internal


def test_stored_numbers_have_64_bits() -> None:
    stored = as_stored([10**30, -(10**30), float("nan"), float("inf"), 1.5, True])
    assert stored == [2**63 - 1, -(2**63), None, None, 1.5, True]


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_do_not_change_a_seed_and_are_bounded(name: str) -> None:
    seeds = TARGETS[name]().seeds()
    values_by_key = collect_values(seeds, TARGETS[name]().values())
    before, drawn = json.dumps(seeds), set()

    @settings(SLOW_ALLOWED, max_examples=200)
    @given(st.sampled_from(seeds).flatmap(lambda seed: mutated_values(seed, 5, values_by_key)))
    def draw(case: Any) -> None:
        text = json.dumps(case)
        assert len(text) <= 16 * LARGEST
        drawn.add(text)

    draw()
    assert json.dumps(seeds) == before
    assert len(drawn) > 50


def test_a_seed_has_every_field_of_the_definition() -> None:
    (full,) = [case["spec"] for case in SpecTarget().seeds() if "again" in case]
    TrainingJobSpec.model_validate(full)
    status = example(TrainingJobStatus.model_json_schema(by_alias=True))
    stored = pack_internal(TrainingJobStatus.model_validate(status))
    without_value = {"checkpoint", "compiled"}  # all that the example gives them is empty
    assert stored.keys() | without_value == build_object_schema()["properties"]["status"]["properties"].keys()
    left_out = {"path", "weights", "s3", "persistentVolumeClaim", "managedBy", "adapter", "program", "roles"}
    sections = build_object_schema()["properties"]["spec"]["properties"]
    assert sections.keys() - full.keys() <= left_out
    assert sections["trainer"]["properties"].keys() == full["trainer"].keys()
    (program_job,) = [case["spec"] for case in SpecTarget().seeds() if "program" in case.get("spec", {})]
    TrainingJobSpec.model_validate(program_job)
    assert sections["program"]["properties"].keys() == program_job["program"].keys()
    assert sections["roles"]["items"]["properties"].keys() - OTHER_NAMES.keys() == program_job["roles"][0].keys()


def test_the_edges_of_a_field_are_its_bounds_and_enum_values() -> None:
    values = edge_values(build_object_schema()["properties"]["spec"])
    assert {0, 1, 10_000, 10_001} <= {value for value in values["minReplicas"] if isinstance(value, int)}
    assert {"Auto", "Native", "Coscheduling", "None"} <= {value for value in values["gang"] if isinstance(value, str)}
