"""Look up the table of faults: what signs mean, alone and together.

Invariants: a rule of the job precedes every other row. A user's error never suspects a node. The reporter of a lost
peer is never the culprit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from trainium_contract.exit_codes import KILLED, SIGNAL_BASE, ExitCode
from trainium_contract.faults.causes import CAUSES, NO_FAULT_CAUSES, USER_CAUSES, Blame, Budget, Cause, CauseRow
from trainium_contract.faults.responses import (
    NEW_WORKER,
    RESPONSES,
    RULE_RESPONSES,
    Response,
    Responses,
    get_responses_for_pod,
    get_responses_for_text,
)
from trainium_contract.faults.rules import RecoveryRule
from trainium_contract.faults.signs import (
    ANY_OTHER_CODE,
    EVICTIONS,
    EXIT_CODES,
    KERNEL_LINES,
    OUTPUT_LINES,
    RUNTIME_STATUSES,
    SIGNS,
    Sign,
    SignKind,
)

_ABORTED = SIGNAL_BASE + 6
_KERNEL_BEFORE_SECONDS = 120.0
_KERNEL_AFTER_SECONDS = 10.0
_MAX_LINE_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Classification:
    """The classification of one end, by a sign or a rule of the job."""

    cause: Cause
    blame: Blame
    responses: Responses
    sentence: str
    indirect: bool = False
    """A healthy node may report it because of another one, so the reporter alone is not blamed for it."""

    @property
    def response(self) -> Response:
        """Return the first response."""
        return self.responses.first

    @property
    def repeated(self) -> Response:
        """Return the response when the same cause repeats without a new step in between."""
        return self.responses.repeated


class TimedLine(Protocol):
    """A kernel line with its time."""

    @property
    def line(self) -> str:
        """Its text."""

    @property
    def at(self) -> float:
        """Unix seconds."""


# --- causes

_ROWS = {row.cause: row for row in CAUSES}
_SEVERITY = {row.cause: index for index, row in enumerate(CAUSES)}


def get_cause_row(cause: Cause) -> CauseRow:
    """Return blame, budget and texts of a cause."""
    return _ROWS[cause]


def get_default_responses(cause: Cause) -> Responses:
    """Return the responses of a cause without further information."""
    return RESPONSES[cause]


def get_budget(cause: Cause) -> Budget | None:
    """Return the budget that a failure of this cause uses; None if it is not counted."""
    return _ROWS[cause].budget


def suspects_node(cause: Cause) -> bool:
    """Return whether a worker lost for this cause should return on another node."""
    return _ROWS[cause].suspects_node


def rank_severity(cause: Cause) -> int:
    """Return the rank among causes of failures at the same time; 0 names the interruption first."""
    return _SEVERITY[cause]


# --- single signs

_OUTPUT_LINES = {sign.key: sign for sign in OUTPUT_LINES}
_STATUSES = {sign.number: sign for sign in RUNTIME_STATUSES}
_CAUSES = {kind: {(sign.key, sign.value): sign.cause for sign in SIGNS if sign.kind is kind} for kind in SignKind}
_EVICTED = "Evicted"
_TEXTS = (SignKind.RUNTIME_STATUS, SignKind.KERNEL_LINE, SignKind.OUTPUT_LINE)


@cache
def classify_sign(sign: Sign) -> Classification:
    """Classify one sign by itself."""
    row = _ROWS[sign.cause]
    responses = sign.responses or (get_responses_for_text(sign.cause) if sign.kind in _TEXTS else RESPONSES[sign.cause])
    return Classification(sign.cause, row.blame, responses, sign.sentence or row.sentence, sign.indirect)


_BY_CODE = {sign.number: classify_sign(sign) for sign in EXIT_CODES}
_CRASH = classify_sign(ANY_OTHER_CODE)


def classify_exit_code(code: int) -> Classification:
    """Classify an exit code; codes outside the contract (137, 139, 1, ...) are a crash."""
    return _BY_CODE.get(code, _CRASH)


def find_runtime_status(status: int | None) -> Sign | None:
    """Find the row of a runtime status; None for 0 and for unknown ones."""
    return None if status is None else _STATUSES.get(status)


def match_kernel_line(line: str) -> Sign | None:
    """Find the row that matches a kernel line; None for lines that report no fault."""
    return _find_first_match(KERNEL_LINES, line)


def match_output_line(line: str) -> Sign | None:
    """Find the row that matches a line of output, or the text of an exception; None for all other lines."""
    return _find_first_match(OUTPUT_LINES, line)


def find_output_line(key: str) -> Sign | None:
    """Find the row of this name; None for "" and for unknown ones."""
    return _OUTPUT_LINES.get(key)


def _find_first_match(signs: Sequence[Sign], line: str) -> Sign | None:
    text = line[:_MAX_LINE_LENGTH]
    return next((sign for sign in signs if sign.pattern is not None and sign.pattern.search(text)), None)


def find_cause(kind: SignKind, key: str, value: str = "*") -> Cause | None:
    """Return the cause of a sign by its key, and its value if it has one (a condition's reason); None for no row.

    The row of this value precedes that of any value, and the key itself precedes its longest prefix before a star.
    """
    causes = _CAUSES[kind]
    if exact := causes.get((key, value)) or causes.get((key, "*")):
        return exact
    prefixes = [prefix for prefix, _ in causes if prefix.endswith("*") and key.startswith(prefix[:-1])]
    return causes[max(prefixes, key=len), "*"] if prefixes else None


def find_eviction(reason: str, message: str) -> Sign | None:
    """Find the row of an evicted pod's message, which states whose limit was exceeded; None for any other pod."""
    return _find_first_match(EVICTIONS, message) if reason == _EVICTED else None


def classify_disruption(reason: str) -> Cause:
    """Return the cause of the reason of a pod's condition DisruptionTarget."""
    return find_cause(SignKind.DISRUPTION, reason) or Cause.PREEMPTED


# --- ends, by all their signs


def classify_failed_pod(
    *, reason: str, code: int | None, disrupted: bool, disruption: str = "", message: str = ""
) -> Cause:
    """Return why a pod in phase Failed ended.

    An exit code outside the contract means that the agent itself died; 0 and 75 mean that it was asked to end.
    """
    eviction = find_eviction(reason, message)
    if eviction is not None:
        return eviction.cause
    if disrupted:
        return classify_disruption(disruption)
    by_reason = find_cause(SignKind.POD_REASON, reason)
    # A runtime keeps OOMKilled although the container outlived its killed process and ended later, for another reason.
    if by_reason is not None and (by_reason is not Cause.OUT_OF_MEMORY or code in (None, KILLED)):
        return by_reason
    cause = Cause.POD_LOST if code is None else classify_exit_code(code).cause
    return Cause.POD_LOST if cause in (Cause.CRASH, Cause.YIELDED, Cause.FINISHED) else cause


def classify_pod_failure(
    *,
    reason: str,
    code: int | None,
    disrupted: bool,
    disruption: str = "",
    message: str = "",
    rules: Sequence[RecoveryRule] = (),
) -> Classification:
    """Classify a pod in phase Failed: by a rule of the job, else its reason, else its container's exit code."""
    ruled = match_rules(rules, code=code, reason=reason, texts=(message,))
    if ruled is not None:
        return ruled
    cause = classify_failed_pod(reason=reason, code=code, disrupted=disrupted, disruption=disruption, message=message)
    row, eviction = _ROWS[cause], find_eviction(reason, message)
    by_code = None if code is None else classify_exit_code(code)
    if by_code is not None and by_code.cause is row.cause:
        return by_code
    sentence = (eviction.sentence if eviction is not None else "") or row.sentence
    return Classification(row.cause, row.blame, get_responses_for_pod(suspects_node=row.suspects_node), sentence)


def select_kernel_lines(events: Iterable[TimedLine], at: float) -> tuple[str, ...]:
    """Return kernel lines that may explain a failure at `at` (Unix seconds of the same machine)."""
    return tuple(
        event.line for event in events if at - _KERNEL_BEFORE_SECONDS <= event.at <= at + _KERNEL_AFTER_SECONDS
    )


def classify_exit(
    code: int,
    *,
    runtime_status: int | None = None,
    output_line: str = "",
    message: str = "",
    kernel: Sequence[str] = (),
    rules: Sequence[RecoveryRule] = (),
) -> Classification:
    """Classify the end of a training process by all its signs.

    `kernel` are the kernel lines of its node from the time of the failure, `output_line` is the name of a row. The
    order is: a rule of the job, a device error in the kernel's log, a code that the process chose, the runtime's
    status, a kernel line that explains it, the line of output, the code.
    """
    status = find_runtime_status(runtime_status)
    ruled = match_rules(rules, code=code, reason=status.key if status else "", texts=(message, *kernel))
    if ruled is not None:
        return ruled
    by_code = classify_exit_code(code)
    if code in (ExitCode.USER_ERROR, ExitCode.OUT_OF_MEMORY, ExitCode.YIELDING, ExitCode.FINISHED):
        return by_code
    kernel_signs = [sign for sign in map(match_kernel_line, kernel) if sign is not None]
    decisive = next((sign for sign in kernel_signs if sign.decisive), None)
    if decisive is not None:
        return classify_sign(decisive)
    if status is not None and _may_refine(code, status.cause):
        return classify_sign(status)
    explaining = [sign for sign in kernel_signs if _kernel_line_explains(code, sign)]
    by_output = find_output_line(output_line)
    if by_output is not None and by_code is _CRASH and (code < SIGNAL_BASE or code == _ABORTED):
        by_code = classify_sign(by_output)
    if not explaining:
        return by_code
    return classify_sign(
        min(explaining, key=lambda sign: (not sign.of_container, sign.cause is not Cause.OUT_OF_MEMORY))
    )


def _may_refine(code: int, status_cause: Cause) -> bool:
    """Return whether a runtime status is more specific than the code."""
    if classify_exit_code(code).cause is Cause.CRASH:
        return True
    on_device = status_cause in (Cause.DEVICE, Cause.DEVICE_REPAIRABLE)
    if code == ExitCode.DEVICE_FAULT:
        return status_cause is Cause.DEVICE_REPAIRABLE
    return (code == ExitCode.PEER_LOST and (on_device or status_cause is Cause.NETWORK)) or (
        code == ExitCode.NUMERICAL and on_device
    )


def _kernel_line_explains(code: int, sign: Sign) -> bool:
    """Return whether a kernel line that is not a fault by itself explains an exit with this code."""
    if sign.of_container:  # also for the child of a rank, whose end the rank reports with another code
        return classify_exit_code(code).cause is Cause.CRASH
    if sign.cause is Cause.OUT_OF_MEMORY:
        return code == KILLED
    if code == ExitCode.STORAGE_UNAVAILABLE:
        return False
    return classify_exit_code(code).cause in (Cause.CRASH, Cause.PEER_LOST, Cause.HANG)


def match_rules(
    rules: Sequence[RecoveryRule], *, code: int | None = None, reason: str = "", texts: Sequence[str] = ()
) -> Classification | None:
    """Return the verdict of the first rule that matches a failure; None if none does.

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
        return _apply_rule(rule, index)
    return None


def _apply_rule(rule: RecoveryRule, index: int) -> Classification:
    responses = RULE_RESPONSES[rule.action]
    leaves = responses.first is Response.REPLACE_NODE
    if rule.cause in USER_CAUSES:
        blame, responses = Blame.USER, NEW_WORKER if leaves else responses
    elif rule.cause is Cause.PEER_LOST:
        blame = Blame.PEER
    else:
        blame = Blame.NODE if leaves else Blame.NOBODY
    return Classification(rule.cause, blame, responses, f"attributed to {rule.cause} by spec.recovery.rules[{index}]")
