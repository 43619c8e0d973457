"""Define the last report of an agent: its last heartbeat, as the pod's termination message.

It has the final figures, for an operator that was not running when the pod ended. With code 0 it also proves that the
worker has finished: a kubelet writes phase Succeeded for any container that ended with 0 on a signal, too.

The first line is the heartbeat as JSON. Further lines are text for people: why the pod ended.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.messages import PROTOCOL, HeartbeatRequest, WorkerPhase

if TYPE_CHECKING:
    from trainium_contract.wire.messages import ProcessFailure

MAX_MESSAGE_BYTES = 4096
"""A kubelet keeps the last 4 KiB of a container's message."""
MAX_REPORT_BYTES = 2048
"""A kubelet keeps 12 KiB of all containers of a pod, so these of six containers are whole."""
_KEPT_RESTARTS = 2
_VERDICT_CHARACTERS = 1024


def encode_last_report(heartbeat: HeartbeatRequest, text: str = "") -> str:
    """Return the termination message of a worker: as much of its last heartbeat as it can hold, and the text.

    The verdict's message is the text if there is one, and then not in the heartbeat.
    """
    verdict = heartbeat.verdict
    kernel = heartbeat.kernel if verdict is not None else ()
    message = heartbeat.replaced(stuck=(), kernel=kernel, checks=(), compiled=(), waiting_for=())
    if verdict is not None:
        text = verdict.message or text
        message = _set_verdict_message(message, verdict, "")
    line = _encode(message)
    if len(line.encode()) > MAX_REPORT_BYTES:
        failures = tuple(failure.replaced(message="") for failure in message.failures)
        progress = message.progress and message.progress.replaced(notice="", problem="", alerts=())
        message = message.replaced(progress=progress, failures=failures)
        line = _encode(message)
    if len(line.encode()) > MAX_REPORT_BYTES:
        progress = message.progress and message.progress.replaced(artifacts=(), evaluation=())
        failures = tuple(failure for failure in message.failures if _is_same(failure, verdict))
        restarts = message.restarts[-_KEPT_RESTARTS:]
        line = _encode(message.replaced(progress=progress, failures=failures, restarts=restarts, kernel=()))
    kept_bytes = MAX_MESSAGE_BYTES - len(line.encode()) - len("\n\n")
    kept_text = text.strip().encode()[:kept_bytes].decode(errors="ignore")
    return f"{line}\n{kept_text}" if kept_text else line


def parse_last_report(message: str, pod_uid: str, exit_code: int | None) -> tuple[HeartbeatRequest | None, str]:
    """Return the last heartbeat of a worker and the text for people.

    The heartbeat is None, and the text the whole message, if the message is not one of this pod's agent at its end
    with this code.
    """
    line, _, text = message.partition("\n")
    if not line.startswith("{") or len(message) > 2 * MAX_MESSAGE_BYTES:
        return None, message
    try:
        heartbeat = HeartbeatRequest.model_validate_json(line)
    except ValidationError:
        return None, message
    if (
        heartbeat.generation == 0
        or heartbeat.pod_uid != pod_uid
        or exit_code not in _list_expected_exit_codes(heartbeat)
    ):
        return None, message
    if heartbeat.verdict is not None:
        heartbeat = _set_verdict_message(heartbeat, heartbeat.verdict, text.rstrip("\n")[:_VERDICT_CHARACTERS])
    return heartbeat, text


def _list_expected_exit_codes(heartbeat: HeartbeatRequest) -> tuple[int, ...]:
    if heartbeat.phase is WorkerPhase.FINISHED:
        return (ExitCode.FINISHED,)
    verdict = heartbeat.verdict
    return (ExitCode.YIELDING,) if verdict is None else (ExitCode.YIELDING, verdict.exit_code)


def _set_verdict_message(heartbeat: HeartbeatRequest, verdict: ProcessFailure, message: str) -> HeartbeatRequest:
    """Return the heartbeat with this message of the verdict, also where the verdict is among the failures."""
    failures = tuple(
        failure.replaced(message=message) if _is_same(failure, verdict) else failure for failure in heartbeat.failures
    )
    return heartbeat.replaced(verdict=verdict.replaced(message=message), failures=failures)


def _is_same(failure: ProcessFailure, verdict: ProcessFailure | None) -> bool:
    return verdict is not None and failure.sequence == verdict.sequence


def _encode(message: HeartbeatRequest) -> str:
    fields = message.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return json.dumps({"protocol": PROTOCOL, **fields}, separators=(",", ":"))
