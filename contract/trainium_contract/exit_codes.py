"""The exit-code contract between training processes, agent and operator: code -> cause, who is to blame, what to do.

Invariant: every code maps to exactly one verdict; codes that are not listed count as a crash. A process killed by
signal n is reported as 128 + n, as a shell and a kubelet do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """Exit codes that training processes and the agent use on purpose."""

    FINISHED = 0
    USER_ERROR = 64
    NUMERICAL = 65
    OUT_OF_MEMORY = 66
    YIELDING = 75
    PEER_LOST = 76
    HUNG = 77
    """Never left with: the agent ended a process that stood still."""
    DEVICE_FAULT = 80
    STORAGE_UNAVAILABLE = 81
    NETWORK_FAULT = 82
    """Of a worker whose network fails the test with its peers."""


class Cause(StrEnum):
    """Why a training process, a pod or a job stopped."""

    FINISHED = "Finished"
    USER_CODE = "UserCode"
    NUMERICAL = "Numerical"
    MEMORY = "Memory"
    YIELDED = "Yielded"
    PEER_LOST = "PeerLost"
    DEVICE = "Device"
    """A fault of a device that only another node cures."""
    DEVICE_REPAIRABLE = "DeviceRepairable"
    """A fault that a reset of the driver or a reboot cures."""
    RUNTIME = "Runtime"
    """The accelerator's runtime failed, the device did not."""
    NETWORK = "Network"
    HOST = "Host"
    """The node itself: kernel, disk, kubelet, container runtime."""
    HANG = "Hang"
    """A process or a collective stood still."""
    STRAGGLER = "Straggler"
    """A node was much slower than the others."""
    STORAGE = "Storage"
    CRASH = "Crash"
    NODE_LOST = "NodeLost"
    POD_LOST = "PodLost"
    PREEMPTED = "Preempted"
    CAPACITY = "Capacity"
    RESIZE = "Resize"


class Blame(StrEnum):
    """Whose budget a failure uses, and whether a node is suspected."""

    NOBODY = "Nobody"
    USER = "User"
    NODE = "Node"
    PEER = "Peer"
    STORAGE = "Storage"


class Response(StrEnum):
    """What a single exit of a training process asks for."""

    COMPLETE = "Complete"
    STOP = "Stop"
    RESTART_IN_PLACE = "RestartInPlace"
    RESTART_UNCOUNTED = "RestartUncounted"
    REPLACE_WORKER = "ReplaceWorker"
    """Another pod, on any node."""
    REPLACE_NODE = "ReplaceNode"
    """Another pod, and new ones keep away from this node."""
    RETRY_WITH_BACKOFF = "RetryWithBackoff"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The meaning of one sign of a fault: an exit code, a runtime status, a kernel line or a rule of the job."""

    cause: Cause
    blame: Blame
    response: Response
    sentence: str
    on_repeat: Response | None = None
    """The response when it happens again, where that differs (`again`)."""
    hearsay: bool = False
    """A healthy node may report it because of another one, so the reporter alone is not blamed for it."""

    @property
    def again(self) -> Response:
        """The response when the first one did not help: the same cause again, without a new step in between."""
        return self.on_repeat or self.response


_VERDICTS: dict[int, Verdict] = {
    ExitCode.FINISHED: Verdict(Cause.FINISHED, Blame.NOBODY, Response.COMPLETE, "finished"),
    ExitCode.USER_ERROR: Verdict(
        Cause.USER_CODE,
        Blame.USER,
        Response.STOP,
        "configuration or user error (bad config, missing data, import error, shape)",
    ),
    ExitCode.NUMERICAL: Verdict(
        Cause.NUMERICAL, Blame.USER, Response.STOP, "non-finite loss or gradient that persisted"
    ),
    ExitCode.OUT_OF_MEMORY: Verdict(Cause.MEMORY, Blame.USER, Response.STOP, "out of host or device memory"),
    ExitCode.YIELDING: Verdict(Cause.YIELDED, Blame.NOBODY, Response.RESTART_UNCOUNTED, "saved and left on request"),
    ExitCode.PEER_LOST: Verdict(
        Cause.PEER_LOST,
        Blame.PEER,
        Response.RESTART_IN_PLACE,
        "collective timeout or peer lost (a victim)",
        hearsay=True,
    ),
    ExitCode.HUNG: Verdict(Cause.HANG, Blame.NOBODY, Response.RESTART_IN_PLACE, "stood still and was ended"),
    ExitCode.DEVICE_FAULT: Verdict(
        Cause.DEVICE, Blame.NODE, Response.REPLACE_NODE, "device fault reported by the runtime"
    ),
    ExitCode.STORAGE_UNAVAILABLE: Verdict(
        Cause.STORAGE, Blame.STORAGE, Response.RETRY_WITH_BACKOFF, "checkpoint storage unavailable"
    ),
    ExitCode.NETWORK_FAULT: Verdict(
        Cause.NETWORK, Blame.NODE, Response.REPLACE_NODE, "cannot exchange data with its peers as it should"
    ),
}
_CRASH = Verdict(Cause.CRASH, Blame.NOBODY, Response.RESTART_IN_PLACE, "killed or crashed")


def verdict_of(code: int) -> Verdict:
    """The verdict of an exit code; codes outside the contract (137, 139, 1, ...) are a crash."""
    return _VERDICTS.get(code, _CRASH)


def exit_code_of_wait_status(returncode: int) -> int:
    """Python's `returncode` (negative for a signal) as the exit code that a shell would show."""
    return 128 - returncode if returncode < 0 else returncode
