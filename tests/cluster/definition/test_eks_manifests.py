"""Check the manifests of docs/eks.md against a real API server and our definition."""

import re
from pathlib import Path

import pytest
import yaml

from tests.cluster.definition.conftest import Api

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "manifests/eks"
OF_EKSCTL = "cluster.yaml"
"""Read by eksctl alone, whose schema is not at hand here; docs/eks.md names when it was compared with it."""
PAGE = (ROOT / "docs/eks.md").read_text(encoding="utf-8")
FENCES = [text for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if "kind:" in text]


@pytest.mark.parametrize("name", sorted(file.name for file in FOLDER.glob("*.yaml") if file.name != OF_EKSCTL))
def test_a_manifest_is_accepted_without_unknown_fields(crd_api: Api, name: str) -> None:
    output = crd_api.run(
        *("kubectl", "--namespace", crd_api.namespace, "apply", "--dry-run=server", "--validate=strict"),
        *("-f", str(FOLDER / name)),
    )
    assert (output.returncode, output.stderr) == (0, "")


def test_a_misspelt_field_is_found(crd_api: Api) -> None:
    wrong = (FOLDER / "storage.yaml").read_text(encoding="utf-8").replace("accessModes:", "accessMode:")
    output = crd_api.run(
        *("kubectl", "--namespace", crd_api.namespace, "apply", "--dry-run=server", "--validate=strict", "-f", "-"),
        stdin=wrong,
    )
    assert 'unknown field "spec.accessMode"' in output.stderr


def test_every_manifest_is_on_the_page_and_checked() -> None:
    for file in FOLDER.glob("*.yaml"):
        assert f"(../manifests/eks/{file.name})" in PAGE
    assert not FENCES, "manifests belong into manifests/eks, where they are checked"


def test_the_first_job_uses_the_created_claim() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "storage.yaml").read_text(encoding="utf-8")))
    job = yaml.safe_load((FOLDER / "first-job.yaml").read_text(encoding="utf-8"))
    claims = [document["metadata"]["name"] for document in documents if document["kind"] == "PersistentVolumeClaim"]
    assert claims == [job["spec"]["checkpoint"]["storage"]["persistentVolumeClaim"]["claimName"]]


def test_the_cluster_has_the_nodes_of_the_first_job() -> None:
    cluster = yaml.safe_load((FOLDER / OF_EKSCTL).read_text(encoding="utf-8"))
    workers = yaml.safe_load((FOLDER / "first-job.yaml").read_text(encoding="utf-8"))["spec"]["workers"]
    (group,) = [
        managed_node_group
        for managed_node_group in cluster["managedNodeGroups"]
        if managed_node_group["instanceType"] == workers["accelerator"]["instanceType"]
    ]
    assert group["efaEnabled"]
    assert group["desiredCapacity"] == workers["replicas"]
    assert [taint["key"] for taint in group["taints"]] == ["aws.amazon.com/neuron"]
