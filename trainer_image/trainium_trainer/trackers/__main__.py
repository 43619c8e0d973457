"""Send a run to its trackers: `python -m trainium_trainer.trackers`, started by rank 0 with messages on standard input.

Guarantees:
- A step is sent once: a restart continues after the tracker's newest step, and recomputed steps equal those that it
  has.
- An unreachable tracker is retried; metrics.jsonl keeps the missed steps, so nothing is queued.
- The process ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from trainium_contract.redaction import redact_secrets
from trainium_contract.worker_process import log_lines
from trainium_trainer.monitor.json_lines import read_step
from trainium_trainer.trackers.process import STARTS_NAME, STATE_NAME, TrackedRun
from trainium_trainer.trackers.services import SERVICES, Service, Step
from trainium_worker.progress_record import notice_path, replace_text

_log = logging.getLogger("trainium.trackers")
_POLL_SECONDS = 1.0
_RETRY_SECONDS = (2.0, 5.0, 15.0, 60.0)
_LEAVE_SECONDS = 5.0
_MAX_STEPS = 50
"""The maximum number of steps sent at once."""
_MAX_STARTS = 50
_NO_METRICS = frozenset({"step", "time"})


class Notes:
    """The starts and artifacts in the description of the run, shared by the threads of all trackers."""

    def __init__(self, run: TrackedRun) -> None:
        self._path = Path(run.metrics).with_name(STATE_NAME)
        self._lock = threading.Lock()
        try:
            self._state: dict[str, Any] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            self._state = {}
        self.run_id = run.run_id or self._state.get("run") or uuid.uuid4().hex
        if self._state.get("run") != self.run_id:
            self._state = {"run": self.run_id}
        self._artifacts: dict[str, dict[str, Any]] = {}
        self._facts = run.facts
        self._starts = _read_starts(self._path.with_name(STARTS_NAME), run.run_id) or [run.start]
        with self._lock:
            self._save()

    def find_last_step(self, tracker: str) -> int:
        """Return the newest step that was already sent."""
        return int(self._state.get("steps", {}).get(tracker, 0))

    def record(self, tracker: str, step: int) -> None:
        """Record the newest step that was sent."""
        with self._lock:
            self._state.setdefault("steps", {})[tracker] = step
            self._save()

    def add_artifact(self, artifact: dict[str, Any]) -> None:
        """Add an artifact to the description."""
        with self._lock:
            self._artifacts = {**self._artifacts, f"{artifact['kind']} {artifact['step']}": artifact}

    def format_text(self) -> str:
        """Return the description in Markdown."""
        starts = [f"- start {number}: {start}" for number, start in enumerate(self._starts, 1)][-_MAX_STARTS:]
        facts = [f"- {name}: `{value}`" for name, value in sorted(self._facts.items()) if isinstance(value, str)]
        artifacts = [
            f"- {artifact['kind']} of step {artifact['step']}: `{artifact['path']}` (digest `{artifact['digest']}`)"
            for artifact in self._artifacts.values()
        ]
        parts = (("Starts", starts), ("Fixed", facts), ("Artifacts", artifacts))
        return "\n\n".join("\n".join([f"### {title}", *lines]) for title, lines in parts if lines)

    def _save(self) -> None:
        try:
            replace_text(self._path, json.dumps(self._state))
        except OSError as error:
            _log.warning("%s: cannot be written (%s): steps may be sent twice", self._path, error.strerror)


def _read_starts(path: Path, run_id: str) -> list[str]:
    """Return the starts of this run; lines of other runs and an incomplete line are skipped."""
    starts = []
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError):
                run, start = json.loads(line)
                if run == run_id:
                    starts.append(str(start))
    return starts


class Sender(threading.Thread):
    """Sends the run to one tracker until `finish` or `leave`."""

    def __init__(self, name: str, service: Service, run: TrackedRun, notes: Notes) -> None:
        super().__init__(name=name, daemon=True)
        self._service = service
        self._run = run
        self._notes = notes
        self._finish = threading.Event()
        self._problem = ""

    def finish(self) -> None:
        """Send the remaining steps, then end."""
        self._finish.set()

    def leave(self) -> None:
        """Flush the tracker's buffers, if a run is open."""
        with contextlib.suppress(Exception):
            self._service.leave()

    def run(self) -> None:
        """Send new steps, with retries after failures."""
        failures = 0
        while True:
            try:
                self._send_all()
            except Exception as error:  # noqa: BLE001 - the libraries raise what their transports raise
                self._report(error)
                if self._finish.is_set() and failures:
                    return
                self._finish.wait(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
                failures += 1
            else:
                return

    def _send_all(self) -> None:
        """Open the run in the tracker and follow the file until the end."""
        parameters = self._service.open(self._run, self._notes.run_id)
        last = self._notes.find_last_step(self.name) if parameters is None else parameters
        if self._problem:
            _log.info("%s: sending again, from step %d", self.name, last + 1)
            self._problem = ""
        described, offset = "", 0
        while True:
            finishing = self._finish.is_set()
            if described != (text := self._notes.format_text()):
                self._service.describe(text)
                described = text
            offset, steps = _read_steps(Path(self._run.metrics), offset, last)
            if steps:
                self._service.send(steps)
                last = steps[-1].number
                self._notes.record(self.name, last)
            if len(steps) == _MAX_STEPS:
                continue
            if finishing:
                self._service.close()
                return
            self._finish.wait(_POLL_SECONDS)

    def _report(self, error: Exception) -> None:
        cause = redact_secrets(" ".join(str(error).split()) or type(error).__name__)[:300]
        if cause == self._problem:
            return
        self._problem = cause
        notice = (
            f"monitor.trackers: {self.name} does not take this run ({cause}): check its address and its key in the "
            "environment of the workers; training continues, and it is tried again"
        )
        _log.warning("%s", notice)
        if self._run.notice:
            try:
                replace_text(notice_path(Path(self._run.notice)), notice)
            except OSError:
                _log.warning("the notice cannot be left beside the progress record")


def _read_steps(path: Path, offset: int, last: int) -> tuple[int, list[Step]]:
    """Return the steps after `last` in the complete lines of a file from `offset` on, and the offset after them."""
    steps: list[Step] = []
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return offset, steps
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            if (read_step(line) or 0) > last:
                steps.append(_parse(line))
            if len(steps) == _MAX_STEPS:
                break
    return offset, steps


def _parse(line: bytes) -> Step:
    values = json.loads(line)
    figures = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name not in _NO_METRICS and math.isfinite(value)
    }
    return Step(values["step"], values["time"], figures)


def main() -> None:
    """Handle the messages of the parent process; end with it."""
    log_lines.configure_rank_logging(0)
    os.nice(10)
    first = sys.stdin.readline()
    if not first:
        return
    fields = json.loads(first)["run"]
    run = TrackedRun(**{**fields, "trackers": tuple(fields["trackers"])})
    notes = Notes(run)
    senders = [Sender(name, SERVICES[name](), run, notes) for name in run.trackers]
    for sender in senders:
        sender.start()
    for line in sys.stdin:
        message = json.loads(line)
        if "artifact" in message:
            notes.add_artifact(message["artifact"])
        if "finish" in message:
            for sender in senders:
                sender.finish()
            for sender in senders:
                sender.join()
            os._exit(0)  # threads of the libraries would keep the process alive
    # Rank 0 has ended. The next start sends the remaining steps, and this process must not send at the same time.
    threading.Timer(_LEAVE_SECONDS, os._exit, (1,)).start()
    for sender in senders:
        sender.leave()
    os._exit(1)


if __name__ == "__main__":
    main()
