"""Define the causes of failures with their blame, budget, suspicion, and texts.

Invariants: every cause has exactly one row. A cause for which the user is to blame suspects no node. A cause in a node,
the network or without fault never uses the process budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why a training process, a pod or a job stopped."""

    FINISHED = "Finished"
    USER_ERROR = "UserError"
    NUMERICAL = "NumericalError"
    OUT_OF_MEMORY = "OutOfMemory"
    LOCAL_STORAGE = "LocalStorage"
    """A pod exceeded its own limit of local storage."""
    YIELDED = "Yielded"
    PEER_LOST = "PeerLost"
    DEVICE = "Device"
    """A fault of a device that only another node resolves."""
    DEVICE_REPAIRABLE = "DeviceRepairable"
    """A fault that a reset of the driver or a reboot resolves."""
    ACCELERATOR_RUNTIME = "AcceleratorRuntimeError"
    """The accelerator's runtime failed, the device did not."""
    NETWORK = "Network"
    HOST = "Host"
    """The node itself: kernel, disk, kubelet, container runtime."""
    HANG = "Hang"
    """A process or a collective hung."""
    STRAGGLER = "Straggler"
    """A node was much slower than the others."""
    STORAGE = "Storage"
    CRASH = "Crash"
    NODE_LOST = "NodeLost"
    POD_LOST = "PodLost"
    DEVICE_TAINTED = "DeviceTainted"
    """A driver or a person took a device out of service; the others of its node continue."""
    PREEMPTED = "Preempted"
    CAPACITY = "Capacity"
    RESIZE = "Resize"


class Blame(StrEnum):
    """Whom a failure is charged to, and whether its node is suspected."""

    NOBODY = "Nobody"
    USER = "User"
    NODE = "Node"
    PEER = "Peer"
    STORAGE = "Storage"


class Budget(StrEnum):
    """The one of `spec.recovery.budgets` that a failure uses."""

    PROCESS = "process"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class CauseRow:
    """Blame, budget and texts of one cause; `responses` has its responses."""

    cause: Cause
    blame: Blame
    budget: Budget | None
    """None: not counted."""
    sentence: str
    """Text of the event, as the start of a sentence."""
    advice: str = ""
    """Advice for a person; empty for none."""
    suspects_node: bool = False
    """Whether a worker lost for it returns on another node, and its node gets a strike."""


_P, _I = Budget.PROCESS, Budget.INFRASTRUCTURE

CAUSES: tuple[CauseRow, ...] = (
    CauseRow(
        Cause.USER_ERROR,
        Blame.USER,
        None,
        "the program, its configuration or its data is wrong",
        "Correct the configuration, the data or the image and run the job again (kubectl trn retry).",
    ),
    CauseRow(
        Cause.NUMERICAL,
        Blame.USER,
        None,
        "the numbers went wrong (NaN or infinity), the devices did not",
        "Lower the learning rate, look at the data of that step, or raise spec.trainer.nonFiniteTolerance, and "
        "run the job again (kubectl trn retry).",
    ),
    CauseRow(
        Cause.DEVICE,
        Blame.NODE,
        _I,
        "a device of the node is broken",
        "Have the instance replaced (terminate it, or stop and start it).",
        suspects_node=True,
    ),
    CauseRow(
        Cause.DEVICE_REPAIRABLE,
        Blame.NODE,
        _I,
        "a device of the node needs a reset",
        "Reload the Neuron driver or reboot the node; replace the instance when it comes back within a week.",
        suspects_node=True,
    ),
    CauseRow(
        Cause.OUT_OF_MEMORY,
        Blame.USER,
        _P,
        "a process ran out of memory",
        "Raise the memory limit of the worker (resources.limits.memory in spec.workers.template), or use less memory: "
        "a smaller batch or shorter sequences; with the trainer lower spec.trainer.batch.microSize, raise tensor "
        "parallelism or shard the state (spec.trainer.dataParallel: FullySharded).",
    ),
    CauseRow(
        Cause.LOCAL_STORAGE,
        Blame.USER,
        _P,
        "a worker exceeded its own limit of local storage",
        "Raise the limit that the message names (sizeLimit of the volume, or ephemeral-storage of the container, in "
        "spec.workers.template), or write less there.",
    ),
    CauseRow(
        Cause.HOST,
        Blame.NODE,
        _I,
        "the node itself is in trouble (kernel, disk, kubelet or container runtime)",
        "Look at the node's conditions and kernel log; reboot or replace it.",
        suspects_node=True,
    ),
    CauseRow(
        Cause.NETWORK,
        Blame.NODE,
        _I,
        "the network of the node failed",
        "Look at the EFA counters and security groups of the node; replace it when it happens again.",
        suspects_node=True,
    ),
    CauseRow(
        Cause.ACCELERATOR_RUNTIME,
        Blame.NOBODY,
        _I,
        "the accelerator's runtime failed",
        "Compare the versions of driver, runtime and compiler; the runtime's own lines are in the pod's log.",
        suspects_node=True,
    ),
    CauseRow(
        Cause.HANG,
        Blame.NOBODY,
        _P,
        "a process hung",
        "See the stacks in the pod's log; if it was only slow, raise the limit of its phase in spec.recovery.hang.",
        suspects_node=True,
    ),
    CauseRow(
        Cause.CRASH,
        Blame.NOBODY,
        _P,
        "a process was killed or crashed",
        "See the last lines and the pod's log; correct the program and run the job again (kubectl trn retry).",
        suspects_node=True,
    ),
    CauseRow(
        Cause.NODE_LOST,
        Blame.NODE,
        _I,
        "the node no longer answers",
        "Look at the instance; it has been fenced and is not waited for.",
        suspects_node=True,
    ),
    CauseRow(
        Cause.STRAGGLER,
        Blame.NODE,
        _I,
        "the node is slower than the others",
        "Look at its clocks, temperature, EFA counters and neighbours.",
        suspects_node=True,
    ),
    CauseRow(
        Cause.POD_LOST,
        Blame.NOBODY,
        _I,
        "a worker pod ended from outside",
        "See the pod's events for who deleted it.",
    ),
    CauseRow(
        Cause.STORAGE,
        Blame.STORAGE,
        None,
        "the checkpoint storage is unavailable",
        "Check the volume: space, permissions and reachability; training continues by itself.",
    ),
    CauseRow(
        Cause.DEVICE_TAINTED,
        Blame.NOBODY,
        None,
        "a device of the worker was taken out of service (device taint)",
        "See the device's taints in the ResourceSlices of its node, and the DeviceTaintRules.",
    ),
    CauseRow(
        Cause.PREEMPTED,
        Blame.NOBODY,
        None,
        "a worker had to leave (eviction, preemption, interruption notice)",
    ),
    CauseRow(
        Cause.CAPACITY,
        Blame.NOBODY,
        None,
        "no node has capacity for a worker",
        "Add nodes, or lower spec.workers.minReplicas so that the job can shrink.",
    ),
    CauseRow(Cause.RESIZE, Blame.NOBODY, None, "the size changed on request"),
    CauseRow(Cause.YIELDED, Blame.NOBODY, None, "the processes saved and left on request"),
    CauseRow(Cause.FINISHED, Blame.NOBODY, None, "the processes finished"),
    CauseRow(
        Cause.PEER_LOST,
        Blame.PEER,
        None,
        "a process lost its connection to a peer, which is not its own fault",
        "Look for the worker that was silent or lagged behind, or raise spec.recovery.maxInPlaceRestarts.",
    ),
)
"""By severity: when several workers are lost at once, the first of these names the interruption."""

USER_CAUSES = frozenset(row.cause for row in CAUSES if row.blame is Blame.USER)
"""Causes that no node can be suspected for."""
NO_FAULT_CAUSES = frozenset({Cause.FINISHED, Cause.YIELDED, Cause.RESIZE})
"""Causes that are not faults, so no rule may name them."""
