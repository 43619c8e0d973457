"""Requests over a Unix socket: one JSON object per line each way; used with the supervisor and with the nodes."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def answers(path: Path) -> bool:
    """Return whether a process accepts requests at a socket; its file alone appears earlier."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
    except OSError:
        return False
    return True


def request(path: Path, message: Mapping[str, Any], timeout: float = 60.0) -> dict[str, Any]:
    """Send one request and return its answer; raises ClusterError when refused or not answered in `timeout` seconds."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
    except TimeoutError:
        raise ClusterError(f"{message.get('op')}: no answer from {path} within {timeout:.0f} s.") from None
    except OSError as error:
        raise ClusterError(f"{message.get('op')}: nobody answers at {path} ({error}); is it running?") from error
    try:
        answer = json.loads(line)
    except ValueError:
        raise ClusterError(f"{message.get('op')}: {path} closed the connection without an answer.") from None
    if not isinstance(answer, dict) or not answer.get("ok"):
        reason = answer.get("error") if isinstance(answer, dict) else None
        raise ClusterError(str(reason or f"{message.get('op')} was refused without a reason."))
    return answer
