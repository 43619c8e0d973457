"""Base of the HTTP servers of tests: on loopback, at a free port, with a thread for each connection.

A client that disconnects leaves no traceback on `sys.stderr`, where a test may read the output of a command. Other
errors of a handler are printed.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any, Self

_POLL_SECONDS = 0.05


class LoopbackServer(ThreadingHTTPServer):
    """Serves an `http.server` handler on a free loopback port."""

    daemon_threads = True

    def __init__(self, handler: Callable[..., Any]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        """Return the URL of the server."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a handler unless the client closed the connection."""
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
