"""Generated files are current; the chart's values and their schema list the same names."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import generate
from trainium_contract.definition.crd import build_custom_resource_definition

ROOT = Path(__file__).parents[3]


def test_generated_files_are_current() -> None:
    assert generate.find_stale(ROOT, helm=None) == [], "run `make generate`"


def test_the_plain_install_has_the_same_definition() -> None:
    documents = yaml.load_all((ROOT / generate.INSTALL).read_text(encoding="utf-8"), yaml.CSafeLoader)
    (definition,) = [document for document in documents if document and document["kind"] == "CustomResourceDefinition"]
    assert definition["spec"] == build_custom_resource_definition()["spec"], "run `make generate`"


def test_check_names_the_stale_file_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(generate, "find_helm", lambda: None)
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert generate.main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / generate.CRD).write_text("old", encoding="utf-8")
    assert generate.main(["--root", str(tmp_path), "--check"]) == 1
    assert "manifests/crd.yaml is stale" in capsys.readouterr().err


OF_A_PARENT_CHART = {"global", "enabled"}
"""Names without a default at the root: Helm passes the first to a dependency, and the second is in many conditions."""


def differing_names(values: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Return names that only one of values.yaml and values.schema.json has; skip free-form objects."""
    if not isinstance(values, dict) or "properties" not in schema:
        return []
    assert schema.get("additionalProperties") is False, f"{path or 'the root'} must refuse unknown names"
    different = set(values) ^ (set(schema["properties"]) - (set() if path else OF_A_PARENT_CHART))
    inside = [
        name
        for key, value in values.items()
        for name in differing_names(value, schema["properties"].get(key, {}), f"{path}.{key}")
    ]
    return [f"{path}.{name}" for name in different] + inside


def test_the_values_and_their_schema_list_the_same_names() -> None:
    chart = ROOT / generate.CHART
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    assert differing_names(values, schema) == []


def test_every_value_is_explained() -> None:
    lines = (ROOT / generate.CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    self_evident = {
        "nameOverride", "fullnameOverride", "imagePullSecrets", "resources", "podSecurityContext", "securityContext",
        "podAnnotations", "podLabels", "priorityClassName", "nodeSelector", "tolerations", "affinity",
        "topologySpreadConstraints", "terminationGracePeriodSeconds", "extraVolumes", "extraVolumeMounts", "image",
        "crds", "rbac", "serviceAccount", "metrics", "podDisruptionBudget", "networkPolicy", "logLevel",
        "trainerImagePullPolicy",
    }  # fmt: skip
    unexplained = [
        line.split(":")[0]
        for before, line in zip(["", *lines], lines, strict=False)
        if line[:1].isalpha() and not before.startswith("#")
    ]
    assert set(unexplained) <= self_evident
