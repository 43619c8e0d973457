"""A TrainingJob as `kubectl get --watch` shows it, kept current by a thread."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OnChange = Callable[[dict[str, Any]], None]


class JobWatch:
    """Newest known state of one TrainingJob; `close` ends the thread and its kubectl."""

    def __init__(self, kubectl: Path, environment: Mapping[str, str], namespace: str, name: str) -> None:
        self.job: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [str(kubectl), "get", "trainingjob", name, "-n", namespace, "--watch", "-o", "json"],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def status(self) -> dict[str, Any]:
        """The status, empty before the operator has written one."""
        status: dict[str, Any] = self.job.get("status") or {}
        return status

    def history(self) -> list[dict[str, Any]]:
        """Interruptions, oldest first."""
        return list(self.status.get("history") or [])

    def wait_change(self, seconds: float) -> None:
        """Return at the next change, or after `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    def _read(self) -> None:
        # kubectl prints one indented document after another; a document ends with a brace in the first column.
        lines: list[str] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.append(line)
            if line.rstrip() == "}":
                with self._changed:
                    self.job = json.loads("".join(lines))
                    self._changed.notify_all()
                lines = []

    def close(self) -> None:
        """End the watch."""
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
