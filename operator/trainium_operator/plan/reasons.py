"""Reasons of conditions and events, each spelt once: people write alerts against them."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """UpperCamelCase reasons; a name once published is not changed."""

    # Sizes
    AS_REQUESTED = "AsRequested"
    FLOORED = "FlooredToLegalSize"
    NO_LEGAL_SIZE = "NoLegalSize"
    INVALID_SPEC = "InvalidSpec"
    # Workers
    ALL_READY = "AllReady"
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    UNSCHEDULABLE = "Unschedulable"
    WORKER_NOT_STARTING = "WorkerNotStarting"
    WORKER_FAILED = "WorkerFailed"
    # Training
    TRAINING = "Training"
    NOT_STARTED = "NotStarted"
    STARTING = "Starting"
    INTERRUPTED = "Interrupted"
    RECOVERED = "Recovered"
    NO_INTERRUPTION = "NoInterruption"
    GENERATION_STARTED = "GenerationStarted"
    # Resizing
    SIZE_REQUESTED = "SizeRequested"
    CAPACITY_MISSING = "CapacityMissing"
    AT_SIZE = "AtSize"
    RESIZED = "Resized"
    # Checkpoints
    COMMITTED = "Committed"
    NOTHING_COMMITTED = "NothingCommitted"
    STORAGE_UNAVAILABLE = "StorageUnavailable"
    CHECKPOINT_COMMITTED = "CheckpointCommitted"
    CHECKPOINT_SKIPPED = "CheckpointSkipped"
    CHECKPOINT_NOTICE = "CheckpointNotice"
    # Suspension
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    NOT_SUSPENDED = "NotSuspended"
    RESUMED = "Resumed"
    # The end
    COMPLETED = "Completed"
    USER_ERROR = "UserError"
    NUMERICAL = "NumericalError"
    OUT_OF_MEMORY = "OutOfMemory"
    WORKERS_DO_NOT_START = "WorkersDoNotStart"
    BUDGET_EXHAUSTED = "BudgetExhausted"
