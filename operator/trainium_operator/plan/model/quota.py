"""Define a job's quota in Kueue as plans see it: Workloads, flavors, priorities. Plain frozen data.

Field names and reasons are those of kueue.x-k8s.io/v1beta2, from its sources and from objects of a real controller
(0.19.2).

Invariant: only Workloads that the job controls are here, so none of another job is ever changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKERS, SPARES = "workers", "spares"
"""Names of a Workload's pod sets."""
API_VERSION = "kueue.x-k8s.io/v1beta2"
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
    is_true: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSetGrant:
    """The admitted part of one pod set."""

    name: str
    count: int
    flavors: tuple[str, ...] = ()
    """Names of the ResourceFlavors of its resources, without duplicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of the pods of a pod set, in addition to their template."""

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
    """Its resource version: a decision from an older version does not overwrite a newer one."""
    part: int
    """The part of the job's quota: 0 for what the job needs, 1 and more for quota steps beyond it."""
    requested_pods: Mapping[str, int]
    """Pods by pod set."""
    content_hash: str = ""
    active: bool = True
    deleting: bool = False
    conditions: tuple[WorkloadConditionView, ...] = ()
    grants: tuple[PodSetGrant, ...] = ()
    """Empty while it holds no quota."""
    updates: Mapping[str, Placement] = field(default_factory=dict)
    """Updates of admission checks, by pod set."""

    def find(self, kind: WorkloadCondition) -> WorkloadConditionView | None:
        """Return the condition of that type; None when it was never set."""
        return next((condition for condition in self.conditions if condition.type is kind), None)

    def is_true(self, kind: WorkloadCondition) -> bool:
        """Return whether the condition exists and is True."""
        condition = self.find(kind)
        return condition is not None and condition.is_true

    @property
    def holds_quota(self) -> bool:
        """Return whether quota is counted against it, whether or not its pods may run."""
        return (bool(self.grants) or self.is_true(WorkloadCondition.QUOTA_RESERVED)) and not self.finished

    @property
    def finished(self) -> bool:
        """Return whether Kueue has finished it."""
        return self.is_true(WorkloadCondition.FINISHED)

    @property
    def admitted(self) -> bool:
        """Return whether its pods may run.

        An eviction takes precedence over an admission, which stays until quota is returned.
        """
        leaving = self.is_true(WorkloadCondition.EVICTED) or not self.active or self.deleting or self.finished
        return self.is_true(WorkloadCondition.ADMITTED) and bool(self.grants) and not leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaView:
    """All that is known of a job's quota."""

    workloads: tuple[WorkloadView, ...] = ()
    """By part."""
    flavors: Mapping[str, Placement] = field(default_factory=dict)
    """By name: those that the Workloads refer to and that exist."""
    priority: int | None = None
    """Value of the job's PriorityClass, or the cluster's default; None if the class does not exist."""
