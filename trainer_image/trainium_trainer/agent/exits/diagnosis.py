"""What the end of a training process stands for, all signs of this pod together: the agent's side of the fault table.

Code, runtime status, kernel lines and rules are read as the operator reads them (`faults.classify`). Invariants:
rules are read anew for each failure, so a change reaches pods that run; rules that cannot be read are as good as none,
because training must heal without them; nothing here waits longer than a moment.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from trainium_contract.faults.causes import Blame, Cause
from trainium_contract.faults.classify import classify_exit, classify_exit_code, select_kernel_lines
from trainium_contract.faults.responses import Response
from trainium_contract.faults.rules import RecoveryRule
from trainium_contract.program_output import explains_exit
from trainium_contract.redaction import redact_secrets
from trainium_trainer.agent.exits.kernel_log import KernelEvents
from trainium_trainer.agent.ranks.runtime_status import named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainium_contract.faults.classify import Verdict
    from trainium_trainer.agent.ranks.processes import RankProcess
    from trainium_trainer.agent.ranks.runtime_status import RuntimeWord

_log = logging.getLogger(__name__)
_RULES: TypeAdapter[tuple[RecoveryRule, ...]] = TypeAdapter(tuple[RecoveryRule, ...])
_LAST_WORDS_SECONDS = 0.25
_REMEMBERED = 32
_MEMORY_SECONDS = 7 * 86_400.0
MESSAGE_CHARACTERS = 1024
"""What a failure's message holds at most."""
_WORD_CHARACTERS = 320
_SIGNAL_BASE = 128


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The meaning of one exit, and whether this pod's node has failed the same way before."""

    verdict: Verdict
    seen_before: bool
    """For a cause of this node: within a week, in this pod's life."""


def last_word(process: RankProcess) -> RuntimeWord | None:
    """Return the most telling thing that the runtime said through the process's output before it ended."""
    return process.output.last_word(process.ended_at or time.time())


def describe_exit(process: RankProcess) -> str:
    """Why a process ended, without secrets: its last word first, then the lines before it, as many as fit.

    A program that ends by itself says why in its last line, so that comes first, where nobody who shortens the message
    cuts it; what went well says nothing about the end. The runtime's word stands at the beginning when what came
    after it has driven it out of the last lines; what the code means where the output does not tell.
    """
    code = process.exit_code or 0
    output = _why_first(code, redact_secrets(process.output.text(4 * MESSAGE_CHARACTERS)))
    word = last_word(process)
    heads = []
    if code > _SIGNAL_BASE:
        heads.append(f"killed by signal {code - _SIGNAL_BASE}")
    elif not output:
        heads.append(classify_exit_code(code).sentence)
    if word is not None and word.line not in output[: MESSAGE_CHARACTERS // 2]:
        heads.append(redact_secrets(named(word))[:_WORD_CHARACTERS])
    head = "\n".join(heads)
    room = MESSAGE_CHARACTERS - len(head) - (1 if head else 0)
    return "\n".join(part for part in (head, _shortened(code, output, room)) if part)


def _why_first(code: int, output: str) -> str:
    lines = [line for line in output.split("\n") if explains_exit(line)] or output.split("\n")
    if 0 < code <= _SIGNAL_BASE:
        lines = [lines[-1], *lines[:-1]]
    return "\n".join(lines)


def _shortened(code: int, output: str, room: int) -> str:
    """Return the first line and the newest of the others; of a process that was killed the newest."""
    if len(output) <= room:
        return output
    first, _, rest = output.partition("\n")
    if code > _SIGNAL_BASE or len(first) >= room - 2:
        return _whole_lines(output[-room:]) if code > _SIGNAL_BASE else output[:room]
    return f"{first}\n{_whole_lines(rest[-(room - len(first) - 1) :])}"


def _whole_lines(cut: str) -> str:
    """Text that was cut at its front, without the rest of the line that was cut, unless that is all."""
    return cut.partition("\n")[2] or cut


def weight(verdict: Verdict) -> tuple[bool, bool, bool]:
    """Of several exits at the same moment the one with the greatest weight decides."""
    replaces = verdict.response in (Response.REPLACE_NODE, Response.REPLACE_WORKER)
    return verdict.response is Response.STOP, replaces, not verdict.indirect


class Signs:
    """Reads the signs of this pod's failures; `kernel` may be asked by any thread, the rest is the worker's."""

    def __init__(self, rules_path: Path | None, on_event: Callable[[], None]) -> None:
        self._rules_path = rules_path
        self._earlier: deque[tuple[float, Cause]] = deque(maxlen=_REMEMBERED)
        self._complained = ""
        self.kernel = KernelEvents(on_event)

    def diagnose(self, process: RankProcess) -> Diagnosis:
        """What the end of this process stands for; remembers it."""
        verdict = self.meaning(process)
        at = process.ended_at
        seen = any(cause is verdict.cause and at - before < _MEMORY_SECONDS for before, cause in self._earlier)
        self._earlier.append((at, verdict.cause))
        return Diagnosis(verdict, seen and verdict.blame is Blame.NODE and not verdict.indirect)

    def meaning(self, process: RankProcess) -> Verdict:
        """What the end of this process stands for."""
        process.output.complete.wait(_LAST_WORDS_SECONDS)  # the last lines are on their way through a pipe
        word = last_word(process)
        return classify_exit(
            process.exit_code or 0,
            runtime_status=word.status if word is not None else None,
            message=describe_exit(process),
            kernel=select_kernel_lines(self.kernel.newest, process.ended_at),
            rules=self._rules(),
        )

    def _rules(self) -> tuple[RecoveryRule, ...]:
        if self._rules_path is None:
            return ()
        try:
            return _RULES.validate_json(self._rules_path.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, ValidationError) as error:
            complaint = f"{type(error).__name__} {error}".splitlines()[0]
            if complaint != self._complained:
                _log.warning("the job's rules in %s cannot be read (%s); going without", self._rules_path, complaint)
                self._complained = complaint
            return ()
