"""Resource claims of a pod: created, allocated, and reserved for it before it starts."""

from typing import Any

import pytest

from trainium_contract.api_server.errors import build_error
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.pods.resource_claims import ClaimError, check_claims


class FakeClaimApi:
    """Fake of an API server that has claims."""

    def __init__(self, **claims: dict[str, Any]) -> None:
        self._claims = claims

    async def get(self, path: str) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        assert path == f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}"
        if name not in self._claims:
            raise build_error(404, "NotFound", f'resourceclaims "{name}" not found')
        return {"metadata": {"name": name}, "status": self._claims[name]}


def build_pod(claims: list[dict[str, str]], created: list[dict[str, str]] | None = None) -> dict[str, Any]:
    metadata = {"name": "w-0", "namespace": "default", "uid": "u"}
    return {
        "metadata": metadata,
        "spec": {"resourceClaims": claims},
        "status": {"resourceClaimStatuses": created or []},
    }


FROM_TEMPLATE = [{"name": "neuron", "resourceClaimTemplateName": "t"}]
CREATED = [{"name": "neuron", "resourceClaimName": "c"}]
ALLOCATED = {"allocation": {"devices": {}}, "reservedFor": [{"resource": "pods", "uid": "u"}]}


async def check_with(pod: dict[str, Any], **claims: dict[str, Any]) -> None:
    api: Api = FakeClaimApi(**claims)  # type: ignore[assignment]
    await check_claims(api, pod)


async def test_a_pod_starts_with_its_claims_and_without_any() -> None:
    await check_with(build_pod(FROM_TEMPLATE, CREATED), c=ALLOCATED)
    await check_with(build_pod([{"name": "neuron", "resourceClaimName": "c"}]), c=ALLOCATED)
    await check_with(build_pod([]))


@pytest.mark.parametrize(
    ("created", "status", "sentence"),
    [
        ([], None, "the resource claim of neuron has not been created yet"),
        (CREATED, None, 'resource claim c: .*"c" not found'),
        (CREATED, {}, "resource claim c is not allocated"),
        (
            CREATED,
            {**ALLOCATED, "reservedFor": [{"resource": "pods", "uid": "other"}]},
            "resource claim c is not reserved for pod default/w-0",
        ),
    ],
)
async def test_a_pod_waits_for_its_claims_with_a_message(
    created: list[dict[str, str]], status: dict[str, Any] | None, sentence: str
) -> None:
    with pytest.raises(ClaimError, match=sentence):
        await check_with(build_pod(FROM_TEMPLATE, created), **({} if status is None else {"c": status}))
