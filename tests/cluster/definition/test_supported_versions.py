"""Validate the definition with the libraries of the oldest supported Kubernetes and of the newest tested."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testing.cluster.access import ROOT
from tests.testing.suite.timeouts import scaled
from trainium_contract.definition.crd import build_custom_resource_definition
from trainium_devcluster.binaries import DEFINITION_PROGRAMS, Program, catalog, ensure_binaries

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]  # the first run on a machine builds the program


def validate(definition: dict[str, Any], folder: Path, check: Program = Program.CHECK_DEFINITION) -> str:
    """Return the refusals, one a line; raises ClusterError if the program cannot be built."""
    program = ensure_binaries(programs=DEFINITION_PROGRAMS).find_path(check)
    file = folder / "definition.json"
    file.write_text(json.dumps(definition))
    done = subprocess.run([program, file], capture_output=True, text=True, check=False, timeout=scaled(120))
    assert done.returncode in {0, 1}, done.stderr
    assert (done.returncode == 1) == bool(done.stdout)
    return done.stdout


def test_the_chart_supports_the_version_whose_libraries_validate_the_definition() -> None:
    chart = yaml.safe_load((ROOT / "helm/trainium-operator/Chart.yaml").read_text())
    minor = catalog.OLDEST_KUBERNETES_VERSION.rpartition(".")[0]
    assert chart["kubeVersion"] == f">={minor}.0-0"


@pytest.mark.parametrize("check", sorted(DEFINITION_PROGRAMS))
def test_the_oldest_and_the_newest_api_server_accept_the_definition(check: Program, tmp_path: Path) -> None:
    assert validate(build_custom_resource_definition(), tmp_path, check) == ""


def test_the_newest_api_server_also_refuses_an_invalid_definition(tmp_path: Path) -> None:
    definition = build_custom_resource_definition()
    definition["spec"]["scope"] = "Everywhere"
    assert "spec.scope: Unsupported value" in validate(definition, tmp_path, Program.CHECK_NEWEST_DEFINITION)


@pytest.mark.parametrize(
    ("rule", "refusal"),
    [
        ("self.?trainer.?steps == self.?trainer.?steps", "exceeds budget"),
        ("!has(self.trainer) || has(self.trainer.data.examples.function)", "undefined field 'function'"),
        ("self.?trainer.?nothing.hasValue()", "undefined field 'nothing'"),
        ("true", "fieldPath must be a valid path"),
    ],
)
def test_it_refuses_a_rule_of_newer_versions_and_one_of_a_field_that_is_not_there(
    tmp_path: Path, rule: str, refusal: str
) -> None:
    definition = build_custom_resource_definition()
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    path = {"fieldPath": ".nothing"} if "fieldPath" in refusal else {}
    spec["x-kubernetes-validations"].append({"rule": rule, "message": "none", **path})
    assert refusal in validate(definition, tmp_path)
