"""Run a Go command as a process: read its output, and end it with all its descendants.

Guarantees:
- When the block around a command ends (normally, by an error, by Ctrl-C), none of its processes is left.
- The command has a separate session, so that only this process passes on a Ctrl-C at the terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from typing import TYPE_CHECKING, Self

from trainium_devcluster.binaries import interrupts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_KEPT_LINES = 200
_END_SECONDS = 10.0
"""Time to remove the temporary folder, hundreds of megabytes, after an interrupt; a SIGKILL would leave it."""


class GoCommand:
    """A run of Go, which a `with` block starts and ends."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.packages = 0
        """Number of packages printed so far; with `-v` those that it compiles."""
        self._command, self._folder, self._environment = command, folder, environment
        self._downloads = 0
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._reader = threading.Thread(target=self._read_output, name="go-output", daemon=True)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            with interrupts.defer_interrupts():
                self._process = subprocess.Popen(
                    self._command,
                    cwd=self._folder,
                    env=self._environment,
                    text=True,
                    errors="replace",
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
                self._reader.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._output.close()
        process = self._process
        if process is None:
            return
        self._signal(process, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        self._signal(process, signal.SIGKILL)
        process.wait()
        if self._reader.ident is not None:
            self._reader.join()

    def wait_for_success(self, seconds: float) -> bool:
        """Return whether the command succeeds; raises subprocess.TimeoutExpired if it takes longer."""
        assert self._process is not None
        code = self._process.wait(seconds)
        self._reader.join()
        return code == 0

    def read_output(self) -> str:
        """Return the standard output."""
        self._output.seek(0)
        return self._output.read()

    def format_downloaded(self) -> str:
        """Return a text with the amount of downloaded data; empty if nothing was missing."""
        return f"{self._downloads} modules" if self._downloads else ""

    def read_last_errors(self) -> str:
        """Return the last lines of standard error."""
        return "\n".join(list(self._lines)[-12:])

    def _read_output(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.strip()
                if _is_package_line(text):
                    self.packages += 1
                elif text.startswith("go: downloading "):
                    self._downloads += 1
                elif text:
                    self._lines.append(text)

    @staticmethod
    def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
        """Signal the whole process group, because a failed command may leave processes."""
        if process.poll() != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _is_package_line(text: str) -> bool:
    """Return whether a line is the output of `go build -v`: only an import path."""
    return bool(text) and not any(sign in text for sign in " \t:#")
