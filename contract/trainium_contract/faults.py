"""Signs of a fault that an agent and the operator must read alike: runtime statuses, kernel lines, rules of the job.

Statuses are those of the Neuron runtime (nrt_status.h); kernel lines are what /dev/kmsg shows. Invariants: a sign that
is only text never ends a job at its first appearance, because text can mislead and a restart in place is cheap; what a
healthy node may report because of another one is `hearsay` and blames nobody by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainium_contract.exit_codes import Blame, Cause, ExitCode, Response, Verdict, verdict_of
from trainium_contract.messages import KernelEvent
from trainium_contract.recovery import RecoveryRule, RuleAction

_IN_PLACE, _NODE, _STOP = Response.RESTART_IN_PLACE, Response.REPLACE_NODE, Response.STOP
_KILLED = 128 + 9
_KERNEL_BEFORE_SECONDS = 120.0
_KERNEL_AFTER_SECONDS = 10.0
USER_CAUSES = frozenset({Cause.USER_CODE, Cause.NUMERICAL, Cause.MEMORY})
"""Causes that no node can be suspected for."""
NO_FAULT_CAUSES = frozenset({Cause.FINISHED, Cause.YIELDED, Cause.RESIZE})
"""Causes that are no faults, so no rule may name them."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """What one status of the Neuron runtime stands for."""

    status: int
    name: str
    verdict: Verdict


def _device(sentence: str) -> Verdict:
    return Verdict(Cause.DEVICE, Blame.NODE, _NODE, sentence)


def _repairable(sentence: str) -> Verdict:
    return Verdict(Cause.DEVICE_REPAIRABLE, Blame.NODE, _IN_PLACE, sentence, _NODE)


def _program(sentence: str) -> Verdict:
    return Verdict(Cause.USER_CODE, Blame.USER, _IN_PLACE, sentence, _STOP)


def _victim(sentence: str) -> Verdict:
    return Verdict(Cause.PEER_LOST, Blame.PEER, _IN_PLACE, sentence, hearsay=True)


STATUSES: tuple[StatusRow, ...] = (
    StatusRow(1201, "NRT_EXEC_HW_ERR_HBM_UE", _device("uncorrectable error of device memory (HBM)")),
    StatusRow(1202, "NRT_EXEC_HW_ERR_NC_UE", _device("uncorrectable error of a core's memory (SRAM)")),
    StatusRow(1203, "NRT_EXEC_HW_ERR_DMA_ABORT", _device("a DMA engine of the device aborted")),
    StatusRow(6, "NRT_HW_ERROR", _device("hardware failure of the device")),
    StatusRow(1004, "NRT_EXEC_COMPLETED_WITH_ERR", _device("the device finished with errors (memory parity)")),
    StatusRow(1205, "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE", _repairable("repairable error of device memory (HBM)")),
    StatusRow(101, "NRT_EXEC_UNIT_UNRECOVERABLE", _repairable("an execution unit of the device needs a reset")),
    StatusRow(
        1206,
        "NRT_NETWORK_PROXY_FAILURE",
        Verdict(Cause.NETWORK, Blame.NODE, _IN_PLACE, "the EFA network proxy failed", _NODE, hearsay=True),
    ),
    StatusRow(
        1003,
        "NRT_EXEC_COMPLETED_WITH_NUM_ERR",
        Verdict(Cause.NUMERICAL, Blame.USER, _IN_PLACE, "the device computed NaN; its hardware is sound", _STOP),
    ),
    StatusRow(1002, "NRT_EXEC_BAD_INPUT", _program("invalid input to the compiled program")),
    StatusRow(1006, "NRT_EXEC_OOB", _program("an access of the compiled program was out of bounds")),
    StatusRow(2, "NRT_INVALID", _program("invalid compiled program (NEFF) or arguments")),
    StatusRow(10, "NRT_UNSUPPORTED_NEFF_VERSION", _program("compiled for another version of the runtime")),
    StatusRow(9, "NRT_LOAD_NOT_ENOUGH_NC", _program("the compiled program needs more cores than the worker has")),
    StatusRow(
        4,
        "NRT_RESOURCE",
        Verdict(Cause.MEMORY, Blame.USER, _IN_PLACE, "out of memory or other resources of the device", _STOP),
    ),
    StatusRow(
        11,
        "NRT_FAIL_HOST_MEM_ALLOC",
        Verdict(Cause.MEMORY, Blame.USER, _IN_PLACE, "the runtime is out of host memory", _STOP),
    ),
    StatusRow(
        1005,
        "NRT_EXEC_NC_BUSY",
        Verdict(Cause.RUNTIME, Blame.NOBODY, _IN_PLACE, "another process still held the core"),
    ),
    StatusRow(
        1204,
        "NRT_EXEC_SW_NQ_OVERFLOW",
        Verdict(
            Cause.RUNTIME,
            Blame.NOBODY,
            _IN_PLACE,
            "the runtime's notification queue overflowed (set NEURON_RT_ENABLE_DGE_NOTIFICATIONS=0)",
            _STOP,
        ),
    ),
    StatusRow(1200, "NRT_EXEC_HW_ERR_COLLECTIVES", _victim("stuck in a collective because of another worker")),
    StatusRow(
        5,
        "NRT_TIMEOUT",
        Verdict(Cause.RUNTIME, Blame.NOBODY, _IN_PLACE, "an execution timed out on the device", _NODE, hearsay=True),
    ),
    StatusRow(1100, "NRT_COLL_PENDING", _victim("a collective was still pending")),
    StatusRow(3, "NRT_INVALID_HANDLE", _program("invalid handle given to the runtime")),
    StatusRow(7, "NRT_QUEUE_FULL", _program("the runtime's execution queue was full")),
    StatusRow(13, "NRT_UNINITIALIZED", _program("the runtime was used before its start")),
    StatusRow(14, "NRT_CLOSED", _program("the runtime was used after its end")),
    StatusRow(15, "NRT_QUEUE_EMPTY", _program("the runtime's queue was empty")),
    StatusRow(
        1,
        "NRT_FAILURE",
        Verdict(Cause.RUNTIME, Blame.NOBODY, _IN_PLACE, "the runtime failed and does not say why", _NODE, hearsay=True),
    ),
)
"""The most telling first: when the output names several, for instance 5 and 1201, the first of these counts."""

_BY_STATUS = {row.status: row for row in STATUSES}


def status_row(status: int | None) -> StatusRow | None:
    """The row of a runtime status; None for 0 and for what is not in the table."""
    return None if status is None else _BY_STATUS.get(status)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """What one kind of kernel line stands for."""

    name: str
    pattern: re.Pattern[str]
    verdict: Verdict
    decisive: bool = False
    """It is a fault by itself; the others only explain the end of a process."""


def _kernel(name: str, pattern: str, verdict: Verdict, *, decisive: bool = False) -> KernelRow:
    return KernelRow(name, re.compile(pattern), verdict, decisive)


def _host(sentence: str) -> Verdict:
    return Verdict(Cause.HOST, Blame.NODE, _IN_PLACE, sentence, _NODE)


KERNEL_ROWS: tuple[KernelRow, ...] = (
    _kernel(
        "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR",
        r"NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR",
        _device("uncorrectable error of a core's memory (SRAM)"),
        decisive=True,
    ),
    _kernel(
        "NEURON_HW_ERR=NC_UNCORRECTABLE_ERROR",
        r"NEURON_HW_ERR=NC_UNCORRECTABLE_ERROR",
        _device("uncorrectable error of a core"),
        decisive=True,
    ),
    _kernel(
        "NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR",
        r"NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR",
        _device("uncorrectable error of device memory (HBM)"),
        decisive=True,
    ),
    _kernel(
        "NEURON_HW_ERR=DMA_ERROR",
        r"NEURON_HW_ERR=DMA_ERROR",
        _device("a DMA engine of the device failed"),
        decisive=True,
    ),
    _kernel("NEURON_HW_ERR (other)", r"NEURON_HW_ERR=\w+", _repairable("the Neuron driver reports a hardware error")),
    _kernel(
        "machine check",
        r"(?i)fatal machine check|\[Hardware Error\].*(uncorrected|uncorrectable|fatal)|EDAC .*\bUE\b",
        _host("the processor or its memory reports an uncorrected error"),
    ),
    _kernel(
        "kernel fault",
        r"Kernel panic|BUG: unable to handle|BUG: kernel NULL pointer|general protection fault.*\bkernel\b|\bOops: ",
        _host("the kernel of the node failed"),
    ),
    _kernel("lockup", r"soft lockup|hard LOCKUP", _host("a processor of the node is stuck")),
    _kernel("hung task", r"task \S+ blocked for more than \d+ seconds", _host("a process was stuck in the kernel")),
    _kernel(
        "disk",
        r"EXT4-fs error|XFS .*(corrupt|I/O error|shutting down)|Buffer I/O error|I/O error, dev \w+"
        r"|nvme.*(controller is down|timeout, (reset|abort)|Removing after probe failure)",
        _host("the node's disk reports errors"),
    ),
    _kernel(
        "EFA",
        r"(?i)\b(efa|rdmap\w*)[ :].*(timeout|timed out|fail|error|reset|unresponsive)",
        Verdict(Cause.NETWORK, Blame.NODE, _IN_PLACE, "the EFA driver reports errors", _NODE),
    ),
    _kernel(
        "network link",
        r"(?i)\bena [^ ]*.*(keep alive watchdog timeout|link is down|reset)|NETDEV WATCHDOG",
        Verdict(Cause.NETWORK, Blame.NODE, _IN_PLACE, "a network interface of the node failed", _NODE),
    ),
    _kernel(
        "out of memory",
        r"(?i)out of memory: killed process|oom-kill:|oom_reaper: reaped process",
        Verdict(Cause.MEMORY, Blame.USER, _IN_PLACE, "killed by the kernel because memory ran out", _STOP),
    ),
)
"""The first that matches counts; the most telling first."""

_LONGEST_LINE = 1024


def kernel_row(line: str) -> KernelRow | None:
    """The row that a kernel line belongs to; None for lines that tell of no fault."""
    text = line[:_LONGEST_LINE]
    return next((row for row in KERNEL_ROWS if row.pattern.search(text)), None)


def lines_near(events: Iterable[KernelEvent], at: float) -> tuple[str, ...]:
    """Kernel lines that may explain a failure at `at` (Unix seconds of the same machine)."""
    return tuple(
        event.line for event in events if at - _KERNEL_BEFORE_SECONDS <= event.at <= at + _KERNEL_AFTER_SECONDS
    )


def meaning_of(
    code: int,
    *,
    runtime_status: int | None = None,
    message: str = "",
    kernel: Sequence[str] = (),
    rules: Sequence[RecoveryRule] = (),
) -> Verdict:
    """What the end of a training process stands for, all its signs together.

    `kernel` are the kernel lines of its node from the time of the failure. A rule of the job comes first, then a device
    error in the kernel's log, then a code that the process chose on purpose, then the runtime's status, then a kernel
    line that explains it, then the code.
    """
    status = status_row(runtime_status)
    ruled = rule_verdict(rules, code=code, reason=status.name if status else "", texts=(message, *kernel))
    by_code = verdict_of(code)
    if ruled is not None:
        return ruled
    rows = [row for row in map(kernel_row, kernel) if row is not None]
    decisive = next((row for row in rows if row.decisive), None)
    if code in (ExitCode.USER_ERROR, ExitCode.OUT_OF_MEMORY, ExitCode.YIELDING, ExitCode.FINISHED):
        return by_code
    if decisive is not None:
        return decisive.verdict
    if status is not None and _may_refine(code, status.verdict):
        return status.verdict
    explained = [row.verdict for row in rows if _explains(code, row.verdict)]
    return min(explained, key=lambda found: found.cause is not Cause.MEMORY, default=by_code)


def _may_refine(code: int, found: Verdict) -> bool:
    """Whether a runtime status says more than the code."""
    if verdict_of(code).cause is Cause.CRASH:
        return True
    on_device = found.cause in (Cause.DEVICE, Cause.DEVICE_REPAIRABLE)
    if code == ExitCode.DEVICE_FAULT:
        return found.cause is Cause.DEVICE_REPAIRABLE
    return (code == ExitCode.PEER_LOST and (on_device or found.cause is Cause.NETWORK)) or (
        code == ExitCode.NUMERICAL and on_device
    )


def _explains(code: int, found: Verdict) -> bool:
    """Whether a kernel line that is no fault by itself explains an exit with this code."""
    if found.cause is Cause.MEMORY:
        return code == _KILLED
    if code == ExitCode.STORAGE_UNAVAILABLE:
        return False
    return verdict_of(code).cause in (Cause.CRASH, Cause.PEER_LOST, Cause.HANG)


_RESPONSES: dict[RuleAction, Response] = {
    RuleAction.STOP: _STOP,
    RuleAction.RESTART_IN_PLACE: _IN_PLACE,
    RuleAction.REPLACE_WORKER: Response.REPLACE_WORKER,
    RuleAction.AVOID_NODE: _NODE,
}


def rule_verdict(
    rules: Sequence[RecoveryRule], *, code: int | None = None, reason: str = "", texts: Sequence[str] = ()
) -> Verdict | None:
    """What the first rule that matches makes of a failure; None when none does.

    `reason` is the pod's, a node condition's or a taint's, for a process the name of its runtime status. A rule without
    any condition matches nothing, and one that suspects a node for a user's error only replaces the worker.
    """
    for index, rule in enumerate(rules):
        if not (rule.exit_codes or rule.reason or rule.message) or rule.cause in NO_FAULT_CAUSES:
            continue
        if rule.exit_codes and code not in rule.exit_codes:
            continue
        if rule.reason and rule.reason != reason:
            continue
        if rule.message and not any(rule.message in text for text in texts):
            continue
        return _ruled(rule, index)
    return None


def _ruled(rule: RecoveryRule, index: int) -> Verdict:
    response = _RESPONSES[rule.action]
    if rule.cause in USER_CAUSES:
        blame = Blame.USER
        response = Response.REPLACE_WORKER if response is _NODE else response
    elif rule.cause is Cause.PEER_LOST:
        blame = Blame.PEER
    else:
        blame = Blame.NODE if response is _NODE else Blame.NOBODY
    return Verdict(rule.cause, blame, response, f"put down to {rule.cause} by spec.recovery.rules[{index}]")
