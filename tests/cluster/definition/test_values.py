"""The chart renders only fields that a real API server knows, with each file of values in its folder ci.

The workflow of each change renders the same files for kubeconform and kube-linter.
"""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.definition.conftest import Api

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "helm/trainium-operator/ci").glob("*-values.yaml"))
ELSEWHERE = ("cert-manager.io/", "monitoring.coreos.com/")
"""Groups of what others' operators define, which no API server has by itself."""


def render_chart(api: Api, values: Path) -> list[dict[str, Any]]:
    """Return all objects of the chart with these values, installed in and limited to the namespace of these tests."""
    lists = yaml.safe_load(values.read_text(encoding="utf-8")).get("watchNamespaces")
    served = ("--set", f"watchNamespaces={{{api.namespace}}}") if lists else ()
    text = api.helm("template", "valued", api.chart, "--namespace", api.namespace, "--values", str(values), *served)
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def refusals(api: Api, documents: list[dict[str, Any]]) -> str:
    """Return the objects' refusals by the API server."""
    checked = [document for document in documents if not document["apiVersion"].startswith(ELSEWHERE)]
    apply = ("kubectl", "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    done = api.run(*apply, "-f", "-", stdin=yaml.dump_all(checked, Dumper=yaml.CSafeDumper))
    assert done.returncode == 0 or done.stderr
    return done.stderr


@pytest.mark.parametrize("values", FILES, ids=lambda file: file.name)
def test_rendered_fields_are_declared_and_pass_the_lint(crd_api: Api, values: Path) -> None:
    assert refusals(crd_api, render_chart(crd_api, values)) == ""
    crd_api.helm("lint", "--strict", crd_api.chart, "--values", str(values))


def test_a_misspelt_field_is_found(crd_api: Api) -> None:
    documents = render_chart(crd_api, FILES[0])
    (deployment,) = (document for document in documents if document["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["hostnetwork"] = False
    assert ".spec.template.spec.hostnetwork: field not declared in schema" in refusals(crd_api, [deployment])


def test_the_value_files_render_every_template(api: Api) -> None:
    templates = {file.name for file in (ROOT / "helm/trainium-operator/templates").rglob("*.yaml")}
    render_chart: set[str] = set()
    for values in FILES:
        text = api.helm("template", "valued", api.chart, "--namespace", "system", "--values", str(values))
        render_chart |= {line.rpartition("/")[2] for line in text.splitlines() if line.startswith("# Source: ")}
    assert render_chart == templates


def test_the_value_files_are_not_in_the_published_chart(api: Api, tmp_path: Path) -> None:
    api.helm("package", api.chart, "--destination", str(tmp_path))
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as file:
        assert not [name for name in file.getnames() if "/ci/" in name]
