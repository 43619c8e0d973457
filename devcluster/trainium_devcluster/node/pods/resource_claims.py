"""Check the device claims of a pod (dynamic resource allocation), as a node does.

A kubelet starts no container before every claim of the pod exists, is allocated and is reserved for the pod; then the
driver prepares the devices. There is no driver here: allocated devices count as prepared, and containers do not see
them.
"""

from trainium_contract.api_server.errors import ApiError
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json, find, get_name, get_namespace, get_uid


class ClaimError(Exception):
    """A claim is not usable yet; the pod waits and retries."""


async def check_claims(api: Api, pod: Json) -> None:
    """Raise ClaimError, with a kubelet's message, if a claim of the pod is not usable."""
    for claim_request in pod["spec"].get("resourceClaims") or []:
        claim = await _read(api, pod, _find_claim_name(pod, claim_request))
        status = claim.get("status") or {}
        if not status.get("allocation"):
            raise ClaimError(f"resource claim {get_name(claim)} is not allocated")
        if find(status.get("reservedFor"), "uid", get_uid(pod)) is None:
            raise ClaimError(
                f"resource claim {get_name(claim)} is not reserved for pod {get_namespace(pod)}/{get_name(pod)}"
            )


def _find_claim_name(pod: Json, claim_request: Json) -> str:
    """Return the name of a claim, or of the claim that was created from the template."""
    status = find((pod.get("status") or {}).get("resourceClaimStatuses"), "name", claim_request["name"])
    name = claim_request.get("resourceClaimName") or (status or {}).get("resourceClaimName")
    if not name:
        raise ClaimError(f"the resource claim of {claim_request['name']} has not been created yet")
    return str(name)


async def _read(api: Api, pod: Json, claim: str) -> Json:
    path = f"/apis/resource.k8s.io/v1/namespaces/{get_namespace(pod)}/resourceclaims/{claim}"
    try:
        return await api.get(path)
    except ApiError as error:
        raise ClaimError(f"resource claim {claim}: {error}") from error
