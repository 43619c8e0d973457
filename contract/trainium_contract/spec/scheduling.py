"""`spec.scheduling`: gang scheduling and topology of the workers."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel


class Gang(StrEnum):
    """The scheduler that starts all workers or none."""

    AUTO = "Auto"
    """The first of Native and Coscheduling that the cluster serves, else None."""
    NATIVE = "Native"
    """The scheduling.k8s.io API."""
    COSCHEDULING = "Coscheduling"
    """The PodGroup of scheduling.x-k8s.io."""
    NONE = "None"
    """The operator's own time-out: a partial gang's nodes are released."""


class Topology(StrEnum):
    """Placement of workers near each other by the network-topology labels of their nodes."""

    PREFERRED = "Preferred"
    REQUIRED = "Required"
    IGNORED = "Ignored"


class SchedulingSpec(ContractModel):
    """Queue, gang, placement and priority of the worker pods."""

    queue_name: Annotated[str, Field(max_length=253)] = ""
    """Kueue LocalQueue: workers are created when it admits the job, and leave when it withdraws the quota; empty: no
    Kueue."""
    gang: Gang = Gang.AUTO
    """The scheduler that starts all workers or none."""
    gang_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    """Time that too few workers for any legal size may hold nodes before a start; then their nodes are released for a
    while. An elastic job whose workers suffice for a smaller size starts at it instead, after
    recovery.rescaleAfterSeconds."""
    topology: Topology = Topology.PREFERRED
    """Placement by network distance."""
    priority_class_name: Annotated[str, Field(max_length=253)] = ""
    """Priority class of the worker pods, and of the job in its queue; empty: the cluster's default."""
