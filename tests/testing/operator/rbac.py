"""Every right that the operator uses, as data: the chart renders it and a test compares the two.

Invariant: a call to the API server that is not covered here is a defect, in this table or in the call. No wildcard,
no `secrets` beyond one named Secret, no `pods/exec`, nothing that could raise its own rights.
"""

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """Where a right is needed."""

    WATCHED = "Watched"
    """In every namespace whose jobs are served: a ClusterRole, or a Role in the one watched namespace."""
    CLUSTER = "Cluster"
    """Resources without a namespace: always a ClusterRole."""
    OWN = "Own"
    """In the operator's own namespace only: a Role."""
    RELEASES = "Releases"
    """In kube-system, where all releases of a cluster register: a Role."""
    NETWORK_POLICIES = "NetworkPolicies"
    """In every namespace whose jobs are served, only where `--job-network-policy` is on."""
    TAINTS = "Taints"
    """Resources without a namespace, only where `--taint-nodes` is on: a separate ClusterRole."""

    READERS = "Readers"
    """Resources without a namespace, only where something is served to readers over HTTPS: a separate ClusterRole."""
    KUEUE = "Kueue"
    """In every namespace whose jobs are served, only where `--kueue` is on."""
    KUEUE_CLUSTER = "KueueCluster"
    """Resources without a namespace, only where `--kueue` is on: a separate ClusterRole."""
    DRA = "Dra"
    """In every namespace whose jobs are served, only where `--dra` is on."""
    DRA_CLUSTER = "DraCluster"
    """Resources without a namespace, only where `--dra` is on: a separate ClusterRole."""


class NamedAfter(StrEnum):
    """Which setting gives the only object name that a right is limited to."""

    ANY = ""
    LEASE = "lease-name"
    """`settings.lease_name`; the chart's full name by default."""
    TLS_SECRET = "tls-secret-name"
    """`settings.tls_secret_name`; `<coordinator service>-tls` by default."""
    MEMORY = "quarantine-name"
    """`settings.memory_name`; `<lease name>-quarantine` by default."""
    DEPLOYMENT = "deployment"
    """`settings.deployment`; the chart's full name."""
    CLUSTER = "kube-system"
    """The namespace that every cluster has."""
    RELEASES = "trainium-operators"
    """The one Lease of all releases."""


@dataclass(frozen=True, slots=True)
class Right:
    """One rule of a Role or ClusterRole."""

    group: str
    resource: str
    """Plural of a kind, with a subresource; or the path of a URL that is no resource."""
    verbs: tuple[str, ...]
    reason: str
    scope: Scope = Scope.WATCHED
    named_after: NamedAfter = NamedAfter.ANY


RIGHTS: tuple[Right, ...] = (
    Right(
        "trainium.dev",
        "trainingjobs",
        ("get", "list", "watch", "delete"),
        "the jobs to serve; those that ask for it (ttlSecondsAfterFinished) are deleted when they have ended",
    ),
    Right("trainium.dev", "trainingjobs/status", ("patch",), "status, by server-side apply"),
    Right(
        "trainium.dev",
        "trainingjobs/finalizers",
        ("update",),
        "ownerReferences with blockOwnerDeletion, where OwnerReferencesPermissionEnforcement is on",
    ),
    Right("", "pods", ("get", "list", "watch", "create", "delete"), "worker pods; they are never updated"),
    Right(
        "",
        "configmaps",
        ("get", "list", "watch", "create", "patch"),
        "trainer configuration and membership; only our own are patched; deleted with the job by its ownerReference",
    ),
    Right(
        "policy",
        "poddisruptionbudgets",
        ("get", "list", "watch", "create", "patch"),
        "one per job, so that no drain costs more work than the job allows",
    ),
    Right(
        "",
        "services",
        ("get", "list", "watch", "create", "patch"),
        "one headless per role of a job; only our own are patched; deleted with the job by its ownerReference",
    ),
    Right(
        "networking.k8s.io",
        "networkpolicies",
        ("get", "list", "watch", "create", "patch"),
        "one per job, which keeps others away from its workers; only our own are patched",
        Scope.NETWORK_POLICIES,
    ),
    Right("scheduling.k8s.io", "podgroups", ("create", "patch"), "gangs, where the cluster serves them"),
    Right("scheduling.k8s.io", "workloads", ("create", "patch"), "gangs of Kubernetes 1.35"),
    Right("scheduling.x-k8s.io", "podgroups", ("create", "patch"), "gangs of the coscheduling plugin"),
    Right(
        "kueue.x-k8s.io",
        "workloads",
        ("get", "list", "watch", "create", "patch", "delete"),
        "the quota that a job asks for; only our own are changed",
        Scope.KUEUE,
    ),
    Right("kueue.x-k8s.io", "workloads/status", ("patch",), "quota that is returned, and the end", Scope.KUEUE),
    Right(
        "kueue.x-k8s.io",
        "resourceflavors",
        ("list", "watch"),
        "node labels and tolerations of what was admitted",
        Scope.KUEUE_CLUSTER,
    ),
    Right(
        "scheduling.k8s.io",
        "priorityclasses",
        ("list", "watch"),
        "the number of a job's priority, which a Workload must name",
        Scope.KUEUE_CLUSTER,
    ),
    Right(
        "resource.k8s.io",
        "resourceclaimtemplates",
        ("get", "list", "watch", "create", "patch", "delete"),
        "what workers claim their devices by; only our own are changed",
        Scope.DRA,
    ),
    Right("resource.k8s.io", "resourceclaims", ("list", "watch"), "which devices are held, and by whom", Scope.DRA),
    Right(
        "resource.k8s.io",
        "resourceslices",
        ("list", "watch"),
        "which devices there are, and their taints",
        Scope.DRA_CLUSTER,
    ),
    Right(
        "",
        "events",
        ("list", "create", "patch"),
        "why a pod that has a node does not start, and what happened to a job, also for its page",
    ),
    Right("", "nodes", ("get", "list", "watch"), "lost and unhealthy nodes", Scope.CLUSTER),
    Right(
        "",
        "namespaces",
        ("get",),
        "uid of kube-system, by which jobs of one name in two clusters are told apart on shared storage",
        Scope.CLUSTER,
        NamedAfter.CLUSTER,
    ),
    Right("", "nodes", ("patch",), "the taint of nodes in quarantine, where that is switched on", Scope.TAINTS),
    *(
        Right("", path, ("get",), "the keys that have signed the projected tokens of agents", Scope.CLUSTER)
        for path in ("/.well-known/openid-configuration", "/openid/v1/jwks")
    ),
    Right("authentication.k8s.io", "tokenreviews", ("create",), "who a client is at the HTTPS port", Scope.READERS),
    Right(
        "authorization.k8s.io",
        "subjectaccessreviews",
        ("create",),
        "what a client may read at the HTTPS port",
        Scope.READERS,
    ),
    Right(
        "coordination.k8s.io",
        "leases",
        ("create",),
        "leader election: the first Lease (create cannot be limited by name)",
        Scope.OWN,
    ),
    Right("coordination.k8s.io", "leases", ("get", "update"), "leader election: hold it", Scope.OWN, NamedAfter.LEASE),
    Right(
        "coordination.k8s.io",
        "leases",
        ("delete",),
        "never used: to name its owner, where OwnerReferencesPermissionEnforcement is on",
        Scope.OWN,
        NamedAfter.LEASE,
    ),
    Right(
        "coordination.k8s.io",
        "leases",
        ("create",),
        "the first registration of a release in the cluster (create cannot be limited by name)",
        Scope.RELEASES,
    ),
    Right(
        "coordination.k8s.io",
        "leases",
        ("get", "update"),
        "which release serves which namespaces, so that no two serve the same jobs",
        Scope.RELEASES,
        NamedAfter.RELEASES,
    ),
    Right(
        "apps",
        "deployments",
        ("get",),
        "uid of the operator's own Deployment, with which its Lease and its memory go",
        Scope.OWN,
        NamedAfter.DEPLOYMENT,
    ),
    Right(
        "",
        "secrets",
        ("get", "update"),
        "certificate authority and server certificate of the coordinator (the chart creates the Secret empty)",
        Scope.OWN,
        NamedAfter.TLS_SECRET,
    ),
    Right("", "configmaps", ("create",), "the memory of bad machines (create cannot be limited by name)", Scope.OWN),
    Right("", "configmaps", ("get", "update"), "the memory of bad machines", Scope.OWN, NamedAfter.MEMORY),
    Right(
        "",
        "configmaps",
        ("delete",),
        "never used: to name its owner, where OwnerReferencesPermissionEnforcement is on",
        Scope.OWN,
        NamedAfter.MEMORY,
    ),
)
