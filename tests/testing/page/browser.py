"""Open pages in headless chromium over its DevTools protocol."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

from tests.testing.suite.timeouts import USUAL, scaled, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--remote-allow-origins=*", "--no-first-run", "--disable-background-networking", "--disable-extensions",
    "--window-size=1100,1400", "--no-proxy-server",
)  # fmt: skip


class Browser:
    """A browser with one tab."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self.console_errors: list[str] = []
        """Lines of the console: refusals of the policy, errors of scripts, resources that failed to load."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Navigate to a page and wait until it is loaded."""
        self._events.clear()
        self._call("Page.navigate", url=url)
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self._events), f"{url} is loaded")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        response = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in response, response
        return response["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        until(lambda: self.evaluate(expression), lambda: f"{expression}: {self.visible_text()[:2000]}")

    def visible_text(self) -> str:
        """Return the visible text."""
        return str(self.evaluate("document.body.innerText"))

    def save_screenshot(self, path: Path, *, height: int = 1400) -> None:
        """Write the top of the page as a PNG file."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        clip = {"x": 0, "y": 0, "width": 1100, "height": height, "scale": 1}
        response = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(response["data"]))

    def _until(self, condition: Any, what: str) -> None:
        while not condition():
            self._receive(what)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = self._receive(method)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])

    def _receive(self, what: str) -> dict[str, Any]:
        try:
            message: dict[str, Any] = json.loads(self._socket.recv())
        except websocket.WebSocketTimeoutException as error:
            raise AssertionError(f"the browser did not answer in time: {what}") from error
        if message.get("method") == "Log.entryAdded":
            self.console_errors.append(message["params"]["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.console_errors.append(json.dumps(message["params"]["exceptionDetails"]))
        elif "method" in message:
            self._events.append(message)
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser with a separate profile."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                port = _port(process)
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=scaled(USUAL)) as answer:
                    tabs = json.load(answer)
                url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                socket = websocket.create_connection(url, timeout=scaled(USUAL), suppress_origin=True)
                try:
                    yield Browser(socket)
                finally:
                    socket.close()
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(scaled(USUAL))


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    output = ""
    for line in process.stderr:
        output += line
        match = re.search(r"DevTools listening on ws://[^:]+:(\d+)/", line)
        if match:
            return int(match[1])
    raise AssertionError(f"no browser: {output}")
