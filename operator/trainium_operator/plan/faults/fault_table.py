"""The rows of the one table of faults: what each sign of a fault stands for, and what each cause asks for.

Signs that agents judge by themselves, because training must heal without an operator, are rows of the contract: exit
codes (`exit_codes`), statuses of the Neuron runtime and kernel lines (`faults`). The rows here are what only the
operator sees: pods, nodes, silence. Invariants: every cause has exactly one row; a cause that the user is to blame for
suspects no node; a cause with a node, the network or nobody's fault behind it never uses the process budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainium_contract.exit_codes import Blame, Cause, Response


class Budget(StrEnum):
    """Which of `spec.recovery.budgets` a failure uses."""

    PROCESS = "process"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class CauseRow:
    """What one cause asks for."""

    cause: Cause
    blame: Blame
    budget: Budget | None
    """None: not counted."""
    suspects_node: bool
    """Whether a worker that was lost for it comes back on another node, and its node gets a strike."""
    first: Response
    again: Response
    sentence: str
    """What happened, as the beginning of a sentence."""
    advice: str
    """What a person can do about it; empty when there is nothing to do."""


_P, _I = Budget.PROCESS, Budget.INFRASTRUCTURE
_IN_PLACE, _WORKER, _NODE, _STOP = (
    Response.RESTART_IN_PLACE,
    Response.REPLACE_WORKER,
    Response.REPLACE_NODE,
    Response.STOP,
)

CAUSES: tuple[CauseRow, ...] = (
    CauseRow(
        Cause.USER_CODE,
        Blame.USER,
        None,
        False,
        _STOP,
        _STOP,
        "the program, its configuration or its data is wrong",
        "Correct the configuration, the data or the image and create the job again; it resumes from its newest "
        "checkpoint.",
    ),
    CauseRow(
        Cause.NUMERICAL,
        Blame.USER,
        None,
        False,
        _STOP,
        _STOP,
        "the numbers went wrong (NaN or infinity), the devices did not",
        "Lower the learning rate, look at the data of that step, or raise spec.trainer.nonFiniteTolerance; a new job "
        "of the same name resumes from the newest checkpoint.",
    ),
    CauseRow(
        Cause.DEVICE,
        Blame.NODE,
        _I,
        True,
        _NODE,
        _NODE,
        "a device of the node is broken",
        "Have the instance replaced (terminate it, or stop and start it).",
    ),
    CauseRow(
        Cause.DEVICE_REPAIRABLE,
        Blame.NODE,
        _I,
        True,
        _IN_PLACE,
        _NODE,
        "a device of the node needs a reset",
        "Reload the Neuron driver or reboot the node; replace the instance when it comes back within a week.",
    ),
    CauseRow(
        Cause.MEMORY,
        Blame.USER,
        _P,
        False,
        _IN_PLACE,
        _STOP,
        "a process ran out of memory",
        "Lower spec.trainer.batch.microSize or the sequence length, raise tensor parallelism, shard the state "
        "(spec.trainer.dataParallel: FullySharded) or raise the worker's memory limit.",
    ),
    CauseRow(
        Cause.HOST,
        Blame.NODE,
        _I,
        True,
        _NODE,
        _NODE,
        "the node itself is in trouble (kernel, disk, kubelet or container runtime)",
        "Look at the node's conditions and kernel log; reboot or replace it.",
    ),
    CauseRow(
        Cause.NETWORK,
        Blame.NODE,
        _I,
        True,
        _IN_PLACE,
        _NODE,
        "the network of the node failed",
        "Look at the EFA counters and security groups of the node; replace it when it happens again.",
    ),
    CauseRow(
        Cause.RUNTIME,
        Blame.NOBODY,
        _I,
        True,
        _IN_PLACE,
        _NODE,
        "the accelerator's runtime failed",
        "Compare the versions of driver, runtime and compiler; the runtime's own lines are in the pod's log.",
    ),
    CauseRow(
        Cause.HANG,
        Blame.NOBODY,
        _P,
        True,
        _IN_PLACE,
        _NODE,
        "a process stood still",
        "See the stacks in the pod's log; if it was only slow, raise the limit of its phase in spec.recovery.hang.",
    ),
    CauseRow(
        Cause.CRASH,
        Blame.NOBODY,
        _P,
        True,
        _IN_PLACE,
        _NODE,
        "a process was killed or crashed",
        "See the last lines and the pod's log; correct the program and create the job again; it resumes from its "
        "newest checkpoint.",
    ),
    CauseRow(
        Cause.NODE_LOST,
        Blame.NODE,
        _I,
        True,
        _NODE,
        _NODE,
        "the node no longer answers",
        "Look at the instance; it has been fenced and is not waited for.",
    ),
    CauseRow(
        Cause.STRAGGLER,
        Blame.NODE,
        _I,
        True,
        _NODE,
        _NODE,
        "the node is slower than the others",
        "Look at its clocks, temperature, EFA counters and neighbours.",
    ),
    CauseRow(
        Cause.POD_LOST,
        Blame.NOBODY,
        _I,
        False,
        _WORKER,
        _WORKER,
        "a worker pod ended from outside",
        "See the pod's events for who deleted it.",
    ),
    CauseRow(
        Cause.STORAGE,
        Blame.STORAGE,
        None,
        False,
        Response.RETRY_WITH_BACKOFF,
        Response.RETRY_WITH_BACKOFF,
        "the checkpoint storage is unavailable",
        "Look at the volume: room, rights and reachability; training goes on by itself.",
    ),
    CauseRow(
        Cause.PREEMPTED,
        Blame.NOBODY,
        None,
        False,
        _WORKER,
        _WORKER,
        "a worker had to make room (eviction, preemption, interruption notice)",
        "",
    ),
    CauseRow(
        Cause.CAPACITY,
        Blame.NOBODY,
        None,
        False,
        _WORKER,
        _WORKER,
        "there is no room for a worker",
        "Add nodes, or lower spec.workers.minReplicas so that the job can shrink.",
    ),
    CauseRow(
        Cause.RESIZE,
        Blame.NOBODY,
        None,
        False,
        Response.RESTART_UNCOUNTED,
        Response.RESTART_UNCOUNTED,
        "the size changed on request",
        "",
    ),
    CauseRow(
        Cause.YIELDED,
        Blame.NOBODY,
        None,
        False,
        Response.RESTART_UNCOUNTED,
        Response.RESTART_UNCOUNTED,
        "the processes saved and left on request",
        "",
    ),
    CauseRow(
        Cause.FINISHED, Blame.NOBODY, None, False, Response.COMPLETE, Response.COMPLETE, "the processes finished", ""
    ),
    CauseRow(
        Cause.PEER_LOST,
        Blame.PEER,
        None,
        False,
        _IN_PLACE,
        _IN_PLACE,
        "a process lost its connection to a peer, which is not its own fault",
        "Look for the worker that was silent or lagged behind, or raise spec.recovery.maxInPlaceRestarts.",
    ),
)
"""By severity: when several workers are lost at once, the first of these names the interruption."""

POD_REASONS: dict[str, Cause] = {
    "OOMKilled": Cause.MEMORY,
    "StartError": Cause.USER_CODE,
    "ContainerCannotRun": Cause.USER_CODE,
    "Evicted": Cause.PREEMPTED,
    "Preempting": Cause.PREEMPTED,
    "TerminationByKubelet": Cause.PREEMPTED,
    "DeletionByTaintManager": Cause.PREEMPTED,
    "EvictionByEvictionAPI": Cause.PREEMPTED,
    "PreemptionByScheduler": Cause.PREEMPTED,
    "NodeLost": Cause.NODE_LOST,
    "NodeShutdown": Cause.NODE_LOST,
    "Shutdown": Cause.NODE_LOST,
    "ContainerStatusUnknown": Cause.NODE_LOST,
    "Unknown": Cause.NODE_LOST,
    "DeletionByPodGC": Cause.NODE_LOST,
    "NodeAffinity": Cause.CAPACITY,
    "NodeName": Cause.CAPACITY,
    "OutOf*": Cause.CAPACITY,
    "UnexpectedAdmissionError": Cause.CAPACITY,
    "TopologyAffinityError": Cause.CAPACITY,
}
"""Reason of a failed pod; `*` at the end stands for any rest (OutOfcpu, OutOfaws.amazon.com/neuron)."""

CONDITIONS: dict[tuple[str, str], Cause] = {
    ("Ready", "KubeletNotReady"): Cause.HOST,
    ("Ready", "*"): Cause.NODE_LOST,
    ("NeuronHealth", "*"): Cause.DEVICE,
    ("AcceleratedHardwareReady", "*"): Cause.DEVICE,
    ("NetworkingReady", "*"): Cause.NETWORK,
    ("NetworkUnavailable", "*"): Cause.NETWORK,
    ("KernelReady", "*"): Cause.HOST,
    ("StorageReady", "*"): Cause.HOST,
    ("ContainerRuntimeReady", "*"): Cause.HOST,
    ("KernelDeadlock", "*"): Cause.HOST,
    ("ReadonlyFilesystem", "*"): Cause.HOST,
    ("FrequentKubeletRestart", "*"): Cause.HOST,
    ("FrequentContainerdRestart", "*"): Cause.HOST,
    ("MemoryPressure", "*"): Cause.HOST,
    ("DiskPressure", "*"): Cause.HOST,
    ("PIDPressure", "*"): Cause.HOST,
}
"""Type and reason of a node condition that is bad (which status is bad is `node_signals`'s affair)."""

TAINTS: dict[str, Cause] = {
    "node.kubernetes.io/not-ready": Cause.NODE_LOST,
    "node.kubernetes.io/unreachable": Cause.NODE_LOST,
    "node.kubernetes.io/out-of-service": Cause.NODE_LOST,
    "node.cloudprovider.kubernetes.io/shutdown": Cause.NODE_LOST,
    "node.kubernetes.io/network-unavailable": Cause.NETWORK,
    "node.kubernetes.io/memory-pressure": Cause.HOST,
    "node.kubernetes.io/disk-pressure": Cause.HOST,
    "node.kubernetes.io/pid-pressure": Cause.HOST,
    "sagemaker.amazonaws.com/node-health-status": Cause.HOST,
    "karpenter.sh/disrupted": Cause.PREEMPTED,
    "karpenter.sh/disruption": Cause.PREEMPTED,
    "aws-node-termination-handler/*": Cause.PREEMPTED,
    "ToBeDeletedByClusterAutoscaler": Cause.PREEMPTED,
}
"""Key of a taint; `*` at the end stands for any rest (spot-itn, scheduled-maintenance, ...)."""

LABELS: dict[tuple[str, str], Cause] = {
    ("sagemaker.amazonaws.com/node-health-status", "UnschedulablePendingReboot"): Cause.DEVICE_REPAIRABLE,
    ("sagemaker.amazonaws.com/node-health-status", "UnschedulablePendingReplacement"): Cause.DEVICE,
}
"""Key and value of a node label."""

SILENCE = Cause.NODE_LOST
"""A member whose heartbeats stop while something else says that it is lost (`diagnose.silence`)."""
