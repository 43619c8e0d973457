"""The claims of a pod for devices (dynamic resource allocation), as far as a node has to do with them.

A kubelet starts nothing before every claim of the pod exists, is allocated and is reserved for this pod; then it has
the driver prepare the devices. There is no driver here: what the scheduler allocated counts as prepared, and nothing of
it is shown to the containers.
"""

from trainium_devcluster.node.api.client import Api, ApiError, Unreachable
from trainium_devcluster.node.api.objects import Json, find, name, namespace, uid


class ClaimError(Exception):
    """A claim is not usable, for now: the pod waits and tries again."""


async def check_claims(api: Api, pod: Json) -> None:
    """Raise ClaimError, with the message of a kubelet, while a claim of the pod cannot be used."""
    for wanted in pod["spec"].get("resourceClaims") or []:
        claim = await _read(api, pod, _name_of(pod, wanted))
        status = claim.get("status") or {}
        if not status.get("allocation"):
            raise ClaimError(f"resource claim {name(claim)} is not allocated")
        if find(status.get("reservedFor"), "uid", uid(pod)) is None:
            raise ClaimError(f"resource claim {name(claim)} is not reserved for pod {namespace(pod)}/{name(pod)}")


def _name_of(pod: Json, wanted: Json) -> str:
    """Return the name of a claim, or of the claim that was created from the template."""
    made = find((pod.get("status") or {}).get("resourceClaimStatuses"), "name", wanted["name"])
    found = wanted.get("resourceClaimName") or (made or {}).get("resourceClaimName")
    if not found:
        raise ClaimError(f"the resource claim of {wanted['name']} has not been made yet")
    return str(found)


async def _read(api: Api, pod: Json, claim: str) -> Json:
    path = f"/apis/resource.k8s.io/v1/namespaces/{namespace(pod)}/resourceclaims/{claim}"
    try:
        return await api.get(path)
    except (ApiError, Unreachable) as error:
        raise ClaimError(f"resource claim {claim}: {error}") from error
