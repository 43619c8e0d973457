"""The kinds of objects that the operator reads and writes, and their paths in the Kubernetes API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.worker_env import GROUP, KIND, PLURAL, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object; `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def build_path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of an object, or of a collection without a name; an empty namespace means all of them."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)


GANGS = frozenset(
    {("scheduling.k8s.io", "podgroups"), ("scheduling.k8s.io", "workloads"), ("scheduling.x-k8s.io", "podgroups")}
)
"""Group and plural of the objects of gang APIs; discovery finds the version that is served."""


def find_resource(manifest: Mapping[str, Any]) -> Resource:
    """Return the namespaced kind of a manifest whose plural is regular."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    return Resource(group, version, f"{manifest['kind'].lower()}s", manifest["kind"])


WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")
FLAVORS = Resource("kueue.x-k8s.io", "v1beta2", "resourceflavors", "ResourceFlavor", namespaced=False)
PRIORITIES = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False)
TEMPLATES = Resource("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate")
CLAIMS = Resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim")
SLICES = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", namespaced=False)
CLAIMING = (TEMPLATES, CLAIMS, SLICES)
"""Kinds that the operator reads and writes only where jobs may claim devices."""
QUEUEING = (WORKLOADS, FLAVORS, PRIORITIES)
"""Kinds that the operator reads and writes only where it works with Kueue."""

JOBS = Resource(GROUP, VERSION, PLURAL, KIND)
PODS = Resource("", "v1", "pods", "Pod")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS = Resource("", "v1", "secrets", "Secret")
DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
"""Read and written only where the operator creates one for each job."""
SERVICES = Resource("", "v1", "services", "Service")
"""Read and written only for jobs with roles."""
EVENTS = Resource("", "v1", "events", "Event")
"""Not of events.k8s.io, which refuses the times of first and last occurrence, by which `kubectl describe` sorts."""
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
"""Only read, and only the operator's own Deployment."""
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
ACCESS_REVIEWS = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False)
REVIEWS = (TOKEN_REVIEWS, ACCESS_REVIEWS)

ALL = (
    JOBS,
    PODS,
    NAMESPACES,
    NODES,
    CONFIG_MAPS,
    SECRETS,
    DISRUPTION_BUDGETS,
    NETWORK_POLICIES,
    SERVICES,
    EVENTS,
    DEPLOYMENTS,
    LEASES,
    *REVIEWS,
)
