"""The HTTP server below the ones of tests: on loopback, at a free port, a thread a connection.

Invariant: a client that goes away leaves no trace. Python's own server prints a traceback of that into `sys.stderr`,
where a test may be reading the output of a command. Whatever else fails in a handler is printed.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_SECONDS = 0.05


class LoopbackServer(ThreadingHTTPServer):
    """Answers by a handler of `http.server`."""

    daemon_threads = True

    def __init__(self, handler: Callable[..., Any]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a failed handler."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Serve in a thread, and close."""
        thread = threading.Thread(target=self.serve_forever, args=(_POLL_SECONDS,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            thread.join()
