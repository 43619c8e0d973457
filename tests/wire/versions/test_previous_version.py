"""What this version and the one before tell each other: each side's own code writes, the other's reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.testing.cluster.access import ROOT
from tests.testing.versions.previous import previous_version, speak

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.testing.versions.previous import Previous

PAIRS = [("previous", "present"), ("present", "previous")]


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Previous:
    return previous_version(tmp_path_factory.mktemp("previous"))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path, value


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_message_or_a_status_of_one_version_reaches_the_other_but_for_fields_that_it_does_not_have(
    previous: Previous, writer: str, reader: str
) -> None:
    said, could_say = speak(previous, writer, "write"), dict(leaves(speak(previous, reader, "write")))
    heard = dict(leaves(speak(previous, reader, "read", said)))
    lost = {path: value for path, value in leaves(said) if heard.get(path) != value}
    assert {path: value for path, value in lost.items() if path in could_say} == {}


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def spec_of(root: Path) -> dict[str, Any]:
    """The schema of `spec` that this checkout installs."""
    definition = yaml.safe_load((root / "manifests/crd.yaml").read_text())
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def test_the_definition_stores_nothing_with_a_job_that_the_version_before_does_not_know(previous: Previous) -> None:
    """Else that version could begin no job once the definition is new: not in a roll-out, nor after the way back."""
    before, now = dict(nodes(spec_of(previous.folder))), dict(nodes(spec_of(ROOT)))
    new = (path for path, node in now.items() if "default" in node and path not in before)
    stored = sorted(path for path in new if path.rpartition(".")[0] in before)  # else only with what a user writes anew
    assert stored == [], "declare them with `later` (trainium_contract.base)"


def test_the_definition_takes_every_job_that_the_version_before_took(previous: Previous) -> None:
    now = dict(nodes(spec_of(ROOT)))
    for path, node in nodes(spec_of(previous.folder)):
        assert path in now, f"{path} is gone: jobs that have it lose it"
        assert now[path]["type"] == node["type"], path
        assert set(node.get("enum", ())) <= set(now[path].get("enum", ())), f"values of {path} are gone"
        assert set(now[path].get("required", ())) <= set(node.get("required", ())), f"{path} demands more"


def stored(schema: dict[str, Any], value: Any) -> Any:
    """What the API server keeps of it: defaults filled in, outside in."""
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    filled = {name: child["default"] for name, child in properties.items() if "default" in child} | value
    return {name: stored(properties.get(name, {}), inner) for name, inner in filled.items()}


@pytest.mark.parametrize(("operator", "worker"), PAIRS)
def test_workers_of_one_version_start_with_what_the_operator_of_the_other_makes_for_them(
    previous: Previous, operator: str, worker: str
) -> None:
    specs = {}
    for path in sorted((previous.folder / "manifests/examples").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "TrainingJob":
                specs[f"{path.name} {document['metadata']['name']}"] = stored(spec_of(ROOT), document["spec"])
    assert specs
    made = speak(previous, operator, "make", specs)
    assert speak(previous, worker, "start", made).keys() == specs.keys()
