"""Define a job's quota in Kueue as plans see it: Workloads, flavors, priorities. Plain frozen data.

Field names and reasons are those of kueue.x-k8s.io/v1beta2, read from its sources and from objects of a real
controller (0.19.2). Invariant: only Workloads that the job controls are here, so none of another's is ever touched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKERS, SPARES = "workers", "spares"
"""Names of a Workload's pod sets."""
NAME = "kueue.x-k8s.io/v1beta2"
"""The version of the API whose fields are known here."""


class WorkloadCondition(StrEnum):
    """Types of conditions of a Workload."""

    QUOTA_RESERVED = "QuotaReserved"
    ADMITTED = "Admitted"
    EVICTED = "Evicted"
    REQUEUED = "Requeued"
    PODS_READY = "PodsReady"
    FINISHED = "Finished"


@dataclass(frozen=True, slots=True)
class WorkloadConditionView:
    """One condition of a Workload."""

    type: WorkloadCondition
    true: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSetGrant:
    """Admitted part of one pod set."""

    name: str
    count: int
    flavors: tuple[str, ...] = ()
    """Names of the ResourceFlavors of its resources, each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement that pods of a pod set get beside their template."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadView:
    """One Workload of the job."""

    name: str
    uid: str
    version: str
    """Its resource version: what was decided from an older one is not written over a newer one."""
    part: int
    """Which part of the job's quota it asks for: 0 for what the job needs, 1 and more for quota steps beyond it."""
    asked: Mapping[str, int]
    """Pods by pod set."""
    content_hash: str = ""
    active: bool = True
    deleting: bool = False
    conditions: tuple[WorkloadConditionView, ...] = ()
    grants: tuple[PodSetGrant, ...] = ()
    """Empty while it holds no quota."""
    updates: Mapping[str, Placement] = field(default_factory=dict)
    """Additions of admission checks, by pod set."""

    def find(self, kind: WorkloadCondition) -> WorkloadConditionView | None:
        """Return the condition of that type; None when it was never set."""
        return next((each for each in self.conditions if each.type is kind), None)

    def is_true(self, kind: WorkloadCondition) -> bool:
        """Return whether the condition is there and True."""
        found = self.find(kind)
        return found is not None and found.true

    @property
    def holds(self) -> bool:
        """Quota is counted against it, whether or not its pods may run."""
        return (bool(self.grants) or self.is_true(WorkloadCondition.QUOTA_RESERVED)) and not self.finished

    @property
    def finished(self) -> bool:
        """It is over for Kueue."""
        return self.is_true(WorkloadCondition.FINISHED)

    @property
    def admitted(self) -> bool:
        """Its pods may run. An eviction counts for more than an admission, which stays until we return the quota."""
        leaving = self.is_true(WorkloadCondition.EVICTED) or not self.active or self.deleting or self.finished
        return self.is_true(WorkloadCondition.ADMITTED) and bool(self.grants) and not leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaView:
    """All that is known of a job's quota."""

    workloads: tuple[WorkloadView, ...] = ()
    """By part."""
    flavors: Mapping[str, Placement] = field(default_factory=dict)
    """By name; of those that the Workloads name, as far as they exist."""
    priority: int | None = None
    """Value of the job's PriorityClass, or the cluster's default; None when the class does not exist."""
