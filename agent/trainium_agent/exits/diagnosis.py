"""Diagnose the end of a training process from all signs on this pod.

Exit code, runtime status, kernel lines and rules are classified as the operator classifies them (`faults.classify`).

Guarantees:
- Rules are read again for each failure, so a change applies to running pods. Unreadable rules are ignored, because
  training must recover without them.
- No call waits longer than 0.25 s.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from trainium_agent.exits.kernel_log import KernelEvents
from trainium_agent.exits.memory_kills import MemoryKills
from trainium_agent.ranks.runtime_status import format_message
from trainium_contract.exit_codes import KILLED, SIGNAL_BASE
from trainium_contract.faults.causes import Blame, Cause
from trainium_contract.faults.classify import classify_exit, classify_exit_code, select_kernel_lines
from trainium_contract.faults.responses import Response
from trainium_contract.faults.rules import RecoveryRule
from trainium_contract.program_output import explains_exit, find_error, starts_report, strip_margin
from trainium_contract.redaction import redact_secrets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.ranks.runtime_status import RuntimeMessage
    from trainium_contract.faults.classify import Classification

_log = logging.getLogger(__name__)
_RULES: TypeAdapter[tuple[RecoveryRule, ...]] = TypeAdapter(tuple[RecoveryRule, ...])
_LAST_OUTPUT_SECONDS = 0.25
_REMEMBERED = 32
_MEMORY_SECONDS = 7 * 86_400.0
MESSAGE_CHARACTERS = 1024
"""Longest message of a failure."""
_RUNTIME_MESSAGE_CHARACTERS = 320
_LINES_OF_ERROR = 8
"""Most lines after the line of an error that are taken for the rest of its message, or advice of a framework."""
_LINES_OF_KILLED = 3
"""No output explains a SIGKILL, but the newest lines show how far the process was."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The meaning of one exit, and whether this pod's node has failed the same way before."""

    verdict: Classification
    seen_before: bool
    """For a cause of this node: within a week, during the life of this pod."""


def find_last_runtime_message(process: RankProcess) -> RuntimeMessage | None:
    """Return the most specific message of the runtime in the process's output before it ended."""
    return process.output.find_last_message(process.ended_at or time.time())


def describe_exit(process: RankProcess) -> str:
    """Describe why a process ended, without secrets: its reason first, then as many lines before it as fit, in order.

    A program that ends by itself gives the reason in its last error or line. That comes first, where no reader that
    shortens the message cuts it off; output of success is ignored. The runtime's message comes first when later output
    has displaced it from the last lines. Without either, the message is the meaning of the code.
    """
    code = process.exit_code or 0
    output = redact_secrets(process.output.read_text(4 * MESSAGE_CHARACTERS)).split("\n")
    lines = [line for line in output if explains_exit(line)] or output
    reason, others = _find_reason(code, [strip_margin(line) for line in lines])
    message = find_last_runtime_message(process)
    if message is not None and message.line not in "\n".join(reason + others)[: MESSAGE_CHARACTERS // 2]:
        reason.insert(code > SIGNAL_BASE, redact_secrets(format_message(message))[:_RUNTIME_MESSAGE_CHARACTERS])
    head = "\n".join(filter(None, reason))[:MESSAGE_CHARACTERS] or classify_exit_code(code).sentence
    rest, capacity = "\n".join(others), MESSAGE_CHARACTERS - len(head) - 1
    if len(rest) > capacity:
        rest = _drop_partial_line(rest[-capacity:]) if capacity > 0 else ""
    return f"{head}\n{rest}" if rest else head


def _find_reason(code: int, lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the lines that give the reason, and the others, in their order."""
    if code > SIGNAL_BASE:
        shown = lines[-_LINES_OF_KILLED:] if code == KILLED else lines
        return [f"killed by signal {code - SIGNAL_BASE}"], shown
    position = find_error(lines)
    if position is None:
        position = len(lines) - 1
    error = lines[position]
    message = list(takewhile(lambda line: not starts_report(line), lines[position + 1 :]))
    others = [line for line in lines[:position] if line != error] + lines[position + 1 + len(message) :]
    if len(message) <= _LINES_OF_ERROR:
        return [error, *message], others
    count = _LINES_OF_ERROR - 1
    return [error, *message[:count], message[-1]], [*others, *message[count:-1]]


def _drop_partial_line(cut: str) -> str:
    """Drop the first line of a text that was cut at its front."""
    return cut.partition("\n")[2]


def exit_priority(verdict: Classification) -> tuple[bool, bool, bool]:
    """Return the priority of an exit: of simultaneous exits the one with the highest priority decides."""
    replaces = verdict.response in (Response.REPLACE_NODE, Response.REPLACE_WORKER)
    return verdict.response is Response.STOP, replaces, not verdict.indirect


class ExitDiagnoser:
    """Reads the signs of this pod's failures; only the worker thread may call its methods."""

    def __init__(self, rules_path: Path | None, on_event: Callable[[], None]) -> None:
        self._rules_path = rules_path
        self._earlier: deque[tuple[float, Cause]] = deque(maxlen=_REMEMBERED)
        self._logged_problem = ""
        self.kernel = KernelEvents(on_event)
        self.memory_kills = MemoryKills(self.kernel)

    def diagnose(self, process: RankProcess) -> Diagnosis:
        """Diagnose the end of this process and remember the diagnosis."""
        verdict = self.classify(process)
        at = process.ended_at
        is_repeated = any(cause is verdict.cause and at - before < _MEMORY_SECONDS for before, cause in self._earlier)
        self._earlier.append((at, verdict.cause))
        return Diagnosis(verdict, is_repeated and verdict.blame is Blame.NODE and not verdict.indirect)

    def classify(self, process: RankProcess) -> Classification:
        """Classify this process's end by all signs of this pod."""
        process.output.complete.wait(_LAST_OUTPUT_SECONDS)  # the last lines are still in the pipe
        self.memory_kills.observe()
        message = find_last_runtime_message(process)
        return classify_exit(
            process.exit_code or 0,
            runtime_status=message.status if message is not None else None,
            output_line=process.output.find_last_error_sign(),
            message=describe_exit(process),
            kernel=select_kernel_lines(self.kernel.newest, process.ended_at),
            rules=self._read_rules(),
        )

    def _read_rules(self) -> tuple[RecoveryRule, ...]:
        if self._rules_path is None:
            return ()
        try:
            return _RULES.validate_json(self._rules_path.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, ValidationError) as error:
            problem = f"{type(error).__name__} {error}".splitlines()[0]
            if problem != self._logged_problem:
                _log.warning("the job's rules in %s cannot be read (%s); going without", self._rules_path, problem)
                self._logged_problem = problem
            return ()
