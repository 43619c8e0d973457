"""The admission policy of the chart: the operator writes only what belongs to a job."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.definition.conftest import Api
from tests.cluster.definition.rendered_chart import (
    NAME,
    RELEASE,
    render_chart,
)
from tests.testing.api.objects import owner_reference
from tests.testing.cluster.marks import SELECTOR
from tests.testing.operator.job_views import job_view
from tests.testing.suite.timeouts import until
from trainium_operator.plan.features.network_policy import build_network_policy
from trainium_operator.plan.model.observed import WorkerIngress

pytestmark = pytest.mark.cluster

SERVICE_ACCOUNT = f"system:serviceaccount:system:{NAME}"
NAMESPACES = (f"{RELEASE}-tenant", "kube-system")


def owned_config_map(name: str, namespace: str) -> dict[str, Any]:
    """Return a ConfigMap that a job owns."""
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": {"trainium.dev/job-name": "llama"},
        "ownerReferences": [owner_reference()],
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}}


@pytest.fixture(scope="module")
def restricted_api(crd_api: Api) -> Iterator[Api]:
    """Apply the chart's admission policy, and give its ServiceAccount all rights that roles can give."""
    crd_api.make_namespaces(NAMESPACES[0])
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    policy = render_chart(crd_api).list_kind(*kinds)
    assert [item["kind"] for item in policy] == list(kinds)
    crd_api.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(policy))
    name = f"{RELEASE}-everything"
    crd_api.kubectl("create", "clusterrolebinding", name, "--clusterrole=cluster-admin", f"--user={SERVICE_ACCOUNT}")
    crd_api.kubectl("label", "clusterrolebinding", name, SELECTOR)
    # The API server applies a policy after a delay.
    probe = owned_config_map("probe", "kube-system")
    until(lambda: refusal_of_write(crd_api, probe, "create"), "the policy comes into force", 40, pause=0.5)
    yield crd_api
    for document in policy:
        crd_api.kubectl("delete", document["kind"], document["metadata"]["name"])
    crd_api.kubectl("delete", "clusterrolebinding", name)
    crd_api.delete_namespaces(NAMESPACES[0])


def refusal_of_write(api: Api, document: dict[str, Any], verb: str, *arguments: str) -> str:
    """Return the API server's refusal of a write as the operator; empty when it is accepted."""
    options = ("--as", SERVICE_ACCOUNT, "-n", document["metadata"]["namespace"])
    done = api.run("kubectl", verb, *options, *arguments, "-f", "-", stdin=json.dumps(document))
    return done.stderr if done.returncode else ""


def test_the_operator_cannot_adopt_foreign_objects(restricted_api: Api) -> None:
    tenant = NAMESPACES[0]
    foreign = owned_config_map("foreign", tenant)
    reference = foreign["metadata"].pop("ownerReferences")
    restricted_api.kubectl("-n", tenant, "create", "-f", "-", stdin=json.dumps(foreign))
    foreign["metadata"]["ownerReferences"] = reference
    assert "changes and deletes only" in refusal_of_write(restricted_api, foreign, "replace")


def test_the_operator_can_adopt_only_what_a_job_left(restricted_api: Api) -> None:
    tenant = NAMESPACES[0]
    left = owned_config_map("left", tenant)
    left["metadata"]["annotations"] = {"trainium.dev/job-uid": "earlier"}
    reference = left["metadata"].pop("ownerReferences")
    restricted_api.kubectl("-n", tenant, "create", "-f", "-", stdin=json.dumps(left))
    assert "writes only objects" in refusal_of_write(restricted_api, left, "replace")
    left["metadata"]["ownerReferences"] = reference
    assert refusal_of_write(restricted_api, left, "replace") == ""


def test_the_admission_policy_binds_only_the_operator(restricted_api: Api) -> None:
    restricted_api.make_namespaces("system")
    memory = owned_config_map(f"{NAME}-quarantine", "system")
    memory["metadata"].pop("ownerReferences")
    assert refusal_of_write(restricted_api, memory, "create") == ""
    assert refusal_of_write(restricted_api, memory, "replace") == ""
    restricted_api.delete_namespaces("system")
    restricted_api.kubectl("-n", "kube-system", "create", "configmap", f"{RELEASE}-by-another-user", "--dry-run=server")


def test_the_operator_can_write_network_policies_only_for_jobs(restricted_api: Api) -> None:
    ingress = WorkerIngress(
        operator_namespace="system",
        operator_labels={"app.kubernetes.io/instance": RELEASE},
        rules=({"from": [{"namespaceSelector": {}}], "ports": [{"port": 6006}]},),
    )
    policy = build_network_policy(job_view(namespace=NAMESPACES[0]), ingress)
    assert refusal_of_write(restricted_api, policy, "create", "--dry-run=server") == ""
    policy["metadata"].pop("ownerReferences")
    assert "only objects that a TrainingJob controls" in refusal_of_write(
        restricted_api, policy, "create", "--dry-run=server"
    )


def test_the_admission_policy_can_be_disabled(api: Api) -> None:
    kinds = render_chart(api, "admissionPolicy.create=false").kinds
    assert not [kind for kind in kinds if kind.startswith("ValidatingAdmission")]
