"""Serve as `rollout_server.py` does, until a file beside the policies makes a server fail.

`garbage-ADDRESS` with the server's address in the name makes it answer no JSON, `slow-ADDRESS` after a minute. Each
request that meets it adds a line to the file.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

_SLOW_SECONDS = 60.0
_send_response = BaseHTTPRequestHandler.send_response


def _send_or_misbehave(handler: BaseHTTPRequestHandler, code: int, message: str | None = None) -> None:
    for how in ("slow", "garbage") if handler.command == "POST" else ():
        switch = Path(sys.argv[1]) / f"{how}-{os.environ['POD_IP']}"
        if switch.exists():
            with switch.open("a") as requests:
                requests.write(f"{time.time()}\n")
            _FAULTS[how](handler, code)
    _send_response(handler, code, message)


def _wait(_handler: BaseHTTPRequestHandler, _code: int) -> None:
    time.sleep(_SLOW_SECONDS)


def _answer_garbage(handler: BaseHTTPRequestHandler, code: int) -> None:
    _send_response(handler, code)
    handler.send_header("Content-Length", "9")
    handler.end_headers()
    handler.wfile.write(b"<garbage>")
    raise ConnectionAbortedError


_FAULTS = {"slow": _wait, "garbage": _answer_garbage}


if __name__ == "__main__":
    BaseHTTPRequestHandler.send_response = _send_or_misbehave  # type: ignore[method-assign, assignment]
    runpy.run_path(str(Path(__file__).with_name("rollout_server.py")), run_name="__main__")
