"""Define the proof that a worker pod has finished: its agent's last heartbeat, as the pod's termination message.

A pod in phase Succeeded proves nothing: a kubelet also writes it for a container that ended with 0 on a signal. The
message also has the final figures, for an operator that was not running when the job ended.
"""

from __future__ import annotations

import json

from pydantic import ValidationError

from trainium_contract.wire.messages import PROTOCOL, HeartbeatRequest, WorkerPhase

MAX_COMPLETION_BYTES = 2048
"""A kubelet keeps 12 KiB of all containers of a pod, so these of six containers are whole."""
_KEPT_RESTARTS = 2


def encode_completion(heartbeat: HeartbeatRequest) -> str:
    """Return the termination message of a finished worker: as much of its last heartbeat as the message can hold."""
    message = heartbeat.replaced(stuck=(), kernel=(), checks=(), compiled=(), waiting_for=(), verdict=None)
    text = _encode(message)
    if len(text.encode()) > MAX_COMPLETION_BYTES and message.progress is not None:
        failures = tuple(failure.replaced(message="") for failure in message.failures)
        progress = message.progress.replaced(notice="", problem="", alerts=())
        text = _encode(message.replaced(progress=progress, failures=failures))
    if len(text.encode()) > MAX_COMPLETION_BYTES and message.progress is not None:
        progress = message.progress.replaced(notice="", problem="", alerts=(), artifacts=(), evaluation=())
        text = _encode(message.replaced(progress=progress, failures=(), restarts=message.restarts[-_KEPT_RESTARTS:]))
    return text


def parse_completion(text: str, pod_uid: str) -> HeartbeatRequest | None:
    """Return the last heartbeat of a worker that finished; None if the message is not one of this pod's agent."""
    if not text.startswith("{") or len(text) > 2 * MAX_COMPLETION_BYTES:
        return None
    try:
        heartbeat = HeartbeatRequest.model_validate_json(text)
    except ValidationError:
        return None
    is_finished = heartbeat.phase is WorkerPhase.FINISHED and heartbeat.generation > 0
    return heartbeat if is_finished and heartbeat.pod_uid == pod_uid else None


def _encode(message: HeartbeatRequest) -> str:
    fields = message.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return json.dumps({"protocol": PROTOCOL, **fields}, separators=(",", ":"))
