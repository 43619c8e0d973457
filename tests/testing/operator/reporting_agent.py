"""One agent as the operator knows it, whichever model of a cluster runs it: its generation, and what it reports."""

import math
from dataclasses import dataclass, field
from typing import Any

from tests.testing.operator.wire_messages import process_failure
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.messages import (
    HeartbeatRequest,
    ProcessFailure,
    RegisterRequest,
    RestartRecord,
    WorkerPhase,
)

MAX_REPORTED = 8
"""Newest failures and restarts that a heartbeat contains."""


@dataclass
class ReportingAgent:
    """The records of an agent; the model that runs it decides when its ranks fail, restart and step."""

    registration: RegisterRequest
    generation: int = 0
    attempt: int = 0
    failures: list[ProcessFailure] = field(default_factory=list)
    restarts: list[RestartRecord] = field(default_factory=list)
    verdict: ProcessFailure | None = None

    def enter(self, generation: int) -> None:
        """Enter a newer generation, with its first attempt."""
        self.generation, self.attempt, self.verdict = generation, 0, None

    def build_failure(self, rank: int, code: int, *, step: int, at: float, message: str = "boom") -> ProcessFailure:
        """Return the failure of a process in the current attempt."""
        known = {"sequence": len(self.failures), "generation": self.generation, "attempt": self.attempt}
        return process_failure(code, rank=rank, step=step, message=message, at=at, **known)

    def restart_in_place(self, cause: Cause, *, step: int, at: float) -> None:
        """Begin the next attempt, because of a failure after this step."""
        self.attempt += 1
        self.restarts.append(
            RestartRecord(
                sequence=len(self.restarts),
                generation=self.generation,
                attempt=self.attempt,
                cause=cause,
                failed_at=at,
                detected_at=at,
                step_before=step,
            )
        )

    def record_resumption(self, at: float, *, reached: float = math.inf) -> None:
        """Complete the records of restarts, once the step that was `reached` is beyond the one before the failure."""
        for index, record in enumerate(self.restarts):
            if record.resumed_at is None and record.generation == self.generation and reached > record.step_before:
                update = {"resumed_at": at, "resume_step": record.step_before}
                self.restarts[index] = record.model_copy(update=update)

    def build_heartbeat(self, phase: WorkerPhase, **fields: Any) -> HeartbeatRequest:
        """Return a heartbeat with the newest records."""
        identity = {name: getattr(self.registration, name) for name in ("namespace", "job", "pod_name", "pod_uid")}
        records = {"failures": tuple(self.failures[-MAX_REPORTED:]), "restarts": tuple(self.restarts[-MAX_REPORTED:])}
        known = {"generation": self.generation, "attempt": self.attempt, "verdict": self.verdict}
        return HeartbeatRequest(**{**identity, **known, **records, "phase": phase, **fields})
