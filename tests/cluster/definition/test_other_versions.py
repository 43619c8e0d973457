"""Write the status of an operator of another version to a real API server."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.definition.conftest import Api
from tests.testing.cluster.installed import await_definition
from tests.testing.cluster.marks import LABELS
from trainium_contract.api_server.errors import UndeclaredFieldError
from trainium_contract.definition.crd import build_custom_resource_definition
from trainium_contract.job import TrainingJobStatus
from trainium_operator.cluster.execute.undeclared_fields import UndeclaredFields

pytestmark = pytest.mark.cluster

GROUP, PLURAL = "older.trainium.dev", "olderjobs"
"""Group and name of the older definition: kubectl would take another `trainingjobs` for it."""


def build_full_value(schema: dict[str, Any], definitions: dict[str, Any], name: str = "") -> Any:
    """Return a value with all fields."""
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rsplit("/", 1)[1]], **{k: v for k, v in schema.items() if k != "$ref"}}
    if "anyOf" in schema:
        return build_full_value(
            next(choice for choice in schema["anyOf"] if choice.get("type") != "null"), definitions, name
        )
    if "enum" in schema:
        return schema["enum"][-1]
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {key: build_full_value(value, definitions, key) for key, value in schema["properties"].items()}
        case "object":
            return {"Crash": build_full_value(schema.get("additionalProperties", {"type": "integer"}), definitions)}
        case "array":
            return [build_full_value(schema["items"], definitions, name)] * schema.get("minItems", 1)
        case "string":
            return "2027-01-15T08:00:00Z" if name.lower().endswith("time") else "text"
        case "integer":
            return max(schema.get("minimum", 1), 1)
        case "number":
            return min(schema.get("maximum", 0.5), 0.5)
        case "boolean":
            return not schema.get("default", False)
    raise AssertionError(f"{name}: no value for {schema}")


@pytest.fixture
def status() -> dict[str, Any]:
    """Return a status with all fields, and some of a later version."""
    schema = TrainingJobStatus.model_json_schema(by_alias=True)
    status: dict[str, Any] = build_full_value(schema, schema["$defs"])
    status["shardsV9"] = [{"zone": "a"}]
    status["membership"]["quorumV9"] = 3
    status["history"][0]["blameV9"] = {"rank": 4}
    status["conditions"][0]["sinceV9"] = "then"
    return status


def forbid_unknown_fields(schema: dict[str, Any]) -> None:
    """Make a schema refuse fields that it does not declare."""
    schema.pop("x-kubernetes-preserve-unknown-fields", None)
    for child in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(child, dict):
            forbid_unknown_fields(child)


@pytest.fixture(scope="module")
def older_api(crd_api: Api) -> Iterator[Api]:
    """Return the API server with another definition, whose status is closed and lacks some fields."""
    definition = build_custom_resource_definition()
    definition["metadata"] = {"name": f"{PLURAL}.{GROUP}", "labels": LABELS}
    definition["spec"]["group"] = GROUP
    definition["spec"]["names"].update(plural=PLURAL, singular="olderjob", shortNames=[], categories=[])
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    forbid_unknown_fields(schema)
    for name in ("goodput", "verdict"):
        del schema["properties"][name]
    crd_api.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(definition))
    await_definition(crd_api.access, f"{PLURAL}.{GROUP}")
    yield crd_api
    crd_api.kubectl("delete", "crd", f"{PLURAL}.{GROUP}")


@pytest.fixture
def write(older_api: Api) -> Iterator[Callable[[str, dict[str, Any]], str]]:
    """Write a status by server-side apply, as the operator does; return the error of the API server."""
    created: list[str] = []

    def write(group: str, status: dict[str, Any]) -> str:
        job: dict[str, Any] = {
            "apiVersion": f"{group}/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "written"},
            "spec": {
                "workers": {"replicas": 1, "accelerator": {"device": "cpu"}},
                "trainer": {"data": {"source": "python-docs"}},
            },
        }
        if group not in created:
            older_api.kubectl("create", "-f", "-", stdin=json.dumps(job))
            created.append(group)
        job.pop("spec")
        flags = ("--server-side", "--subresource=status", "--field-manager=operator", "--validate=false")
        written = json.dumps({**job, "status": status})
        done = older_api.run("kubectl", "-n", older_api.namespace, "apply", *flags, "-f", "-", stdin=written)
        return done.stderr if done.returncode else ""

    yield write
    for group in created:
        older_api.kubectl("delete", resource(group), "written")


def resource(group: str) -> str:
    return f"{PLURAL if group == GROUP else 'trainingjobs'}.{group}"


def read_stored_status(api: Api, group: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(api.kubectl("get", resource(group), "written", "-o", "json"))["status"]
    return status


def test_the_definition_accepts_the_status_of_a_later_version(
    older_api: Api, status: dict[str, Any], write: Callable[[str, dict[str, Any]], str]
) -> None:
    assert write("trainium.dev", status) == ""
    assert read_stored_status(older_api, "trainium.dev") == status


def test_an_older_definition_names_undeclared_status_fields(
    older_api: Api, status: dict[str, Any], write: Callable[[str, dict[str, Any]], str]
) -> None:
    undeclared, refusals = UndeclaredFields(lambda: 0.0), 0
    while refusal := write(GROUP, undeclared.drop_from(status)):
        assert undeclared.learn(UndeclaredFieldError(refusal)), refusal
        refusals += 1
    assert refusals > 0
    assert read_stored_status(older_api, GROUP) == undeclared.drop_from(status)
    assert {"phase", "membership", "history"} <= read_stored_status(older_api, GROUP).keys()
    assert "goodput" not in read_stored_status(older_api, GROUP)
