"""Define the reasons of conditions and events in one place, because people write alerts for them."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """UpperCamelCase reasons; a published name never changes."""

    # Sizes
    AS_REQUESTED = "AsRequested"
    NODES_IN_RESERVE = "NodesInReserve"
    FLOORED = "FlooredToLegalSize"
    NO_LEGAL_SIZE = "NoLegalSize"
    INVALID_SPEC = "InvalidSpec"
    # Workers
    ALL_READY = "AllReady"
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    CREATION_REFUSED = "CreationRefused"
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
    PROGRESS_REPORTED = "ProgressReported"
    NO_STEP_REPORTED = "NoStepReported"
    PROGRESS_UNREADABLE = "ProgressUnreadable"
    # Resizing
    SIZE_REQUESTED = "SizeRequested"
    CAPACITY_MISSING = "CapacityMissing"
    AT_SIZE = "AtSize"
    RESIZED = "Resized"
    # Checkpoints
    COMMITTED = "Committed"
    NOTHING_COMMITTED = "NothingCommitted"
    CHECKPOINTS_UNKNOWN = "CheckpointsUnknown"
    STORAGE_UNAVAILABLE = "StorageUnavailable"
    CHECKPOINT_COMMITTED = "CheckpointCommitted"
    CHECKPOINT_SKIPPED = "CheckpointSkipped"
    CHECKPOINT_NOTICE = "CheckpointNotice"
    # The trainer's monitors
    LOSS_SPIKE = "LossSpike"
    LOSS_ALARM = "LossAlarm"
    STEP_SKIPPED = "StepSkipped"
    # Artifacts of the run
    ARTIFACT_WRITTEN = "ArtifactWritten"
    EVALUATED = "Evaluated"
    EVALUATION_FAILED = "EvaluationFailed"
    # Roles
    ROLES_READY = "RolesReady"
    WAITING_FOR_ROLES = "WaitingForRoles"
    ROLE_NOT_STARTING = "RoleNotStarting"
    ROLE_POD_REPLACED = "RolePodReplaced"
    # Suspension
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    NOT_SUSPENDED = "NotSuspended"
    RESUMED = "Resumed"
    # For tools
    PROGRESSING = "Progressing"
    STOPPING = "Stopping"
    TERMINATING = "Terminating"
    # The end
    COMPLETED = "Completed"
    USER_ERROR = "UserError"
    NUMERICAL = "NumericalError"
    OUT_OF_MEMORY = "OutOfMemory"
    WORKERS_DO_NOT_START = "WorkersDoNotStart"
    BUDGET_EXHAUSTED = "BudgetExhausted"
    ACCELERATOR_RUNTIME = "AcceleratorRuntimeError"
    STOPPED_BY_RULE = "StoppedByRule"
    SPEC_CHANGED = "SpecChanged"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    # Interruptions that were announced, and those that may be refused
    INTERRUPTION_NOTICE = "InterruptionNotice"
    DISRUPTION_ALLOWED = "DisruptionAllowed"
    DISRUPTION_REFUSED = "DisruptionRefused"
    # The NetworkPolicy of the workers
    POLICY_APPLIED = "PolicyApplied"
    # Templates
    TEMPLATE_CHANGED = "TemplateChanged"
    PODS_CHANGED = "PodsChanged"
    # Nodes
    NODES_HEALTHY = "NodesHealthy"
    NODE_UNHEALTHY = "NodeUnhealthy"
    NODE_ACTIONS_FROZEN = "NodeActionsFrozen"
    CONTACT_LOST = "ContactLost"
    # Scheduling
    ADMITTED = "Admitted"
    WAITING_FOR_GANG = "WaitingForGang"
    WAITING_FOR_QUEUE = "WaitingForQueue"
    EVICTED = "Evicted"
    GANG_TIMED_OUT = "GangTimedOut"
    GANG_API_MISSING = "GangApiMissing"
    DEVICE_API_MISSING = "DeviceApiMissing"
    WAITING_FOR_DEVICES = "WaitingForDevices"
    # Slow nodes
    STRAGGLER_DETECTED = "StragglerDetected"
    STRAGGLER_RECOVERED = "StragglerRecovered"
    # Checkpoints that do not come
    CHECKPOINT_OVERDUE = "CheckpointOverdue"
    # Conditions by the operator about itself
    NAME_TAKEN = "NameTaken"
    WRITE_FAILED = "WriteFailed"
    OBJECT_CHANGED = "ObjectChanged"
    STRAY_PODS = "StrayPods"
    ORPHAN_ADOPTED = "OrphanAdopted"
    DELETION_PENDING = "DeletionPending"
    RECONCILED = "Reconciled"
    UNREADABLE = "Unreadable"
    SERVED_ELSEWHERE = "ServedElsewhere"
