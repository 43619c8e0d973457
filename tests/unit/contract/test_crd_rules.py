"""The rules as data.

`tests/cluster/definition` has the API server evaluate them, and its libraries check that they read fields that exist.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.definition.test_refusals import CASES, GOOD, PROGRAM, build_job
from trainium_contract.definition.cel import RefusalReason
from trainium_contract.definition.crd import build_object_schema
from trainium_contract.definition.rules import ROOT_RULES
from trainium_contract.job import TrainingJobSpec
from trainium_contract.trainer.config import TrainerSpec

ROOT = build_object_schema()


def rules_of(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rules of a schema and of all below it."""
    yield from schema.get("x-kubernetes-validations", ())
    for child in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(child, dict):
            yield from rules_of(child)


def test_a_rule_has_a_short_one_line_message() -> None:
    for rule in rules_of(ROOT):
        message = rule["message"]
        assert "\n" not in "".join(map(str, rule.values())), message
        assert len(message) < 200, message
        assert "'" not in message or "messageExpression" not in rule, message


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
