"""The rules as data; `tests/cluster/definition/test_refusals.py` has the API server evaluate them."""

import re
from typing import Any

import pytest

from tests.cluster.definition.test_refusals import CASES, GOOD, PROGRAM, build_job
from trainium_contract.definition.accelerator_rules import ACCELERATOR_RULES
from trainium_contract.definition.cel import RefusalReason, Rule
from trainium_contract.definition.crd import object_schema
from trainium_contract.definition.program_rules import PROGRAM_RULES
from trainium_contract.definition.rules import (
    BY_CAUSE_RULES,
    RECOVERY_RULE_RULES,
    ROOT_RULES,
    SPEC_RULES,
    STORAGE_RULES,
)
from trainium_contract.job import TrainingJobSpec
from trainium_contract.trainer.config import TrainerSpec

ROOT = object_schema()
SPEC = ROOT["properties"]["spec"]
ACCELERATOR = SPEC["properties"]["workers"]["properties"]["accelerator"]
STORAGE = SPEC["properties"]["checkpoint"]["properties"]["storage"]
RECOVERY = SPEC["properties"]["recovery"]["properties"]
ALL = [
    *((rule, ROOT) for rule in ROOT_RULES),
    *((rule, SPEC) for rule in SPEC_RULES),
    *((rule, ACCELERATOR) for rule in ACCELERATOR_RULES),
    *((rule, STORAGE) for rule in STORAGE_RULES),
    *((rule, SPEC["properties"]["program"]) for rule in PROGRAM_RULES),
    *((rule, RECOVERY["rules"]["items"]) for rule in RECOVERY_RULE_RULES),
    *((rule, RECOVERY["budgets"]["properties"]["byCause"]) for rule in BY_CAUSE_RULES),
]


@pytest.mark.parametrize(("rule", "schema"), ALL, ids=[rule.message[:40] for rule, _ in ALL])
def test_field_paths_of_rules_exist(rule: Rule, schema: dict[str, Any]) -> None:
    for name in rule.field.split(".")[1:]:
        schema = schema["properties"][name]


@pytest.mark.parametrize(("rule", "schema"), ALL, ids=[rule.message[:40] for rule, _ in ALL])
def test_rules_read_only_existing_fields(rule: Rule, schema: dict[str, Any]) -> None:
    read = re.findall(
        r"\b(?:self|oldSelf(?:\.value\(\))?)((?:\.\??[a-zA-Z][a-zA-Z0-9]*(?!\w*\())+)", f"{rule.rule} {rule.expression}"
    )
    for path in read:
        node = schema
        for name in path.replace("?", "").split(".")[1:]:
            if name == "metadata":
                break
            node = node["properties"][name]


def test_a_rule_has_a_short_one_line_message() -> None:
    for rule, _ in ALL:
        written = rule.to_schema()
        assert "\n" not in "".join(str(value) for value in written.values()), rule.message
        assert len(written["message"]) < 200, rule.message
        assert "'" not in written["message"] or not rule.expression, rule.message


def test_all_trainer_fields_but_monitor_are_immutable() -> None:
    fixed = {
        rule.field for rule in ROOT_RULES if rule.reason is RefusalReason.FORBIDDEN and rule.field.startswith(".spec")
    }
    trainer = {f".spec.trainer.{field.alias}" for name, field in TrainerSpec.model_fields.items() if name != "monitor"}
    others = {".spec.parallelism", ".spec.workers.accelerator", ".spec.checkpoint.storage", ".spec.managedBy"}
    others |= {".spec.program", ".spec.workers.replicas", ".spec.roles"}
    assert fixed == trainer | others


def test_an_immutable_field_compared_as_a_whole_has_a_default() -> None:
    for rule in ROOT_RULES:
        handles_omission = f"has(self{rule.field})" in rule.rule or ".orValue(" in rule.rule
        if rule.reason is RefusalReason.FORBIDDEN and not handles_omission:
            node = ROOT
            for name in rule.field.split(".")[1:]:
                node = node["properties"][name]
            assert "default" in node, rule.field


@pytest.mark.parametrize(
    ("base", "change"),
    [(GOOD, change) for change in CASES["accepted_jobs"]]
    + [(PROGRAM, change) for change in CASES["accepted_programs"]],
)
def test_the_models_accept_what_the_definition_accepts(base: str, change: str) -> None:
    job = TrainingJobSpec.model_validate(drop_nulls(build_job(change, base=base)["spec"]))
    if job.program is None:
        job.training_config()


def drop_nulls(value: Any) -> Any:
    """Drop nulls of objects, as the API server does where a field has a default."""
    return (
        {key: drop_nulls(item) for key, item in value.items() if item is not None} if isinstance(value, dict) else value
    )
