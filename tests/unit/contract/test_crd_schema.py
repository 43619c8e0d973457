"""The generated schema: structural, closed, bounded, described, and with the defaults that the models have."""

import re
from typing import Annotated, Any

import pytest
from pydantic import Field

from trainium_contract.base import ContractModel, derived
from trainium_contract.definition.crd import (
    SchemaError,
    build_custom_resource_definition,
    build_model_schema,
    build_object_schema,
)
from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_contract.status.internal import INTERNAL_KEY, list_internal_fields


def nested_schemas(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    schemas = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        schemas += nested_schemas(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            schemas += nested_schemas(schema[key], f"{path}[{key}]")
    return schemas


NODES = [(path, node) for path, node in nested_schemas(build_object_schema()) if not path.startswith(".metadata")]


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """Return what the API server stores: defaults filled in from the schema, outside in."""
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    filled = {name: child["default"] for name, child in properties.items() if "default" in child} | value
    return {name: with_defaults(properties.get(name, {}), item) for name, item in filled.items()}


def without_empty(value: Any) -> Any:
    """Return the same without empty objects, which mean nothing."""
    if not isinstance(value, dict):
        return value
    return {name: pruned for name, item in value.items() if (pruned := without_empty(item)) != {}}


def contains(stored: Any, expected: Any) -> bool:
    """Return whether every expected field is stored with its value."""
    if not isinstance(expected, dict):
        return bool(stored == expected)
    return all(name in stored and contains(stored[name], item) for name, item in expected.items())


def spec_schema() -> dict[str, Any]:
    schema: dict[str, Any] = build_object_schema()["properties"]["spec"]
    return schema


def test_every_field_is_typed_and_described_without_alternatives() -> None:
    kinds = {"object", "array", "string", "integer", "number", "boolean"}
    alternatives = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "title", "const", "propertyNames"}
    assert [path for path, node in NODES if node.get("type") not in kinds] == []
    assert [path for path, node in NODES if not node["description"].strip() or "\n" in node["description"]] == []
    assert [path for path, node in NODES if alternatives & set(node)] == []


def test_every_text_list_and_map_of_the_spec_and_status_is_bounded() -> None:
    def is_unbounded(node: dict[str, Any]) -> bool:
        return (
            (node["type"] == "string" and not {"maxLength", "enum"} & set(node))
            or (node["type"] == "array" and "maxItems" not in node)
            or ("additionalProperties" in node and "maxProperties" not in node)
        )

    assert {path for path, node in NODES if is_unbounded(node)} == {".apiVersion", ".kind"}


def test_a_derived_default_is_neither_stored_nor_written() -> None:
    class Batch(ContractModel):
        """Sizes."""

        size: int = 8
        """First."""
        tolerance: float = derived(0.0, ge=0, le=0.5)
        """Second."""

    schema = build_model_schema(Batch, "spec.batch", strict=True)
    assert "default" in schema["properties"]["size"]
    tolerance = schema["properties"]["tolerance"]
    assert "default" not in tolerance
    assert tolerance["description"] == "Second. Range: 0 to 0.5."
    assert Batch().tolerance == 0.0
    assert Batch.model_validate({"tolerance": 0.0}).to_wire() == {"size": 8}
    assert Batch(tolerance=0.1).to_wire() == {"size": 8, "tolerance": 0.1}
    assert not build_model_schema(Derived, "spec.derived", strict=True).get("default"), (
        "an object with only derived fields has no default"
    )


class Derived(ContractModel):
    """All of it is derived."""

    names: tuple[Annotated[str, Field(max_length=9)], ...] = derived((), max_length=4)
    """Names."""
    speed: int = derived(3)
    """Speed."""


def test_only_the_pod_template_and_the_status_accept_unknown_fields() -> None:
    free = {path for path, node in NODES if node.get("x-kubernetes-preserve-unknown-fields")}
    status = {path for path, node in NODES if path.startswith(".status") and "properties" in node}
    role = ".spec.roles[items].template"
    parts = (".spec", ".spec.containers[items]", ".spec.containers[items].ports[items]")
    assert free == {".spec.workers.template", role, *(role + part for part in parts)} | status
    open_ended = [
        path
        for path, node in NODES
        if node["type"] == "object" and not node.get("properties") and "additionalProperties" not in node
    ]
    assert open_ended == [".spec.workers.template"]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"workers": {"replicas": 4, "spares": 1, "accelerator": {"device": "cpu"}}},
        {"trainer": {"steps": 7, "model": {"preset": "Small"}, "data": {"tokenizer": {"path": "t.json"}}}},
        {"trainer": {"model": {"ropeScaling": {"factor": 4}}}},
        {"checkpoint": {"storage": {"hostPath": {"path": "/data"}}, "durable": {"everySteps": 5}}},
        {"recovery": {"budgets": {"process": {"maxFailures": 1}}}},
        {"program": {"image": "team/own:5", "command": ["./train"]}},
    ],
)
def test_the_stored_defaults_are_those_of_the_models(given: dict[str, Any]) -> None:
    stored = with_defaults(spec_schema(), given)
    assert TrainingJobSpec.model_validate(stored) == TrainingJobSpec.model_validate(given)


def test_a_stored_job_pins_the_trainer_against_later_defaults() -> None:
    stored, trainer = with_defaults(spec_schema(), {"trainer": {}}), TrainingJobSpec().trainer
    assert trainer is not None
    # Messages omit some unset fields; the stored object has their defaults.
    assert contains(stored["trainer"], without_empty(trainer.to_wire()))
    assert TrainingJobSpec.model_validate({"trainer": stored["trainer"]}).trainer == trainer


def test_the_scale_subresource_always_finds_a_size() -> None:
    version = build_custom_resource_definition()["spec"]["versions"][0]
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.workers.replicas"
    assert with_defaults(spec_schema(), {})["workers"]["replicas"] == 1


def test_printer_columns_read_fields_that_exist() -> None:
    paths = {path for path, _ in NODES} | {".metadata.creationTimestamp"}
    columns = build_custom_resource_definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    read = [re.sub(r"\[.*\]", "[items]", column["jsonPath"]) for column in columns]
    assert [path for path in read if path not in paths] == []
    assert [column["name"] for column in columns if not column.get("priority")] == [
        "Phase", "Reason", "Ready", "Desired", "Step", "Loss", "Ckpt", "Restarts", "Updated", "Age",
    ]  # fmt: skip


def test_conditions_are_a_map_by_type_and_other_lists_are_atomic() -> None:
    status = build_object_schema()["properties"]["status"]["properties"]
    assert status["conditions"]["x-kubernetes-list-type"] == "map"
    assert status["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    assert status["history"]["x-kubernetes-list-type"] == "atomic"


def test_an_older_definition_accepts_a_status_value_from_a_newer_operator() -> None:
    status = [node for path, node in NODES if path.startswith(".status")]
    assert [node for node in status if "enum" in node or "default" in node] == []


def test_every_model_field_is_in_the_schema() -> None:
    properties = build_object_schema()["properties"]
    for model, part in ((TrainingJobSpec, "spec"), (TrainingJobStatus, "status")):
        names = {str(field.alias) for field in model.model_fields.values()}
        expected = names - list_internal_fields() | {INTERNAL_KEY} if part == "status" else names
        assert set(properties[part]["properties"]) == expected


def test_exclusive_bounds_are_written_in_the_dialect_of_kubernetes() -> None:
    rate = spec_schema()["properties"]["trainer"]["properties"]["optimizer"]["properties"]["learningRate"]
    assert (rate["minimum"], rate["exclusiveMinimum"], rate["maximum"]) == (0, True, 1)


def test_a_range_is_in_the_description() -> None:
    trainer = spec_schema()["properties"]["trainer"]["properties"]
    ends = {
        path: node["properties"][name]["description"].rpartition("Range: ")[2]
        for path, node, name in (
            ("learningRate", trainer["optimizer"], "learningRate"),
            ("beta1", trainer["optimizer"], "beta1"),
            ("ropeTheta", trainer["model"], "ropeTheta"),
            ("vocabSize", trainer["model"], "vocabSize"),
            ("seed", trainer["data"], "seed"),
        )
    }
    assert ends == {
        "learningRate": "above 0 and at most 1.",
        "beta1": "at least 0 and below 1.",
        "ropeTheta": "above 0.",
        "vocabSize": "16 to 1000000.",
        "seed": "at least 0.",
    }


class Undescribed(ContractModel):
    """A model."""

    field: int = 0


class Unbounded(ContractModel):
    """A model."""

    names: tuple[Annotated[str, Field(max_length=9)], ...] = ()
    """A list."""


class UnboundedText(ContractModel):
    """A model."""

    name: str = ""
    """A text."""


class UnboundedMap(ContractModel):
    """A model."""

    names: dict[str, int]
    """A map."""


class Alternatives(ContractModel):
    """A model."""

    size: int | str = 0
    """A number or a text."""


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Undescribed, r"spec\.field: no description"),
        (Unbounded, r"spec\.names: the list has no bound"),
        (UnboundedText, r"spec\.name: the text has no bound"),
        (UnboundedMap, r"spec\.names: the map has no bound"),
        (Alternatives, r"spec\.size: a union"),
    ],
)
def test_a_model_without_a_structural_schema_raises_schema_error(model: type[ContractModel], sentence: str) -> None:
    with pytest.raises(SchemaError, match=sentence):
        build_model_schema(model, "spec", strict=True)
