"""Define the signs of a fault and the cause of each, one row a sign.

A row names its cause; blame, budget, texts and responses follow from the cause (`causes`, `responses`). It has a
sentence if it is more specific than its cause, and responses if they differ. The order matters: of several statuses,
and of several patterns that match a kernel line, the first row counts, so the most specific come first.

Statuses are those of the Neuron runtime (nrt_status.h); kernel lines are those of /dev/kmsg.

Invariant: a sign that a healthy node may report because of another one is `indirect` and blames nobody by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.responses import (
    LEAVE_NODE,
    RESTART,
    RESTART_THEN_LEAVE_NODE,
    RESTART_THEN_STOP,
    STOP,
    Responses,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


class SignKind(StrEnum):
    """Kind of a sign."""

    EXIT_CODE = "exit code"
    """Exit code of a training process, or of the container of a pod."""
    RUNTIME_STATUS = "runtime status"
    """In the last output of a process."""
    OUTPUT_LINE = "output line"
    """In the last output of a process that ended with a code outside the contract."""
    KERNEL_LINE = "kernel line"
    POD_REASON = "pod reason"
    """Reason of a pod that failed."""
    EVICTION = "eviction"
    """Message of the kubelet that evicted a pod; it states whose limit was exceeded."""
    CONDITION = "node condition"
    """Type of a node's condition; `node_polarity` has the bad status."""
    TAINT = "taint"
    LABEL = "node label"
    DISRUPTION = "disruption"
    """Reason of a pod's condition DisruptionTarget; any other than those here is an eviction."""
    DEVICE_TAINT = "device taint"
    """Taint of a device that a worker claims, by its effect: the keys are the driver's own."""
    CLAIM_HEALTH = "claim health"
    """Health of a claimed device by the kubelet (`allocatedResourcesStatus`)."""
    SILENCE = "silence"


@dataclass(frozen=True, slots=True)
class Sign:
    """One row."""

    kind: SignKind
    key: str
    """`NRT_TIMEOUT`, `disk`, `Evicted`, `NeuronHealth`; a `*` at the end matches any suffix."""
    cause: Cause
    sentence: str = ""
    """Empty for the sentence of its cause."""
    responses: Responses | None = None
    """None for the responses of its cause."""
    indirect: bool = False
    """A healthy node may report it because of another one, so the reporter alone is not blamed for it."""
    number: int = -1
    """The exit code, or the number of the status."""
    pattern: re.Pattern[str] | None = None
    """Pattern of a kernel line, an output line or the message of an eviction."""
    decisive: bool = False
    """A kernel line that is a fault by itself; others only explain the end of a process."""
    of_container: bool = False
    """A line that the agent writes from the counters of its container, so no other process of the node can cause it."""
    value: str = "*"
    """Reason of a condition, value of a label."""


def _build_code_sign(
    number: int, cause: Cause, sentence: str, responses: Responses | None = None, *, indirect: bool = False
) -> Sign:
    return Sign(SignKind.EXIT_CODE, str(int(number)), cause, sentence, responses, indirect, number=number)


def _build_status_sign(
    number: int, name: str, cause: Cause, sentence: str, responses: Responses | None = None, *, indirect: bool = False
) -> Sign:
    return Sign(SignKind.RUNTIME_STATUS, name, cause, sentence, responses, indirect, number=number)


def _build_line_sign(
    name: str,
    pattern: str,
    cause: Cause,
    sentence: str,
    responses: Responses | None = None,
    *,
    decisive: bool = False,
    of_container: bool = False,
) -> Sign:
    return Sign(
        SignKind.KERNEL_LINE,
        name,
        cause,
        sentence,
        responses,
        pattern=re.compile(pattern),
        decisive=decisive,
        of_container=of_container,
    )


def _build_output_sign(name: str, pattern: str, sentence: str) -> Sign:
    """Return the row of an error of a communication library that lost another process."""
    kind, cause = SignKind.OUTPUT_LINE, Cause.PEER_LOST
    return Sign(kind, name, cause, sentence, indirect=True, pattern=re.compile(pattern))


def _build_uncorrectable_sign(error: str, sentence: str) -> Sign:
    """Return the row of a device error that the Neuron driver itself calls uncorrectable."""
    name = f"NEURON_HW_ERR={error}"
    return _build_line_sign(name, name, Cause.DEVICE, sentence, decisive=True)


def _build_signs(kind: SignKind, keys_by_cause: Mapping[Cause, str]) -> tuple[Sign, ...]:
    """Return a row for each of the keys of a cause, in their order."""
    return tuple(Sign(kind, key, cause) for cause, keys in keys_by_cause.items() for key in keys.split())


def _build_eviction_sign(message: str, cause: Cause, sentence: str = "") -> Sign:
    """Return the row of a message; `…` in it stands for any text."""
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))))
    return Sign(SignKind.EVICTION, message, cause, sentence, pattern=pattern)


EXIT_CODES = (
    _build_code_sign(ExitCode.FINISHED, Cause.FINISHED, "finished"),
    _build_code_sign(
        ExitCode.USER_ERROR,
        Cause.USER_ERROR,
        "configuration or user error (bad config, missing data, import error, shape)",
    ),
    _build_code_sign(ExitCode.NUMERICAL, Cause.NUMERICAL, "non-finite loss or gradient that persisted"),
    _build_code_sign(ExitCode.OUT_OF_MEMORY, Cause.OUT_OF_MEMORY, "out of host or device memory", STOP),
    _build_code_sign(ExitCode.YIELDING, Cause.YIELDED, "saved and left on request"),
    _build_code_sign(ExitCode.PEER_LOST, Cause.PEER_LOST, "collective timeout or peer lost (a victim)", indirect=True),
    _build_code_sign(ExitCode.HUNG, Cause.HANG, "hung and was ended", RESTART),
    _build_code_sign(ExitCode.DEVICE_FAULT, Cause.DEVICE, "device fault reported by the runtime"),
    _build_code_sign(ExitCode.STORAGE_UNAVAILABLE, Cause.STORAGE, "checkpoint storage unavailable"),
    _build_code_sign(
        ExitCode.NETWORK_FAULT, Cause.NETWORK, "cannot exchange data with its peers as it should", LEAVE_NODE
    ),
)
ANY_OTHER_CODE = Sign(SignKind.EXIT_CODE, "*", Cause.CRASH, "killed or crashed", RESTART)

RUNTIME_STATUSES = (
    _build_status_sign(1201, "NRT_EXEC_HW_ERR_HBM_UE", Cause.DEVICE, "uncorrectable error of device memory (HBM)"),
    _build_status_sign(1202, "NRT_EXEC_HW_ERR_NC_UE", Cause.DEVICE, "uncorrectable error of a core's memory (SRAM)"),
    _build_status_sign(1203, "NRT_EXEC_HW_ERR_DMA_ABORT", Cause.DEVICE, "a DMA engine of the device aborted"),
    _build_status_sign(6, "NRT_HW_ERROR", Cause.DEVICE, "hardware failure of the device"),
    _build_status_sign(
        1004, "NRT_EXEC_COMPLETED_WITH_ERR", Cause.DEVICE, "the device finished with errors (memory parity)"
    ),
    _build_status_sign(
        1205,
        "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE",
        Cause.DEVICE_REPAIRABLE,
        "repairable error of device memory (HBM)",
    ),
    _build_status_sign(
        101, "NRT_EXEC_UNIT_UNRECOVERABLE", Cause.DEVICE_REPAIRABLE, "an execution unit of the device needs a reset"
    ),
    _build_status_sign(1206, "NRT_NETWORK_PROXY_FAILURE", Cause.NETWORK, "the EFA network proxy failed", indirect=True),
    _build_status_sign(
        1003, "NRT_EXEC_COMPLETED_WITH_NUM_ERR", Cause.NUMERICAL, "the device computed NaN; its hardware is healthy"
    ),
    _build_status_sign(1002, "NRT_EXEC_BAD_INPUT", Cause.USER_ERROR, "invalid input to the compiled program"),
    _build_status_sign(1006, "NRT_EXEC_OOB", Cause.USER_ERROR, "an access of the compiled program was out of bounds"),
    _build_status_sign(2, "NRT_INVALID", Cause.USER_ERROR, "invalid compiled program (NEFF) or arguments"),
    _build_status_sign(
        10, "NRT_UNSUPPORTED_NEFF_VERSION", Cause.USER_ERROR, "compiled for another version of the runtime"
    ),
    _build_status_sign(
        9, "NRT_LOAD_NOT_ENOUGH_NC", Cause.USER_ERROR, "the compiled program needs more cores than the worker has"
    ),
    _build_status_sign(4, "NRT_RESOURCE", Cause.OUT_OF_MEMORY, "out of memory or other resources of the device"),
    _build_status_sign(11, "NRT_FAIL_HOST_MEM_ALLOC", Cause.OUT_OF_MEMORY, "the runtime is out of host memory"),
    _build_status_sign(
        1005, "NRT_EXEC_NC_BUSY", Cause.ACCELERATOR_RUNTIME, "another process still held the core", RESTART
    ),
    _build_status_sign(
        1204,
        "NRT_EXEC_SW_NQ_OVERFLOW",
        Cause.ACCELERATOR_RUNTIME,
        "the runtime's notification queue overflowed (set NEURON_RT_ENABLE_DGE_NOTIFICATIONS=0)",
        RESTART_THEN_STOP,
    ),
    _build_status_sign(
        1200,
        "NRT_EXEC_HW_ERR_COLLECTIVES",
        Cause.PEER_LOST,
        "stuck in a collective because of another worker",
        indirect=True,
    ),
    _build_status_sign(
        5, "NRT_TIMEOUT", Cause.ACCELERATOR_RUNTIME, "an execution timed out on the device", indirect=True
    ),
    _build_status_sign(1100, "NRT_COLL_PENDING", Cause.PEER_LOST, "a collective was still pending", indirect=True),
    _build_status_sign(3, "NRT_INVALID_HANDLE", Cause.USER_ERROR, "invalid handle given to the runtime"),
    _build_status_sign(7, "NRT_QUEUE_FULL", Cause.USER_ERROR, "the runtime's execution queue was full"),
    _build_status_sign(13, "NRT_UNINITIALIZED", Cause.USER_ERROR, "the runtime was used before its start"),
    _build_status_sign(14, "NRT_CLOSED", Cause.USER_ERROR, "the runtime was used after its end"),
    _build_status_sign(15, "NRT_QUEUE_EMPTY", Cause.USER_ERROR, "the runtime's queue was empty"),
    _build_status_sign(
        1, "NRT_FAILURE", Cause.ACCELERATOR_RUNTIME, "the runtime failed and gives no reason", indirect=True
    ),
)
"""The most specific first: if the output names several, for instance 5 and 1201, the first of these counts."""

OUTPUT_LINES = (
    _build_output_sign(
        "gloo",
        # The prefix is that of gloo's exceptions; a failed check of its arguments has another one.
        r"\[\S*gloo/\S+:\d+\] |Gloo connectFullMesh failed|Timed out waiting \d+ms for (recv|send) operation"
        r"|Application timeout caused pair closure|failed to pass monitoredBarrier",
        "a collective of gloo lost another process",
    ),
    _build_output_sign(
        "torch's store",
        r"Did the remote server shutdown or crash\?|The client socket has (timed out after|failed to connect to)"
        r"|SocketImpl\(.*\): (Broken pipe|Connection (reset|refused|timed out))|\bwait timeout after \d+ ?ms"
        r"|Timed out after \d+ seconds waiting for clients",
        "the store that the processes share does not answer, so its process is gone",
    ),
    _build_output_sign(
        "NCCL",
        r"remote process exited or there was a network error|ncclRemoteError|Connection closed by remote peer"
        r"|Watchdog caught collective operation timeout|NCCL communicator was aborted",
        "a collective of NCCL lost another process",
    ),
    _build_output_sign(
        "XLA's coordination service",
        r"UNAVAILABLE: .*(Socket closed|Connection reset by peer|[Cc]onnection refused|failed to connect)",
        "the coordination service of XLA, or a process that it knows, is gone",
    ),
    _build_output_sign(
        "Neuron collectives", r"CCOM WARN Timeout waiting for RX", "a collective of Neuron waited for another node"
    ),
)
"""Patterns of a lost peer, from the texts of gloo, c10d, NCCL, XLA and Neuron's collectives; all are `indirect`."""

MEMORY_LIMIT_REACHED = "the container reached its memory limit"
NODE_MEMORY_EXHAUSTED = "the container was below its memory limit"
"""Starts of the lines that the agent writes when the kernel has killed a process of its container for memory."""

KERNEL_LINES = (
    _build_uncorrectable_sign("SRAM_UNCORRECTABLE_ERROR", "uncorrectable error of a core's memory (SRAM)"),
    _build_uncorrectable_sign("NC_UNCORRECTABLE_ERROR", "uncorrectable error of a core"),
    _build_uncorrectable_sign("HBM_UNCORRECTABLE_ERROR", "uncorrectable error of device memory (HBM)"),
    _build_uncorrectable_sign("DMA_ERROR", "a DMA engine of the device failed"),
    _build_line_sign(
        "NEURON_HW_ERR (other)",
        r"NEURON_HW_ERR=\w+",
        Cause.DEVICE_REPAIRABLE,
        "the Neuron driver reports a hardware error",
    ),
    _build_line_sign(
        "machine check",
        r"(?i)fatal machine check|\[Hardware Error\].*(uncorrected|uncorrectable|fatal)|EDAC .*\bUE\b",
        Cause.HOST,
        "the processor or its memory reports an uncorrected error",
        RESTART_THEN_LEAVE_NODE,
    ),
    _build_line_sign(
        "kernel fault",
        r"Kernel panic|BUG: unable to handle|BUG: kernel NULL pointer|general protection fault.*\bkernel\b|\bOops: ",
        Cause.HOST,
        "the kernel of the node failed",
        RESTART_THEN_LEAVE_NODE,
    ),
    _build_line_sign(
        "lockup",
        r"soft lockup|hard LOCKUP",
        Cause.HOST,
        "a processor of the node is stuck",
        RESTART_THEN_LEAVE_NODE,
    ),
    _build_line_sign(
        "hung task",
        r"task \S+ blocked for more than \d+ seconds",
        Cause.HOST,
        "a process was stuck in the kernel",
        RESTART_THEN_LEAVE_NODE,
    ),
    _build_line_sign(
        "disk",
        r"EXT4-fs error|XFS .*(corrupt|I/O error|shutting down)|Buffer I/O error|I/O error, dev \w+"
        r"|nvme.*(controller is down|timeout, (reset|abort)|Removing after probe failure)",
        Cause.HOST,
        "the node's disk reports errors",
        RESTART_THEN_LEAVE_NODE,
    ),
    _build_line_sign(
        "EFA",
        r"(?i)\b(efa|rdmap\w*)[ :].*(timeout|timed out|fail|error|reset|unresponsive)",
        Cause.NETWORK,
        "the EFA driver reports errors",
    ),
    _build_line_sign(
        "network link",
        r"(?i)\bena [^ ]*.*(keep alive watchdog timeout|link is down|reset)|NETDEV WATCHDOG",
        Cause.NETWORK,
        "a network interface of the node failed",
    ),
    _build_line_sign(
        "memory limit",
        rf"^{MEMORY_LIMIT_REACHED}",
        Cause.OUT_OF_MEMORY,
        "killed by the kernel at the memory limit of the container",
        of_container=True,
    ),
    _build_line_sign(
        "memory of the node",
        rf"^{NODE_MEMORY_EXHAUSTED}",
        Cause.HOST,
        "killed by the kernel because the node ran out of memory, not the container",
        RESTART_THEN_LEAVE_NODE,
        of_container=True,
    ),
    _build_line_sign(
        "out of memory",
        r"(?i)out of memory: killed process|oom-kill:|oom_reaper: reaped process",
        Cause.OUT_OF_MEMORY,
        "killed by the kernel because memory ran out",
    ),
)
"""The first that matches counts; the most specific first."""

POD_REASONS = _build_signs(
    SignKind.POD_REASON,
    {
        Cause.OUT_OF_MEMORY: "OOMKilled",
        Cause.USER_ERROR: "StartError ContainerCannotRun",
        Cause.PREEMPTED: "Evicted Preempting TerminationByKubelet DeletionByTaintManager EvictionByEvictionAPI "
        "PreemptionByScheduler",
        Cause.NODE_LOST: "NodeLost NodeShutdown Shutdown ContainerStatusUnknown Unknown DeletionByPodGC",
        # OutOfcpu, OutOfaws.amazon.com/neuron
        Cause.CAPACITY: "NodeAffinity NodeName OutOf* UnexpectedAdmissionError TopologyAffinityError",
    },
)

EVICTIONS = (
    _build_eviction_sign("Usage of EmptyDir volume … exceeds the limit …", Cause.LOCAL_STORAGE),
    _build_eviction_sign("Container … exceeded its local ephemeral storage limit …", Cause.LOCAL_STORAGE),
    _build_eviction_sign(
        "Pod ephemeral local storage usage exceeds the total limit of containers …", Cause.LOCAL_STORAGE
    ),
    _build_eviction_sign(
        "The node was low on resource: …", Cause.HOST, "the node ran low on memory, disk, inodes or processes"
    ),
    _build_eviction_sign("The node had condition: …", Cause.HOST, "the node is under pressure and admits no pod"),
)
"""Messages of pods with the reason Evicted; with any other message the pod was preempted."""

CONDITIONS = (
    Sign(SignKind.CONDITION, "Ready", Cause.HOST, value="KubeletNotReady"),
    *_build_signs(
        SignKind.CONDITION,
        {
            Cause.NODE_LOST: "Ready",
            Cause.DEVICE: "NeuronHealth AcceleratedHardwareReady",
            Cause.NETWORK: "NetworkingReady NetworkUnavailable",
            Cause.HOST: "KernelReady StorageReady ContainerRuntimeReady KernelDeadlock ReadonlyFilesystem "
            "FrequentKubeletRestart FrequentContainerdRestart MemoryPressure DiskPressure PIDPressure",
        },
    ),
)

TAINTS = _build_signs(
    SignKind.TAINT,
    {
        Cause.NODE_LOST: "node.kubernetes.io/not-ready node.kubernetes.io/unreachable "
        "node.kubernetes.io/out-of-service node.cloudprovider.kubernetes.io/shutdown",
        Cause.NETWORK: "node.kubernetes.io/network-unavailable",
        Cause.HOST: "node.kubernetes.io/memory-pressure node.kubernetes.io/disk-pressure "
        "node.kubernetes.io/pid-pressure sagemaker.amazonaws.com/node-health-status",
        # aws-node-termination-handler/spot-itn, /scheduled-maintenance, ...
        Cause.PREEMPTED: "karpenter.sh/disrupted karpenter.sh/disruption aws-node-termination-handler/* "
        "ToBeDeletedByClusterAutoscaler",
    },
)

_NODE_HEALTH = "sagemaker.amazonaws.com/node-health-status"
LABELS = (
    Sign(SignKind.LABEL, _NODE_HEALTH, Cause.DEVICE_REPAIRABLE, value="UnschedulablePendingReboot"),
    Sign(SignKind.LABEL, _NODE_HEALTH, Cause.DEVICE, value="UnschedulablePendingReplacement"),
)

DISRUPTIONS = _build_signs(SignKind.DISRUPTION, {Cause.DEVICE_TAINTED: "DeletionByDeviceTaintManager"})
DEVICE_TAINTS = _build_signs(SignKind.DEVICE_TAINT, {Cause.DEVICE_TAINTED: "NoExecute NoSchedule"})
CLAIM_HEALTH = _build_signs(SignKind.CLAIM_HEALTH, {Cause.DEVICE: "Unhealthy"})

SILENCE = Sign(SignKind.SILENCE, "no heartbeats, and other evidence that the worker failed", Cause.NODE_LOST)

SIGNS = (
    *EXIT_CODES,
    ANY_OTHER_CODE,
    *RUNTIME_STATUSES,
    *OUTPUT_LINES,
    *KERNEL_LINES,
    *POD_REASONS,
    *EVICTIONS,
    *CONDITIONS,
    *TAINTS,
    *LABELS,
    *DISRUPTIONS,
    *DEVICE_TAINTS,
    *CLAIM_HEALTH,
    SILENCE,
)
