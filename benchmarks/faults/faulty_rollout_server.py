"""Serve as `rollout_server.py` does, until a file beside the policies makes a server fail.

`garbage-ADDRESS` with the server's address in the name makes it answer no JSON, `slow-ADDRESS` after a minute.
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
    address, folder = os.environ["POD_IP"], Path(sys.argv[1])
    if handler.command == "POST" and (folder / f"slow-{address}").exists():
        time.sleep(_SLOW_SECONDS)
    if handler.command == "POST" and (folder / f"garbage-{address}").exists():
        _send_response(handler, code, message)
        handler.send_header("Content-Length", "9")
        handler.end_headers()
        handler.wfile.write(b"<garbage>")
        handler.close_connection = True
        raise ConnectionAbortedError
    _send_response(handler, code, message)


if __name__ == "__main__":
    BaseHTTPRequestHandler.send_response = _send_or_misbehave  # type: ignore[method-assign, assignment]
    runpy.run_path(str(Path(__file__).with_name("rollout_server.py")), run_name="__main__")
