"""`status.conditions` of a job, and its phase, which is derived from them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import StatusModel


class Phase(StrEnum):
    """Derived from the conditions, for display only."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    RESIZING = "Resizing"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    STOPPING = "Stopping"
    """Saves, and ends as Failed."""
    TERMINATING = "Terminating"
    """It is being deleted, and a finalizer or dependent delays that."""
    COMPLETED = "Completed"
    FAILED = "Failed"


class ConditionType(StrEnum):
    """Conditions of a TrainingJob; Complete and Failed are terminal and exclude each other."""

    PODS_READY = "PodsReady"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    RESIZING = "Resizing"
    SIZE_LEGAL = "SizeLegal"
    PROGRESS_REPORTED = "ProgressReported"
    """Only of a program: whether its steps can be read."""
    CHECKPOINT_HEALTHY = "CheckpointHealthy"
    NODES_HEALTHY = "NodesHealthy"
    DISRUPTION_ALLOWED = "DisruptionAllowed"
    ROLES_READY = "RolesReady"
    """Only of a job with roles: whether each has minReady ready pods."""
    NETWORK_POLICY_APPLIED = "NetworkPolicyApplied"
    """Only of a job whose NetworkPolicy could not be written at some time."""
    RECONCILED = "Reconciled"
    """Only of a job for which it was False at some time: whether the cluster holds what the operator requested."""
    ADMITTED = "Admitted"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILURE_TARGET = "FailureTarget"
    """It will fail once its workers have saved and left (as in batch/v1 Job)."""
    FAILED = "Failed"
    READY = "Ready"
    """For tools: it trains, or has completed."""
    STALLED = "Stalled"
    """For tools: nothing changes until a person acts."""
    FINISHED = "Finished"
    """For tools: completed or failed."""


class ConditionStatus(StrEnum):
    """metav1 condition status."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusModel):
    """A metav1.Condition."""

    type: ConditionType
    """Type of the condition."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, as one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, as a sentence."""
    observed_generation: int = 0
    """metadata.generation that it was set for."""
    last_transition_time: Annotated[str, Field(max_length=32)]
    """RFC 3339, UTC, whole seconds."""
